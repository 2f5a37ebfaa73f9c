#!/bin/sh
# Installs the fuzzer into the virtual environment $1; nothing else needs it, and it comes for Linux only.
set -eu
if command -v uv >/dev/null 2>&1; then
    exec uv pip install --quiet --python "$1/bin/python" 'atheris>=3'
fi
exec "$1/bin/python" -m pip install --quiet --disable-pip-version-check 'atheris>=3'
