# Shared by the scripts: packages, phases with one line each, a log, one verdict line. Sourced.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p out
started=$SECONDS

# begin NAME: starts the log out/NAME.log.
begin() {
  name=$1
  log=out/$name.log
  : > "$log"
}

# fail COMMAND: the verdict of a phase that failed.
fail() {
  printf '\nFAILED: %s\nthe last lines of %s:\n' "$1" "$log"
  tail -n 20 "$log" | sed 's/^/  | /'
  printf '%s: FAILED after %d s; the whole log: %s\n' "$name" $((SECONDS - started)) "$PWD/$log"
  exit 1
}

# phase TITLE COMMAND...: runs the command into the log; one line with its time.
phase() {
  local title=$1 t0=$SECONDS
  shift
  printf '%-58s ' "$title"
  printf '\n== %s\n$ %s\n' "$title" "$*" >> "$log"
  if "$@" >> "$log" 2>&1 < /dev/null; then
    printf 'ok %4d s\n' $((SECONDS - t0))
  else
    printf 'FAILED\n'
    fail "$*"
  fi
}

verdict() {
  printf '%s: %s in %d s (log: %s)\n' "$name" "$1" $((SECONDS - started)) "$log"
}

base_packages="g++ cmake ninja-build pkg-config nlohmann-json3-dev libcli11-dev libfmt-dev libspdlog-dev
  libpcre2-dev libssl-dev libucx-dev"
test_packages="libgtest-dev zlib1g-dev"
check_packages="clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev git"

# install PACKAGE...: says what is missing and how much it is, and installs that by apt alone.
install() {
  local missing=() p
  for p in "$@"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2> /dev/null)" = installed ] || missing+=("$p")
  done
  if [ ${#missing[@]} -eq 0 ]; then
    echo "packages: all there ($# needed)"
    return
  fi
  echo "packages missing: ${missing[*]}"
  if [ "${INSTALL:-1}" = 0 ]; then
    echo "INSTALL=0: not installed; the build will say what it lacks"
    return
  fi
  local sudo=""
  [ "$(id -u)" = 0 ] || sudo=sudo
  phase "apt-get update" $sudo apt-get update
  apt-get install -s --no-remove "${missing[@]}" 2>> "$log" | grep -c '^Inst' > "out/.count" || true
  phase "apt-get install ($(cat out/.count) packages with what they need)" \
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-remove --no-install-recommends "${missing[@]}"
}

# build DIRECTORY PRESET TARGET... -- CMAKE_OPTION...
jobs=$(nproc)
