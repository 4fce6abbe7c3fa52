#!/usr/bin/env bash
# make soak: long runs of what CI takes a short cut of. SECONDS_EACH sets a fuzz target's time.
source "$(dirname "$0")/phases.sh"
begin soak
bash scripts/fuzz.sh "${SECONDS_EACH:-3600}" || exit 1
verdict "passed"
