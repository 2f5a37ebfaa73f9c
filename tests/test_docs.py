"""What the documents say of the program is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
SYSTEM = {"No route to host"}
"""Words of the system's."""


def words_of_the_program() -> str:
    """All of its text, with string literals that go on over several lines as one."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "mlxtp").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", source)


def test_every_message_of_the_troubleshooting_page_is_one_of_ours() -> None:
    program = words_of_the_program()
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    parts = {part.strip() for row in rows if row not in SYSTEM for part in re.split(r"⟨[^⟩]*⟩", row)}
    assert sorted(part for part in parts if part and part not in program) == []


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.name)
def test_links_within_the_documents_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        assert other.exists(), f"{page.name} links to {target}"
        if anchor and other.suffix == ".md":
            assert anchor in anchors(other.read_text()), f"{page.name} links to {target}"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


def test_modules_that_the_documents_name_are_there() -> None:
    """`engine/batch.py`, `node/gateway`: as the walks and the map call them."""
    folders = "|".join(path.name for path in (ROOT / "mlxtp").iterdir() if (path / "__init__.py").is_file())
    for page in DOCS:
        for name in re.findall(rf"`((?:mlxtp/)?(?:{folders})/[\w/]+(?:\.py)?)`", page.read_text()):
            path = ROOT / "mlxtp" / name.removeprefix("mlxtp/")
            assert path.exists() or path.with_suffix(".py").exists(), f"{page.name} names {name}"
