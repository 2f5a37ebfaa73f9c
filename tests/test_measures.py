"""Size of the package in figures: names that stand twice, large classes, prose, private names of libraries.

A figure that is not at its goal may fall and must not rise: `LEFT` has what is left of each.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "mlxtp").rglob("*.py"))}

MOST_LINES = 78_330
MOST_METHODS = 20
MOST_ATTRIBUTES = 15
MOST_FILES_OF_A_METHOD = 8
EVERYWHERE = frozenset(
    {"close", "run", "start", "stop", "send"}
)  # methods that may be in any number of files

LEFT: Mapping[str, int] = {"large classes": 0, "names of methods": 0, "files": 237}

_CLAUSE = re.compile(r"(What|Who|Whose|Whom|Which|Whether|When|Where|Why|How|That)(ever)?\b")
_BANNED = re.compile(
    r"\b(whoever|whomever|(?<!getpwnam\(\")nobody|somebody|everybody|anew|shall|no more|whatever|wherever)\b",
    re.IGNORECASE,
)


@pytest.fixture(scope="module", autouse=True)
def _trees_are_let_go() -> Iterator[None]:
    """Keep the trees, which are a million objects, for the tests of this file only."""
    yield
    trees.cache_clear()
    walked.cache_clear()


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((str(path), ast.parse(text)) for path, text in FILES.items())


@cache
def walked(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in walked(tree) if isinstance(node, ast.ClassDef)]


def methods(node: ast.ClassDef) -> list[str]:
    return [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def attributes(node: ast.ClassDef) -> set[str]:
    """Return what the methods of a class assign to `self`."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


def clauses(tree: ast.AST) -> list[str]:
    """Return the docstrings that begin with a clause instead of an imperative or a noun."""
    return [
        text
        for node in walked(tree)
        for each in _body(node)
        if isinstance(each, ast.Expr)
        and isinstance(each.value, ast.Constant)
        and isinstance(text := each.value.value, str)
        and _CLAUSE.match(text.strip())
    ]


def private_imports(tree: ast.AST) -> list[str]:
    """Return names of other packages that are imported although they begin with an underscore."""
    found = []
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [*node.module.split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for each in node.names for part in each.name.split(".")]
        else:
            continue
        if names[0] not in ("mlxtp", "__future__"):
            found += [
                ".".join(names) for each in names if each.startswith("_") and not each.startswith("__")
            ][:1]
    return found


def uncalled(sources: Mapping[str, ast.Module]) -> list[str]:
    """Return functions, methods and classes whose names nothing in `sources` uses, but for decorated ones."""
    defined: dict[str, str] = {}
    used: set[str] = set()
    for path, tree in sources.items():
        for node in walked(tree):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    if not node.decorator_list or isinstance(node, ast.ClassDef):
                        defined.setdefault(node.name, f"{path}: {node.name}")
                case ast.Name():
                    used.add(node.id)
                case ast.Attribute():
                    used.add(node.attr)
                case ast.keyword() if node.arg:
                    used.add(node.arg)
    return [
        where for name, where in sorted(defined.items()) if name not in used and not name.startswith("__")
    ]


def at_most(what: str, found: int) -> None:
    assert found <= LEFT.get(what, 0), f"{what}: {found}"
    assert found == LEFT.get(what, 0), f"{what}: {found}, fewer than before; LEFT can say so"


def test_no_class_name_stands_twice() -> None:
    names = Counter(node.name for _, tree in trees() for node in classes(tree))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_class_has_too_many_methods_or_attributes() -> None:
    at_most("large classes", len([node for _, tree in trees() for node in classes(tree) if large(node)]))


def large(node: ast.ClassDef) -> bool:
    return len(methods(node)) > MOST_METHODS or len(attributes(node)) > MOST_ATTRIBUTES


def test_few_names_of_methods_stand_everywhere() -> None:
    where: defaultdict[str, set[str]] = defaultdict(set)
    for path, tree in trees():
        for node in classes(tree):
            for name in methods(node):
                if not name.startswith("__") and name not in EVERYWHERE:
                    where[name].add(path)
    at_most(
        "names of methods",
        len([name for name, files in where.items() if len(files) > MOST_FILES_OF_A_METHOD]),
    )


def test_no_docstring_begins_with_a_clause() -> None:
    at_most("clauses", sum(len(clauses(tree)) for _, tree in trees()))


def test_banned_words_are_absent() -> None:
    at_most("banned words", sum(len(_BANNED.findall(text)) for text in FILES.values()))


def test_nothing_private_of_a_library_is_imported() -> None:
    assert [(path, name) for path, tree in trees() for name in private_imports(tree)] == []


CALLED_BY_OTHERS = frozenset(
    {
        "capture_signals",  # uvicorn's server
        "on_broken_pipe",  # rich's console
        "seekable",  # a file for safetensors
        "truncate",  # a file for huggingface-hub
        "keys_and_values", "make_mask", "update_and_fetch",  # mlx-lm's models, of a cache
        "field_codecs",  # scripts/wire_reference.py, from which docs/wire.md comes
    }
)  # fmt: skip


def test_every_function_has_a_caller() -> None:
    found = uncalled(dict(trees()))
    assert [each for each in found if each.rpartition(" ")[2] not in CALLED_BY_OTHERS] == []


def test_the_package_is_no_larger_than_it_was() -> None:
    at_most("files", len(FILES))
    assert sum(text.count("\n") for text in FILES.values()) <= MOST_LINES


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ('"""What it is."""', clauses),
        ('def f():\n    """Whether it is so."""', clauses),
        ("from asyncio.sslproto import _x", private_imports),
        ("import uvicorn._impl", private_imports),
        ("def f(): ...", lambda tree: uncalled({"a.py": tree})),
        (
            "class A:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(21)),
            lambda tree: large(classes(tree)[0]),
        ),
        (
            "class A:\n    def m(self):\n" + "".join(f"        self.a{n} = 1\n" for n in range(16)),
            lambda tree: large(classes(tree)[0]),
        ),
    ],
)
def test_each_measure_can_fail(code: str, rule) -> None:
    assert rule(ast.parse(code))
