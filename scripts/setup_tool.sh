#!/bin/sh
# Installs $2, a tool of one slow ring, into the virtual environment $1. Its version stands in scripts/tools.txt.
set -eu
here=$(dirname "$0")
if command -v uv >/dev/null 2>&1; then
    exec uv pip install --quiet --python "$1/bin/python" --constraint "$here/tools.txt" "$2"
fi
exec "$1/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$here/tools.txt" "$2"
