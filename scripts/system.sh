#!/usr/bin/env bash
# Checks what must come from the system, not from pip; as root on Debian installs what is missing by apt-get, otherwise
# prints the one line that does and fails.
#
# Usage: scripts/system.sh build     Python 3.11 to 3.13 with venv and headers, a C++17 compiler, make
#        scripts/system.sh tests     what the tests need beyond: Chromium (browser tests), curl (the README's examples)
#        scripts/system.sh python    prints the interpreter that `build` found ($PYTHON, if set, is the only candidate)
set -euo pipefail
exec </dev/null

missing=()  # what is lacking, in words
packages=() # Debian's packages that bring it

lack() {
  missing+=("$1")
  shift
  packages+=("$@")
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      "$candidate" -c 'import os, sys; print(os.path.realpath(sys._base_executable))'
      return
    fi
  done
  return 1
}

has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

has_headers() {
  "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

has_cxx17() {
  printf '#include <string_view>\nint main() { if constexpr (sizeof(std::string_view) == 0) return 1; return 0; }\n' |
    "${CXX:-c++}" -std=c++17 -x c++ -fsyntax-only - 2>/dev/null
}

check_build() {
  local python
  if python=$(find_python); then
    has_venv "$python" || lack "the venv module of $python" python3-venv
    has_headers "$python" || lack "the headers of $python" python3-dev
  else
    lack "Python 3.11 to 3.13 (tried: ${PYTHON:-python3 python3.13 python3.12 python3.11})" python3 python3-venv python3-dev
  fi
  has_cxx17 || lack "a C++17 compiler (tried: ${CXX:-c++})" g++
  command -v make >/dev/null || lack "make" make
}

check_tests() {
  command -v chromium >/dev/null || lack "chromium" chromium
  command -v curl >/dev/null || lack "curl" curl
}

check() {
  missing=()
  packages=()
  "check_$1"
}

install_or_explain() {
  local line="apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
  local words
  printf -v words '%s, ' "${missing[@]}"
  words=${words%, }
  if ! command -v apt-get >/dev/null; then
    echo "missing: $words. Install it by this system's package manager, then run the command again." >&2
    return 1
  fi
  if [ "$(id -u)" -ne 0 ]; then
    echo "missing: $words. Run: sudo sh -c '$line'" >&2
    return 1
  fi
  echo "missing: $words; installing ${packages[*]}"
  # A stale list is no reason to stop: the install decides.
  apt-get update -qq || echo "apt-get update failed; trying with the lists at hand" >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

case "${1:-}" in
  python) find_python ;;
  build | tests)
    check "$1"
    [ ${#missing[@]} -eq 0 ] && exit 0
    install_or_explain
    check "$1"
    if [ ${#missing[@]} -gt 0 ]; then
      echo "still missing after the installation: ${missing[*]}. Set PYTHON or CXX to one that fits." >&2
      exit 1
    fi
    ;;
  *)
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
