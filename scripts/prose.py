"""Count, per 1,000 sentences, the turns of phrase that make prose hard to read.

    python -m scripts.prose [WHERE ...]    a table, or the sentences of those places, such as docs/api.md

Four kinds of text: documents, docstrings, comments, and what the program prints (help, messages, errors).
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

MARKS: Mapping[str, re.Pattern[str]] = {
    "begins with Where, What, Who or Of": re.compile(r"^(Where|What|Who|Of)\b(?!.*\?$)"),
    "those that, that of, one that": re.compile(
        r"\b(those (that|which|who|of|with|in|on)|that of|(?<!no )(?<!any)ones? (that|which|who))\b",
        re.IGNORECASE,
    ),
    "a what-clause as a subject": re.compile(
        r"(?:^|[:;] |, (?:and |but |so )?|\band |\bbut )(?:what|who|whoever|which)\s(?:[\w'`./-]+ ){1,8}?"
        r"(?:is|are|was|were|has|have|can|must|may|will|gets?|stays?|goes|ends?|counts?|needs?)\b(?!.*\?$)",
        re.IGNORECASE,
    ),
    "comes for is or happens": re.compile(
        r"\b(comes|came)\b(?! (back|from|up|with|in\b|out))", re.IGNORECASE
    ),
    "of which, in which, by which": re.compile(r"\b(of|in|by|from|at|on|to|with|for) which\b", re.IGNORECASE),
    "beside, by itself": re.compile(r"\b(beside|by itself|by themselves)\b", re.IGNORECASE),
}

_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_ENDS = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\"(])|\n\s*\n|\s*\n\s*[-*]\s+|\s*\n\s*\d+\.\s+|\s*\|\s*|\n(?=#)")
_CODE = re.compile(r"`[^`]*`")
_LEAST_WORDS = 3  #: of a sentence; fewer are a heading or a cell


def sentences(text: str) -> Iterator[str]:
    for part in _ENDS.split(_FENCED.sub("\n\n", text)):
        sentence = " ".join(_CODE.sub("`x`", part).split()).lstrip("#>*- ")
        if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= _LEAST_WORDS:
            yield sentence


def of_documents(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        yield from sentences(path.read_text())


def of_sources(paths: Iterable[Path]) -> tuple[list[str], list[str], list[str]]:
    """Return the sentences of docstrings, comments, and of the longer strings, which users read."""
    docstrings: list[str] = []
    comments: list[str] = []
    printed: list[str] = []
    for path in paths:
        source = path.read_text()
        nodes = list(ast.walk(ast.parse(source)))
        seen: set[int] = set()
        for node in nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                seen.add(id(node.value))
                if isinstance(node.value.value, str):
                    docstrings += sentences(node.value.value)
            elif isinstance(node, ast.JoinedStr):
                seen.update(id(each) for each in node.values)
                printed += sentences("".join(_said(each) for each in node.values))
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
                printed += sentences(node.value) if " " in node.value else ()
        comments += sentences(" ".join(_comments(source)))
    return docstrings, comments, printed


def _said(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "`x`"


def _comments(source: str) -> Iterator[str]:
    """Yield comments; an empty line ends one."""
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield ("\n\n" if token.start[0] > last + 1 else "") + token.string.lstrip("#: ")
            last = token.start[0]


def everything() -> dict[str, list[str]]:
    """Return the project's sentences by kind of text."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    docstrings, comments, printed = of_sources(sorted((ROOT / "mlxtp").rglob("*.py")))
    return {
        "documents": list(of_documents(pages)),
        "docstrings": docstrings,
        "comments": comments,
        "printed": printed,
    }


def rates(found: Iterable[str]) -> dict[str, float]:
    """Return each mark's sentences per 1,000."""
    given = list(found)
    return {
        mark: 1000 * sum(bool(pattern.search(each)) for each in given) / max(len(given), 1)
        for mark, pattern in MARKS.items()
    }


def main() -> None:
    if sys.argv[1:]:
        for path in map(Path, sys.argv[1:]):
            found = of_sources([path]) if path.suffix == ".py" else (of_documents([path]),)
            for sentence in (each for kind in found for each in kind):
                for mark, pattern in MARKS.items():
                    if pattern.search(sentence):
                        print(f"{path}: {mark}: {sentence}")
        return
    kinds = everything()
    print(f"{'per 1,000 sentences':40}", *(f"{kind:>11}" for kind in kinds))
    print(f"{'sentences':40}", *(f"{len(found):11}" for found in kinds.values()))
    table = [rates(found) for found in kinds.values()]
    for mark in MARKS:
        print(f"{mark:40}", *(f"{column[mark]:11.1f}" for column in table))


if __name__ == "__main__":
    main()
