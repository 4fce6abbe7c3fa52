#!/usr/bin/env bash
# clang-format, clang-tidy and the rooms' include rule over the whole tree; fails on any finding.
source "$(dirname "$0")/phases.sh"
begin tidy
mapfile -t files < <(git ls-files 'src/*.cc' 'src/*.h')
phase "clang-format" clang-format-14 --dry-run -Werror "${files[@]}"
phase "includes go one way" bash scripts/includes.sh
preset=${PRESET:-ci}
[ -f "build/$preset/compile_commands.json" ] || phase "configure ($preset)" cmake --preset "$preset"
tidy() {
  # Tests are GoogleTest macros all through: the checks are for the product's own sources.
  git ls-files 'src/*.cc' | grep -v -e '_test\.cc$' -e '_fuzz\.cc$' |
    xargs -P "$jobs" -n 4 clang-tidy-14 -p "build/$preset" --quiet --extra-arg=-Wno-unknown-warning-option
}
phase "clang-tidy" tidy
verdict "clean"
