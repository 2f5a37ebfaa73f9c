#!/bin/sh
# Installs mlxtp with everything for development into the virtual environment $1; $2 names other extras.
# What hashes.txt names is installed first, and only with one of the hashes that stand there.
# mlxtp comes last, and brings nothing else. Its folder stands on the path as a line: the finder that setuptools
# installs otherwise costs each start of Python 15 ms.
set -eu
venv=$1
extras=${2:-dev}
echo "Installing into $venv; the first time this takes a minute or two." >&2
cd "$(dirname "$0")/.."

# Newer Pythons have no wheels of some pins, which would be built from source.
fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1
}

if command -v uv >/dev/null 2>&1; then
    fits "$venv/bin/python" || UV_VENV_CLEAR=1 uv venv --quiet --python '>=3.11,<3.15' "$venv"
    "$venv/bin/python" scripts/locked.py "$extras" >"$venv/locked.txt"
    uv pip install --quiet --python "$venv/bin/python" --require-hashes --requirement "$venv/locked.txt"
    exec uv pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation \
        --config-setting editable_mode=compat --editable .
fi

if ! fits "$venv/bin/python"; then
    python=
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if fits "$candidate" && "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        found=$(python3 --version 2>/dev/null || echo "no python3")
        echo "mlxtp needs Python 3.11 to 3.14 with venv, and found $found." >&2
        echo "Install uv (it brings its own Python), or:" >&2
        echo "  macOS:  brew install python@3.13      Debian, Ubuntu:  apt install python3 python3-venv" >&2
        exit 1
    fi
    "$python" -m venv --clear "$venv"
fi
"$venv/bin/python" scripts/locked.py "$extras" >"$venv/locked.txt"
# Without --no-deps, pip refuses what a package asks for with an extra, such as transformers[chat-template].
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --require-hashes --requirement "$venv/locked.txt"
exec "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --config-settings editable_mode=compat --editable .
