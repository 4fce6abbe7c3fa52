#!/usr/bin/env bash
# Cross-compiles the rooms without foreign libraries, the generic CPU path among them, for aarch64, and
# runs their tests under qemu's emulation of one.
source "$(dirname "$0")/phases.sh"
begin aarch64
install g++-aarch64-linux-gnu qemu-user-static cmake ninja-build libgtest-dev nlohmann-json3-dev libfmt-dev libspdlog-dev
build=build/aarch64
phase "configure" cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DSORTIE_PORTABLE=ON \
  -DSORTIE_WERROR=ON -DSORTIE_PCH=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  "-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static;-L;/usr/aarch64-linux-gnu"
phase "build" cmake --build $build --target base_test quant_test cpu_test kv_test
phase "tests under emulation" env SORTIE_TEST_SHORT=1 ctest --test-dir $build --output-on-failure \
  --no-tests=error --timeout 300 -R '^(base|quant|cpu|cpu_generic|kv)$'
grep -E 'Test +#|tests passed' "$log"
verdict "the generic path builds and passes on aarch64"
