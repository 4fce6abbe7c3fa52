#!/bin/bash
# A CPU peer and Sortie on one model shape in turn, so that both meet the same memory and neighbours.
# usage: scripts/peer_cpu.sh LLAMA_BENCH MODEL.gguf [FORMAT] [ROUNDS]
#   LLAMA_BENCH   llama-bench of ik_llama.cpp, each test REPS (3) times; PEER_FLAGS (default "-rtr 1") goes to it
#   MODEL.gguf    DeepSeek-V2-Lite's shape
#   FORMAT        Sortie's: w4afp8 beside Q4_0 experts (default), w8a8_int8 beside Q8_0
# Prints tokens/s a round: a prompt of 512, decode from nothing and with DEPTH (default 4096) tokens
# cached, both over 16-bit caches. Bytes a token differ between the formats: compare by those, which
# `sortie bench decode --json` prints.
set -eu
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
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

depth=${DEPTH:-4096}
row='%-6s %-8s %12s %12s %14s %12s\n'
# shellcheck disable=SC2059
printf "$row" round who 'prefill 512' decode "at depth $depth" 'GB/s read'
for round in $(seq "$rounds"); do
  # shellcheck disable=SC2086
  lines=$("$peer" -m "$model" -t "$(nproc)" -p 512 -n 64 -gp "$depth,32" -r "${REPS:-3}" -o json ${PEER_FLAGS--rtr 1} 2> /dev/null |
    tr '\n' ' ' | sed 's/}/}\n/g')
  # shellcheck disable=SC2059
  printf "$row" "$round" peer "$(number '"n_gen": 0' avg_ts <<< "$lines")" \
    "$(number '"n_prompt": 0' avg_ts <<< "$lines")" "$(number "\"n_prompt\": $depth" avg_ts <<< "$lines")" -
  lines=$("$sortie" bench decode --format "$format" --steps 24 --prefill 512 --depth "0,$depth" \
    --kv-cache-dtype bf16 --json)
  ms=$(number '"prefill"' ms <<< "$lines")
  # shellcheck disable=SC2059
  printf "$row" "$round" sortie "$(awk -v ms="$ms" 'BEGIN { printf "%.1f", 512000 / ms }')" \
    "$(number '"depth":0' tokens_per_second <<< "$lines")" \
    "$(number "\"depth\":$depth" tokens_per_second <<< "$lines")" \
    "$(number '"depth":0' read_gbs <<< "$lines")"
done
