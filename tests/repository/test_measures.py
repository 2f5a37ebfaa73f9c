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

ROOT = Path(__file__).parents[2]
FILES = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "mlxtp").rglob("*.py"))}

MOST_METHODS = 20
MOST_ATTRIBUTES = 15
MOST_FILES_OF_A_METHOD = 8
EVERYWHERE = frozenset(
    {"close", "run", "start", "stop", "send"}
)  # methods that may be in any number of files

MOST_PUBLIC_METHODS = 12
MOST_FIELDS = 20  # of a dataclass
MOST_POSITIONAL = 5  # parameters that may be given without their names

LEFT: Mapping[str, int] = {
    "large classes": 0,
    "names of methods": 0,
    "files": 251,
    "classes with many public methods": 9,
    "dataclasses with many fields": 7,
    "functions with many positional parameters": 6,
    "functions of an object of a class beside them": 69,
}
MOST_LINES: Mapping[str, int] = {
    "": 3_992,
    "admin": 1_714,
    "api": 12_291,
    "cli": 5_421,
    "cluster": 4_558,
    "diagnostics": 2_261,
    "discovery": 972,
    "engine": 12_544,
    "gateway": 1_791,
    "groups": 5_889,
    "identity": 1_222,
    "models": 3_286,
    "placement": 4_130,
    "service": 611,
    "text": 5_345,
    "wire": 4_173,
}
"""Lines of each package; those of files beside the packages are "". A commit that adds some says why.

Facts of all packages are told once, in one of them: faults in placement; figures and the reference of
messages in wire; verbs, settings and checks of values beside the packages.
"""
TOUCHES: Mapping[str, tuple[str, int]] = {
    "a family whose layers mlx-lm cuts": ("longcat_flash", 0),
    "a family cut by hand": ("nemotron_h", 1),
    "a figure of a rank, in status and metrics": ("load_peak_bytes", 2),
    "a figure that the page, status and commands tell in words": ("fetched_tokens", 5),
    "a sampler": ("xtc_threshold", 3),
    "a setting, with its reader": ("allowed_origins", 2),
    "a fact of each Mac that others know": ("RosterSaved", 1),
    "a fault with its remedy, in preflight, plans, doctor and docs": ("slow-cable", 1),
    "a fault that the doctor alone sees": ("firewall-asks", 1),
}
"""Files that name one of each kind: as many does the next of its kind touch."""

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


def many_public(node: ast.ClassDef) -> bool:
    return len([name for name in methods(node) if not name.startswith("_")]) > MOST_PUBLIC_METHODS


def many_fields(node: ast.ClassDef) -> bool:
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    data = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    data |= any(each.arg == "number" for each in node.keywords)  # a message
    return data and len(fields) > MOST_FIELDS


def many_positional(tree: ast.AST) -> list[str]:
    return [
        node.name
        for node in walked(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len([each for each in positional(node) if each.arg not in ("self", "cls")]) > MOST_POSITIONAL
    ]


def positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args]


def outside_their_class(tree: ast.Module) -> list[str]:
    """Return private functions that first take an object of a class beside them: methods in disguise."""
    here = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("_")
        and any(
            isinstance(each.annotation, ast.Name) and each.annotation.id in here
            for each in positional(node)[:1]
        )
    ]


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
                    if takes_a_verb(node):
                        continue  # `handlers_of` finds it
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


def takes_a_verb(node: ast.AST) -> bool:
    given = positional(node)[1:] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
    return any(each.annotation and ast.unparse(each.annotation).startswith("verbs.") for each in given)


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
        "capture_signals", "_should_upgrade",  # uvicorn's server
        "on_broken_pipe",  # rich's console
        "seekable",  # a file for safetensors
        "exec_module",  # Python's imports
        "keys_and_values", "make_mask", "update_and_fetch",  # mlx-lm's models, of a cache
    }
)  # fmt: skip


def test_every_function_has_a_caller() -> None:
    found = uncalled(dict(trees()))
    assert [each for each in found if each.rpartition(" ")[2] not in CALLED_BY_OTHERS] == []


def test_the_package_is_no_larger_than_it_was() -> None:
    at_most("files", len(FILES))
    lines: Counter[str] = Counter()
    for path, text in FILES.items():
        lines[path.parts[1] if len(path.parts) > 2 else ""] += text.count("\n")
    assert lines.keys() == MOST_LINES.keys()
    assert {name: count for name, count in lines.items() if count > MOST_LINES[name]} == {}


def test_what_is_added_next_touches_no_more_files() -> None:
    texts = [path.read_text() for kind in ("*.py", "*.js") for path in (ROOT / "mlxtp").rglob(kind)]
    found = {
        what: (name, len([text for text in texts if re.search(rf"\b{name}\b", text)]))
        for what, (name, _) in TOUCHES.items()
    }
    assert found == TOUCHES


def test_classes_and_functions_keep_their_shape() -> None:
    every = [node for _, tree in trees() for node in classes(tree)]
    at_most("classes with many public methods", len([node for node in every if many_public(node)]))
    at_most("dataclasses with many fields", len([node for node in every if many_fields(node)]))
    at_most("functions with many positional parameters", sum(len(many_positional(t)) for _, t in trees()))
    at_most(
        "functions of an object of a class beside them", sum(len(outside_their_class(t)) for _, t in trees())
    )


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ('"""What it is."""', clauses),
        ('def f():\n    """Whether it is so."""', clauses),
        ("from asyncio.sslproto import _x", private_imports),
        ("import uvicorn._impl", private_imports),
        ("def f(): ...", lambda tree: uncalled({"a.py": tree})),
        ("class A:\n    def f(self, _: Verb): ...\nA", lambda tree: uncalled({"a.py": tree})),
        (
            "class A:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(21)),
            lambda tree: large(classes(tree)[0]),
        ),
        (
            "class A:\n    def m(self):\n" + "".join(f"        self.a{n} = 1\n" for n in range(16)),
            lambda tree: large(classes(tree)[0]),
        ),
        (
            "class A:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(13)),
            lambda tree: many_public(classes(tree)[0]),
        ),
        (
            "@dataclass(slots=True)\nclass A:\n" + "".join(f"    f{n}: int\n" for n in range(21)),
            lambda tree: many_fields(classes(tree)[0]),
        ),
        ("def f(a, b, c, d, e, f): ...", many_positional),
        ("class A: ...\ndef _f(a: A) -> None: ...", outside_their_class),
    ],
)
def test_each_measure_can_fail(code: str, rule) -> None:
    assert rule(ast.parse(code))
