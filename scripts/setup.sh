#!/usr/bin/env bash
# Makes .venv ready for the demo and the tests: system checks, dependencies at the versions of constraints.txt, the C++
# extension, MovieLens-100K. Does nothing when nothing has changed, so a second run needs no network.
set -euo pipefail
exec </dev/null
cd "$(dirname "$0")/.."

venv=.venv
deps_stamp=$venv/.shardam-dependencies
native_stamp=$venv/.shardam-native
data_stamp=$venv/.shardam-data

digest() { # of the text on standard input
  "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

deps_key() { # the folder is in it: a venv does not survive a move
  { pwd; "$python" --version; cat pyproject.toml constraints.txt; } | digest
}

native_key() {
  { cat pyproject.toml kernels/CMakeLists.txt; find kernels/csrc -type f | LC_ALL=C sort | while read -r file; do
    echo "$file"
    cat "$file"
  done; } | digest
}

stamped() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; } # file, key

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

venv_fits() { # made for this folder (a venv does not survive a move) by this interpreter
  grep -qxF "executable = $python" $venv/pyvenv.cfg 2>/dev/null &&
    grep -qF -- " -m venv $PWD/$venv" $venv/pyvenv.cfg && $venv/bin/python -c 'import pip'
}

make_venv() {
  venv_fits && return
  if [ -e $venv ]; then
    echo "setup: $venv was made for another folder or interpreter; making it again"
    rm -rf $venv
  fi
  "$python" -m venv "$PWD/$venv"
}

install_dependencies() {
  echo "setup: installing dependencies (several minutes the first time)"
  rm -f $deps_stamp $native_stamp $data_stamp
  # Without build isolation the build tools of constraints.txt are the ones that build.
  pip install -qq -c constraints.txt scikit-build-core nanobind cmake ninja
  PATH="$PWD/$venv/bin:$PATH" pip install -qq -c constraints.txt --no-build-isolation -e ".[dev]"
  echo "$1" >$deps_stamp
  echo "$2" >$native_stamp
}

build_native() {
  echo "setup: building the C++ extension"
  rm -f $native_stamp
  PATH="$PWD/$venv/bin:$PATH" pip install -qq -c constraints.txt --no-build-isolation --no-deps -e .
  echo "$1" >$native_stamp
}

install_data() {
  if pip install -qq -c constraints.txt --no-deps recbole >/dev/null; then
    echo installed >$data_stamp
  else
    echo missing >$data_stamp
    echo "setup: MovieLens-100K cannot be had now; the demo uses synthetic click data. Try again: rm $data_stamp && make setup" >&2
  fi
}

scripts/system.sh build
python=$(scripts/system.sh python)
make_venv
deps=$(deps_key)
native=$(native_key)
if ! stamped $deps_stamp "$deps"; then
  install_dependencies "$deps" "$native"
elif ! stamped $native_stamp "$native"; then
  build_native "$native"
fi
[ -f $data_stamp ] || install_data
echo "setup: ready"
