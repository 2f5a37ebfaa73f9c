"""What is in the way of a release, its notes, and the dry run."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.release import Facts, facts_of, main, notes, problems

READY = Facts("1.2.0", "## 1.2.0, 2026-12-01\n\n- Faster.\n", "main", (), ("v1.1.0",), "v1.1.0", ("B", "A"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"last_tag": "", "tags": (), "commits": ()}, ""),
        ({"version": "1.2"}, "'1.2' in mlxtp/__init__.py"),
        ({"version": "1.2.1"}, "its first section must be 1.2.1"),
        ({"changes": "## 1.2.0, not released yet\n\n- Faster.\n"}, "write the date there"),
        ({"changes": "## 1.2.0, 2026-12-01\n\n"}, "lists no changes of 1.2.0"),
        ({"changes": ""}, "begins with ''"),
        ({"tags": ("v1.2.0", "v1.1.0")}, "the tag v1.2.0 exists"),
        ({"branch": "try"}, "the branch is try"),
        ({"branch": ""}, "the branch is none"),
        ({"changed": ("a.py",)}, "not committed: a.py"),
        ({"commits": ()}, "no commit since v1.1.0"),
    ],
)
def test_what_is_in_the_way(changes: dict[str, object], words: str) -> None:
    found = problems(replace(READY, **changes))  # type: ignore[arg-type]
    assert (words in "\n".join(found)) if words else not found


def test_the_notes_have_the_changes_and_the_commits() -> None:
    assert notes(READY) == ("# mlxtp 1.2.0, 2026-12-01\n\n- Faster.\n\n## Commits since v1.1.0\n\n- B\n- A\n")
    assert "Commits" not in notes(replace(READY, last_tag="", commits=()))


def test_a_dry_run_changes_nothing_and_a_release_packs_what_it_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "mlxtp").mkdir()
    (tmp_path / "mlxtp" / "__init__.py").write_text('"""Words."""\n\n__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changes\n\n## 1.2.0, 2026-12-01\n\n- Faster.\n\n## 1.1.0, 2026-11-01\n\n- First.\n"
    )
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "First words")
    git("tag", "v1.1.0")
    git("commit", "-qm", "Steps overlap", "--allow-empty")
    assert facts_of(tmp_path) == replace(
        READY, changes="## 1.2.0, 2026-12-01\n\n- Faster.\n\n", commits=("Steps overlap",)
    )
    before = sorted(tmp_path.iterdir())
    assert main(["--dry-run"], tmp_path) == 0
    said = capsys.readouterr()
    assert said.out.endswith("## Commits since v1.1.0\n\n- Steps overlap\n")
    assert "would run: make lint, make test-all, make package" in said.err
    assert sorted(tmp_path.iterdir()) == before

    (tmp_path / "Makefile").write_text(
        "lint test-all:\n"
        "package:\n\tmkdir dist && echo $(URL) > dist/mlxtp-1.2.0.tar.gz && touch dist/mlxtp.rb\n"
    )
    (tmp_path / ".gitignore").write_text("dist/\n")
    git("add", ".")
    git("commit", "-qm", "Packages")
    assert main(["--url", "https://example.com/a"], tmp_path) == 0
    assert "git tag -a v1.2.0 -F dist/NOTES.md" in capsys.readouterr().out
    assert (tmp_path / "dist" / "mlxtp-1.2.0.tar.gz").read_text() == "https://example.com/a\n"
    assert (tmp_path / "dist" / "NOTES.md").read_text().endswith("- Packages\n- Steps overlap\n")
    lines = (tmp_path / "dist" / "SHA256SUMS").read_text().splitlines()
    assert [line.partition("  ")[2] for line in lines] == ["mlxtp-1.2.0.tar.gz", "mlxtp.rb"]
    hashed = hashlib.sha256(b"https://example.com/a\n").hexdigest()
    assert lines[0].startswith(hashed)

    (tmp_path / "new.py").write_text("")
    assert main([], tmp_path) == 1, "nothing is built while something is in the way"
    assert capsys.readouterr().err == "in the way: not committed: new.py\n"
