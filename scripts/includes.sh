#!/usr/bin/env bash
# Rooms include only what their row allows (docs/design.md). Prints each offence; fails on any.
cd "$(dirname "$0")/.." || exit 1
declare -A may=(
  [base]="base"
  [quant]="base quant"
  [ops]="base quant ops"
  [backends/reference]="base quant ops backends/reference"
  [backends/cpu]="base quant ops backends/cpu backends/reference"
  [backends/cuda]="base quant ops backends/cuda"
  [exchange]="base quant exchange"
  [kv]="base kv"
  [model]="base quant ops exchange kv model"
  [engine]="base quant ops exchange kv model engine"
  [text]="base text"
)
status=0
for room in "${!may[@]}"; do
  while IFS=: read -r file line text; do
    included=$(sed -E 's/.*#include "([^"]+)".*/\1/' <<< "$text")
    target=$(dirname "$included")
    ok=0
    for allowed in ${may[$room]}; do
      [[ $target == "$allowed" || $target == "$allowed"/* ]] && ok=1
    done
    # Tests may join rooms: an integration test is a small main.
    [[ $file == *_test.cc || $file == *_test_*.h ]] && ok=1
    if [ $ok = 0 ]; then
      echo "$file:$line: room $room may not include \"$included\""
      status=1
    fi
  done < <(grep -rn '#include "' "src/$room" --include=*.h --include=*.cc --include=*.cu --include=*.cuh)
done
exit $status
