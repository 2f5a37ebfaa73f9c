"""Print the lines of hashes.txt that mlxtp with some extras needs, for `pip install --require-hashes`.

`python scripts/locked.py dev,browser`. hashes.txt has the versions of constraints.txt. After a change there,
or in pyproject.toml, make it again:

    echo 'setuptools>=77' | uv pip compile pyproject.toml - --extra dev --extra browser --extra examples \\
        --extra vision --universal --python-version 3.11 --constraint constraints.txt --generate-hashes \\
        -o hashes.txt

pip takes no hashes from a file of constraints where it installs a folder, so these are two files.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def name_of(requirement: str) -> str:
    """Return the name of a package as all spell it alike."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def locked(pins: str, wanted: set[str]) -> dict[str, str]:
    """Return the pins of what is `wanted`, and of what that needs in turn, by name."""
    text: dict[str, str] = {}
    parents: dict[str, set[str]] = {}
    name = ""
    for line in pins.splitlines(keepends=True):
        if "==" in line:
            name = name_of(line)
            text[name], parents[name] = line, set()
        elif "--hash=" in line:
            text[name] += line
        elif name:  # `# via NAME`, or one name a line
            parents[name] |= {name_of(word) for word in line.split() if word[0].isalnum()}
    found: set[str] = set()
    while more := {name for name in text if name in wanted or parents[name] & found} - found:
        found |= more
    return {name: text[name] for name in sorted(found)}


def main(extras: str) -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*table["build-system"]["requires"], *table["project"]["dependencies"]]
    for extra in filter(None, extras.split(",")):
        asked += table["project"]["optional-dependencies"][extra]
    sys.stdout.write("".join(locked((ROOT / "hashes.txt").read_text(), set(map(name_of, asked))).values()))


if __name__ == "__main__":
    main(sys.argv[1])
