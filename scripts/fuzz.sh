#!/usr/bin/env bash
# fuzz.sh SECONDS: builds the libFuzzer targets with clang 14 and runs each for that long.
source "$(dirname "$0")/phases.sh"
begin fuzz
seconds=${1:-60}
phase "configure (fuzz)" cmake --preset fuzz
targets=$(ninja -C build/fuzz -t targets all | sed -nE 's/^(fuzz_[a-z_]+): phony.*/\1/p' | sort -u)
[ -n "$targets" ] || { echo "no fuzz target in the build" >> "$log"; fail "ninja -t targets"; }
# shellcheck disable=SC2086
phase "build" cmake --build --preset fuzz --target $targets
for t in $targets; do
  program=$(find build/fuzz -name "$t" -type f -perm -u+x)
  mkdir -p "out/corpus/$t"
  phase "$t for $seconds s" "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 -max_len=65536 \
    -print_final_stats=1 "out/corpus/$t"
done
verdict "no crash, no hang, no leak"
