#!/usr/bin/env bash
# device_bundle.sh FOLDER [BUILD]: what a GPU machine without a build needs: sortie and the device tests,
# stripped, with the libraries that such a machine may lack. There: FOLDER/run sortie …, FOLDER/run cuda_test
set -eu
cd "$(dirname "$0")/.."
to=$1
build=${2:-build/release}
mkdir -p "$to/lib"
for program in src/cli/sortie src/backends/cuda/cuda_test; do
  strip -o "$to/$(basename "$program")" "$build/$program"
  # The C library and the driver are the other machine's own.
  ldd "$build/$program" | awk '/=> \//{ print $3 }' |
    grep -vE '/(libc|libm|libpthread|libdl|librt|ld-linux-x86-64)\.so' | xargs -r cp -Lt "$to/lib"
done
strip "$to"/lib/*
printf '#!/bin/sh\nd=$(dirname "$0"); p=$1; shift; LD_LIBRARY_PATH=$d/lib exec "$d/$p" "$@"\n' > "$to/run"
chmod +x "$to/run"
du -sh "$to"
