#!/usr/bin/env bash
# make eval: all 700 questions of the bundled problems in each format, against the bars of
# docs/acceptance.md: bf16 98.9 %, w8a8_int8 within 0.5 points of it, w4afp8 within 1.5.
source "$(dirname "$0")/phases.sh"
begin eval
questions=${QUESTIONS:-700}
sortie=${SORTIE:-build/release/src/cli/sortie}
[ -x "$sortie" ] || { echo "build first: make test"; exit 1; }
accuracy() {  # FORM FLAG...: prints percent
  local form=$1
  shift
  "$sortie" eval gsm8k models/mini --data models/mini/eval.jsonl --num-questions "$questions" --json --quiet \
    "$@" > "out/eval-$form.json" 2>> "$log" || fail "eval of $form"
  sed -E 's/.*"accuracy":([0-9.]+).*/\1/' "out/eval-$form.json" | awk '{printf "%.2f", $1 * 100}'
}
bf16=$(accuracy bf16)
echo "bf16       $bf16 %"
w8a8=$(accuracy w8a8_int8 --quantization w8a8_int8)
echo "w8a8_int8  $w8a8 %"
w4afp8=$(accuracy w4afp8 --quantization w4afp8)
echo "w4afp8     $w4afp8 %"
if [ "$questions" -ge 700 ]; then
  awk -v a="$bf16" -v b="$w8a8" -v c="$w4afp8" 'BEGIN { exit !(a >= 98.9 && b >= a - 0.5 && c >= a - 1.5) }' ||
    fail "the bars: bf16 >= 98.9, w8a8_int8 within 0.5 and w4afp8 within 1.5 points of it"
else
  # A short cut has wide intervals: nothing may be clearly broken.
  awk -v a="$bf16" -v b="$w8a8" -v c="$w4afp8" 'BEGIN { exit !(a >= 93 && b >= 90 && c >= 88) }' ||
    fail "an accuracy is far below its bar on $questions questions"
fi
verdict "passed"
