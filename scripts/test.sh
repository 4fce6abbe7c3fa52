#!/usr/bin/env bash
# make test: builds everything and runs the unit and suite tiers.
source "$(dirname "$0")/phases.sh"
begin test
echo "make test: about 250 MB of Debian packages if none is there, then a build and the tests:"
echo "up to 20 minutes on 2 cores, no GPU needed."
# shellcheck disable=SC2086
install $base_packages $test_packages
preset=${PRESET:-release}
phase "configure ($preset)" cmake --preset "$preset" -DSORTIE_TESTS=ON
phase "build" cmake --build --preset "$preset"
printf 'tests\n'
t0=$SECONDS
ctest --test-dir "build/$preset" --output-on-failure --timeout 600 2>&1 | tee -a "$log" | grep -E 'Test +#|tests passed|tests failed' ||
  true
grep -q '100% tests passed' "$log" || fail "ctest --test-dir build/$preset"
echo "tests took $((SECONDS - t0)) s"
verdict "passed"
