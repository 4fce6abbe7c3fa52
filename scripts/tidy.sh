#!/usr/bin/env bash
# clang-format, clang-tidy and the rooms' include rule over the whole tree; fails on any finding.
source "$(dirname "$0")/phases.sh"
begin tidy
check_format() { git ls-files 'src/*.cc' 'src/*.h' 'src/*.cu' 'src/*.cuh' | xargs clang-format-14 --dry-run -Werror; }
phase "clang-format" check_format
phase "includes go one way" bash scripts/includes.sh
# clang cannot read g++'s precompiled headers: a configuration of its own, never built.
phase "configure" cmake --preset ci -B build/tidy -DSORTIE_PCH=OFF
tidy() {
  # Tests are GoogleTest macros all through: the checks are for the product's own sources.
  git ls-files 'src/*.cc' | grep -v -e '_test\.cc$' -e '_fuzz\.cc$' |
    xargs -P "$jobs" -n 1 clang-tidy-14 -p build/tidy --quiet --extra-arg=-Wno-unknown-warning-option \
      2> out/tidy.err  # how many warnings system headers have; what was found is on the other stream
}
phase "clang-tidy" tidy
verdict "clean"
