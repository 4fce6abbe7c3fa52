#!/usr/bin/env bash
# fuzz.sh SECONDS: builds the libFuzzer targets with clang 14 and runs each for that long.
# fuzz.sh SECONDS INPUTS: all together run that many inputs, each target the same share for SECONDS at
# most, in as many processes as there are cores.
source "$(dirname "$0")/phases.sh"
begin fuzz
seconds=${1:-60}
inputs=${2:-0}
phase "configure (fuzz)" cmake --preset fuzz
targets=$(ninja -C build/fuzz -t targets all | sed -nE 's/^(fuzz_[a-z_]+): phony.*/\1/p' | sort -u)
[ -n "$targets" ] || { echo "no fuzz target in the build" >> "$log"; fail "ninja -t targets"; }
# shellcheck disable=SC2086
phase "build" cmake --build --preset fuzz --target $targets

# Only -runs and the time differ; a run ends at whichever comes first. X.dict beside X_fuzz.cc holds
# words of the format that a target would not guess.
fuzz_one() {  # TARGET RUNS SECONDS
  local program dict
  program=$(find build/fuzz -name "$1" -type f -perm -u+x)
  dict=$(find src -name "${1#fuzz_}.dict")
  mkdir -p "out/corpus/$1"
  "$program" -runs="$2" -max_total_time="$3" -timeout=10 -rss_limit_mb=4096 -max_len="${MAX_LEN:-4096}" \
    -print_final_stats=1 ${dict:+"-dict=$dict"} "out/corpus/$1"
}
executed() { sed -nE 's/^stat::number_of_executed_units: *([0-9]+)/\1/p' "$@" | awk '{n += $1} END {print n + 0}'; }

if [ "$inputs" -eq 0 ]; then
  for t in $targets; do phase "$t for $seconds s" fuzz_one "$t" -1 "$seconds"; done
  verdict "$(executed "$log") inputs, no crash, no hang, no leak"
  exit
fi

export -f fuzz_one
count=$(echo "$targets" | wc -w)
share=$(((inputs + count - 1) / count))
mkdir -p out/fuzz && rm -f out/fuzz/*.log
run_all() {
  # shellcheck disable=SC2086
  printf '%s\n' $targets |
    xargs -P "$(nproc)" -I{} bash -c "fuzz_one {} $share $seconds > out/fuzz/{}.log 2>&1 || { tail -20 out/fuzz/{}.log; exit 255; }"
}
phase "$count targets, $share inputs each, at most $seconds s" run_all
for t in $targets; do printf '  %-24s %12d inputs\n' "$t" "$(executed "out/fuzz/$t.log")"; done
total=$(executed out/fuzz/*.log)
[ "$total" -ge "$inputs" ] || { echo "only $total of $inputs inputs in the time" | tee -a "$log"; fail "fuzz_one"; }
verdict "$total inputs, no crash, no hang, no leak"
