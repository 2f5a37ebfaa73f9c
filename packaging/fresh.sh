#!/bin/sh
# `make demo` from a fresh clone, with nothing of this user's: once with Python alone, once with uv alone.
# $1: a Python, 3.11 to 3.14. $2: a uv; without it only the first is tried.
# The environment may name a package index (PIP_*, UV_*): that is kept.
set -eu
python=$1
uv=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
kept=$(env | grep -E '^(PIP_|UV_|SSL_CERT)' | grep -vE '^(PIP|UV)_CACHE' || true)

try() {
    name=$1
    mkdir -p "$work/$name/bin" "$work/$name/home"
    for tool in make sh cp cat cc c++ gcc g++ as ld ln ls mkdir dirname touch env rm sed tr uname git readlink; do
        if found=$(command -v "$tool"); then ln -sf "$found" "$work/$name/bin/$tool"; fi
    done
    ln -s "$2" "$work/$name/bin/$3"
    git clone --quiet "$here" "$work/$name/mlxtp"
    (
        cd "$work/$name/mlxtp"
        # shellcheck disable=SC2086
        env -i PATH="$work/$name/bin" HOME="$work/$name/home" $kept \
            make demo DEMO_ARGS="--once --http 127.0.0.1:0"
    )
    echo "make demo works with $name alone"
}

try python "$python" python3
[ -z "$uv" ] || try uv "$uv" uv
