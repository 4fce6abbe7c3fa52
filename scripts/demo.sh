#!/usr/bin/env bash
# make demo: the main job on the bundled model, with two expert-parallel ranks, on the CPU.
source "$(dirname "$0")/phases.sh"
begin demo
model=models/mini
echo "make demo: about 230 MB of Debian packages if none is there, then a build of the CPU program:"
echo "up to 10 minutes on 2 cores the first time, half a minute after that. No GPU needed."
# shellcheck disable=SC2086
install $base_packages
[ -f build/release/CMakeCache.txt ] || phase "configure" cmake --preset release -DSORTIE_TESTS=OFF
phase "build sortie" cmake --build --preset release --target sortie
sortie=build/release/src/cli/sortie

# show COMMAND...: prints the command and its output, which also goes to the log.
show() {
  printf '\n$ %s\n' "$*" | tee -a "$log"
  "$@" 2>&1 < /dev/null | tee -a "$log"
  [ "${PIPESTATUS[0]}" = 0 ] || fail "$*"
}

echo
echo "The bundled model has 14.6 M parameters. It was trained on grade-school word problems and knows"
echo "nothing else."
show $sortie doctor $model --ep-size 2

echo
echo "1. Quantise its experts to int4 (w4afp8) and int8, and compare the sizes."
rm -rf out/demo-w4afp8 out/demo-w8a8
phase "sortie quantize, w4afp8" $sortie quantize $model out/demo-w4afp8 --format w4afp8 --dense fp8_block
phase "sortie quantize, w8a8_int8" $sortie quantize $model out/demo-w8a8 --format w8a8_int8
for form in "bf16 $model" "int8 out/demo-w8a8" "int4 out/demo-w4afp8"; do
  read -r what folder <<< "$form"
  printf '   %-5s %5.1f MiB\n' "$what" "$(du -cb "$folder"/*.safetensors | tail -1 |
    awk '{print $1 / 1048576}')"
done

echo
echo "2. A word problem, answered by the int4 model on two expert-parallel ranks."
row=$(sed -n 12p $model/eval.jsonl)
question=$(sed -E 's/.*"question": "(.*)", "answer": .*/\1/' <<< "$row")
expected=$(sed -E 's/.*"answer": "(.*)"\}$/\1/' <<< "$row")
show $sortie run out/demo-w4afp8 --chat --ep-size 2 --stats -p "$question"
printf '\nexpected:\n%b\n' "$expected"

echo
echo "3. The same tokens from 1 and 2 ranks."
ids() { $sortie run out/demo-w4afp8 --quiet --print-ids --max-new-tokens 60 --ep-size "$1" -p "$question" 2>> "$log"; }
one=$(ids 1)
two=$(ids 2)
[ -n "$one" ] && [ "$one" = "$two" ] || fail "the tokens from 1 rank ($one) and 2 ranks ($two) differ"
echo "   $(wc -w <<< "$one") tokens, equal: ${one:0:60}…"

echo
echo "4. A rank is killed in the middle of an answer (ranks are processes here)."
$sortie run $model --quiet --moe-a2a-backend ucx --ep-size 2 --ignore-eos --max-new-tokens 1900 \
  -p "$question" > out/demo-killed.txt 2> out/demo-killed.err < /dev/null &
front=$!
for _ in $(seq 300); do  # until it streams
  [ -s out/demo-killed.txt ] && break
  sleep 0.1
done
for stat in /proc/[0-9]*/stat; do
  read -r pid _ _ parent _ < "$stat" 2> /dev/null || continue
  [ "$parent" = "$front" ] && kill -9 "$pid"
done
wait $front
code=$?
cat out/demo-killed.err >> "$log"
echo "   exit code $code: $(tail -n 1 out/demo-killed.err)"
[ $code = 1 ] && grep -q 'rank 1' out/demo-killed.err || fail "a killed rank must end the run with its sentence"

cat << E2

Try next:
  $sortie run $model --chat                      # a conversation
  $sortie eval gsm8k $model --data $model/eval.jsonl --num-questions 100 --ep-size 2
  $sortie bench op                               # the kernels against this machine's memory
E2
verdict "passed"
