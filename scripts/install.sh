#!/bin/sh
# Makes $VENV with this project and everything it can use, from the lock files alone. Called by `make install`.
# PYTHON names the interpreter; without it the first of python3, python3.13, python3.12, python3.11 that fits is taken.
# PYSPARK names a release of pyspark to install in place of the locked one (`make test-spark`).
set -eu
VENV=${VENV:-.venv}

fail() { echo "make install: $1" >&2; exit 2; }

# Prints the version of the interpreter "$1", nothing where it cannot run.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
fits() { case $1 in 3.11|3.12|3.13) return 0 ;; *) return 1 ;; esac; }

case $(uname -s) in
    Linux|Darwin) ;;
    MINGW*|MSYS*|CYGWIN*) fail "Windows is not supported; use a Linux distribution under WSL 2." ;;
    *) fail "this is $(uname -s); kproxy runs on Linux and macOS." ;;
esac

if [ -n "${PYTHON:-}" ]; then
    found=$(version_of "$PYTHON")
    [ -n "$found" ] || fail "PYTHON=$PYTHON does not run; name a Python 3.11, 3.12 or 3.13."
    fits "$found" || fail "PYTHON=$PYTHON is Python $found; kproxy needs 3.11, 3.12 or 3.13."
else
    seen=
    for candidate in python3 python3.13 python3.12 python3.11; do
        found=$(version_of "$candidate")
        if fits "$found"; then PYTHON=$candidate; break; fi
        if [ -n "$found" ]; then seen="$seen${seen:+, }$candidate is $found"; fi
    done
    [ -n "${PYTHON:-}" ] || fail "there is no Python 3.11, 3.12 or 3.13 (${seen:-there is none at all}): install one, or name it as in make install PYTHON=/path/to/python3.12."
fi

"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "Python $found has no venv module; on Debian and Ubuntu: apt-get install python$found-venv"

# A virtual environment of another Python, or one whose Python is gone, is made anew; a sound one is brought up to date.
if [ "$(version_of "$VENV/bin/python")" != "$found" ]; then
    echo "Making $VENV with Python $found"
    "$PYTHON" -m venv --clear "$VENV" || fail "Python $found could not make $VENV; its message stands above."
fi

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
unreachable="pip could not install it; its message stands above. With the network back, make install goes on where it stopped."

echo "Installing the build tools"
pip install --quiet --require-hashes -r requirements-build.lock || fail "$unreachable"
echo "Installing the libraries (Spark is a download of 430 MB the first time; this takes some minutes)"
lock=requirements.lock
if [ -n "${PYSPARK:-}" ]; then
    lock=$VENV/requirements.lock
    awk '/^[^ #]/ { other = /^pyspark==/ } !other' requirements.lock > "$lock"
fi
pip install --quiet --require-hashes --no-build-isolation -r "$lock" || fail "$unreachable"
if [ -n "${PYSPARK:-}" ]; then
    pip install --quiet --no-build-isolation "pyspark==$PYSPARK" || fail "$unreachable"
fi
echo "Installing kproxy itself"
pip install --quiet --no-deps --no-build-isolation --editable . || fail "$unreachable"
"$VENV/bin/python" scripts/build_plain.py
echo "Done: $VENV/bin/kproxy --help"
