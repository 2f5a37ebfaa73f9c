#!/bin/sh
# Checks that all pins have wheels, builds wheel, source archive and formula into dist/, and tries the wheel in a
# fresh environment.
# $1: a Python with pip. URL: where the source archive will be found; by default where it lies now.
set -eu
python=$1
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf build dist
"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet --disable-pip-version-check build twine uv
"$python" scripts/wheels.py "$work/build/bin/uv"
"$work/build/bin/python" -m build --outdir dist .
"$work/build/bin/twine" check --strict dist/*
rm -rf build

archive=$(echo dist/mlxtp-*.tar.gz)
version=${archive#dist/mlxtp-}
version=${version%.tar.gz}
sum=$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$archive")
sed -e "s|@URL@|${URL:-file://$PWD/$archive}|" -e "s|@SHA256@|$sum|" -e "s|@VERSION@|$version|" \
    packaging/mlxtp.rb > dist/mlxtp.rb

"$python" -m venv "$work/try"
"$work/try/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
cd "$work"
[ "$(try/bin/mlxtp version)" = "$version" ]
try/bin/mlxtp demo --once --http 127.0.0.1:0 --home "$work/home"
echo "dist/ holds mlxtp $version; the wheel answers from a fresh environment"
