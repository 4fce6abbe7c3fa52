#!/bin/bash
# A CPU peer and Sortie on one model shape in turn, so that both meet the same memory and neighbours.
# usage: scripts/peer_cpu.sh LLAMA_BENCH MODEL.gguf [FORMAT] [ROUNDS]
#   LLAMA_BENCH   llama-bench of ik_llama.cpp or llama.cpp; PEER_FLAGS (default "-rtr 1") goes to it
#   MODEL.gguf    DeepSeek-V2-Lite's shape
#   FORMAT        Sortie's: w4afp8 beside Q4_0 experts (default), w8a8_int8 beside Q8_0
# Prints tokens/s a round. Bytes a token differ between the formats: compare by those, which
# `sortie bench decode --json` prints.
set -eu
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
peer=$1
model=$2
format=${3:-w4afp8}
rounds=${4:-3}
sortie=${SORTIE:-build/src/cli/sortie}
for file in "$peer" "$sortie"; do
  [ -x "$file" ] || { echo "$file is not a program: build it or name another (SORTIE=...)" >&2; exit 2; }
done
[ -r "$model" ] || { echo "$model cannot be read" >&2; exit 2; }

# The first number after a key of JSON lines on standard input, for the lines that name $1.
number() { grep -F "$1" | sed -nE "s/.*\"$2\": ?([0-9.]+).*/\1/p" | head -n 1; }

printf '%-6s %-8s %12s %12s %12s\n' round who 'prefill 512' 'decode' 'GB/s read'
for round in $(seq "$rounds"); do
  # shellcheck disable=SC2086
  lines=$("$peer" -m "$model" -t "$(nproc)" -p 512 -n 64 -r 3 -o jsonl ${PEER_FLAGS--rtr 1} 2> /dev/null)
  printf '%-6s %-8s %12s %12s\n' "$round" peer \
    "$(number '"n_gen": 0' avg_ts <<< "$lines")" "$(number '"n_prompt": 0' avg_ts <<< "$lines")"
  lines=$("$sortie" bench decode --format "$format" --steps 24 --prefill 512 --json)
  ms=$(number '"prefill"' ms <<< "$lines")
  printf '%-6s %-8s %12s %12s %12s\n' "$round" sortie \
    "$(awk -v ms="$ms" 'BEGIN { printf "%.1f", 512000 / ms }')" \
    "$(number '"decode"' tokens_per_second <<< "$lines")" "$(number '"decode"' read_gbs <<< "$lines")"
done
