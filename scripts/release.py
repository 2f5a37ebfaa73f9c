"""Check, build and describe a release.

    make release RELEASE_ARGS=--dry-run     # what is in the way, and the notes; nothing is built or written
    make release RELEASE_ARGS="--url URL"   # checks, then `make package`, notes and hashes in dist/

The tag and the upload remain with the maintainer: the last lines name the commands.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNRELEASED = "not released yet"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the source. `changes` is the first section of CHANGELOG.md, with its heading.

    `changed` has the files that differ from the last commit. `last_tag` is empty before the first release;
    `commits` are the subjects since then, the newest first.
    """

    version: str
    changes: str
    branch: str
    changed: tuple[str, ...]
    tags: tuple[str, ...]
    last_tag: str
    commits: tuple[str, ...]


def problems(facts: Facts) -> list[str]:
    """Return what is in the way of a release, each with its remedy. Pure."""
    heading, _, text = facts.changes.partition("\n")
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", facts.version):
        found.append(f"the version {facts.version!r} in mlxtp/__init__.py is not such as 1.2.3 or 1.2.3rc1")
    if not heading.startswith(f"## {facts.version},"):
        found.append(f"CHANGELOG.md begins with {heading!r}; its first section must be {facts.version}")
    elif UNRELEASED in heading:
        found.append(f"CHANGELOG.md calls {facts.version} {UNRELEASED!r}; write the date there")
    if not text.strip():
        found.append(f"CHANGELOG.md lists no changes of {facts.version}")
    if f"v{facts.version}" in facts.tags:
        found.append(f"the tag v{facts.version} exists; raise the version in mlxtp/__init__.py")
    if facts.branch != "main":
        found.append(f"the branch is {facts.branch or 'none'}; releases are made on main")
    if facts.changed:
        found.append(f"not committed: {', '.join(facts.changed[:5])}")
    if facts.last_tag and not facts.commits:
        found.append(f"there is no commit since {facts.last_tag}")
    return found


def notes(facts: Facts) -> str:
    """Return the notes in Markdown: the changes, then the commits since the last release. Pure."""
    heading, _, text = facts.changes.partition("\n")
    parts = [f"# mlxtp {heading.removeprefix('## ')}", text.strip()]
    if facts.last_tag:
        commits = "\n".join(f"- {subject}" for subject in facts.commits)
        parts.append(f"## Commits since {facts.last_tag}\n\n{commits}")
    return "\n\n".join(parts) + "\n"


def facts_of(root: Path) -> Facts:
    """Read the facts of the clone in `root`. Raises CalledProcessError where git fails."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    version = re.search(r'^__version__ = "(.*)"$', (root / "mlxtp" / "__init__.py").read_text(), re.MULTILINE)
    sections = re.split(r"^(?=## )", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    tags = git("tag", "--list", "v*", "--sort=-creatordate", "--merged", "HEAD")
    last = tags[0] if tags else ""
    return Facts(
        version=version[1] if version is not None else "",
        changes=sections[1] if len(sections) > 1 else "",
        branch=next(iter(git("branch", "--show-current")), ""),
        changed=tuple(line[3:] for line in git("status", "--porcelain")),
        tags=tuple(git("tag", "--list")),
        last_tag=last,
        commits=tuple(git("log", "--format=%s", f"{last}..HEAD")) if last else (),
    )


def build(root: Path, facts: Facts, url: str) -> None:
    """Run the checks and `make package`; write notes and hashes into dist/. Raises CalledProcessError."""
    for target in (["lint"], ["test-all"], ["package", *([f"URL={url}"] if url else [])]):
        subprocess.run(["make", *target], cwd=root, check=True)
    dist = root / "dist"
    built = sorted(path for path in dist.iterdir() if path.name.startswith("mlxtp"))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in built]
    (dist / "SHA256SUMS").write_text("".join(sums))
    (dist / "NOTES.md").write_text(notes(facts))


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Make a release of the clone in `root`; return the exit status."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="print problems and notes, do nothing else")
    parser.add_argument("--url", default="", help="where the source archive will be found, for the formula")
    asked = parser.parse_args(arguments)
    facts = facts_of(root)
    found = problems(facts)
    for problem in found:
        print(f"in the way: {problem}", file=sys.stderr)
    if asked.dry_run:
        print(notes(facts), end="")
        print(f"would run: make lint, make test-all, make package {asked.url}".rstrip(), file=sys.stderr)
    if found or asked.dry_run:
        return 1 if found else 0
    build(root, facts, asked.url)
    tag = f"v{facts.version}"
    print(f"dist/ is ready. Next: git tag -a {tag} -F dist/NOTES.md && git push origin {tag}")
    print("Then upload the files of dist/.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
