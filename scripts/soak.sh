#!/usr/bin/env bash
# make soak: long runs of what CI takes a short cut of. INPUTS sets how many the fuzz targets run
# together, SECONDS_EACH the most time of one.
source "$(dirname "$0")/phases.sh"
begin soak
# shellcheck disable=SC2086
install $base_packages $test_packages
phase "configure" cmake --preset release -DSORTIE_TESTS=ON
phase "build" cmake --build --preset release --target cli_test engine_test
phase "two hosts: loss, delay, a cut of 30 s" \
  env SORTIE_SOAK=1 build/release/src/cli/cli_test --gtest_filter='Hosts.*'
phase "lost ranks: random faults" \
  env SORTIE_SOAK_SECONDS=600 build/release/src/engine/engine_test --gtest_filter='Loss.*'
bash scripts/fuzz.sh "${SECONDS_EACH:-43200}" "${INPUTS:-100000000}" || exit 1
verdict "passed"
