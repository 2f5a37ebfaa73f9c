"""Rules about the source itself, read off the syntax tree. Beside each rule stands code that breaks it."""

from __future__ import annotations

import ast
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ..live_cluster import WAIT_S

ROOT = Path(__file__).parents[2]
Source = Mapping[str, str]
"""Texts by module name, such as `mlxtp.wire.blocking`."""
Rule = Callable[[Source], list[str]]


def read(folder: str) -> dict[str, str]:
    modules = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return modules


PACKAGE = read("mlxtp")
TESTS = read("tests")


@pytest.fixture(scope="module", autouse=True)
def _trees_are_let_go() -> Iterator[None]:
    """Keep the trees for the tests of this file only: collections visit millions of objects for nothing."""
    gc.disable()
    yield
    for each in (parsed, walked, import_statements):
        each.cache_clear()
    gc.enable()


def trees(source: Source) -> Iterator[tuple[str, ast.Module]]:
    return ((module, parsed(text)) for module, text in source.items())


def having(word: str, source: Source) -> Source:
    return {module: text for module, text in source.items() if word in text}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def walked(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


@cache
def import_statements(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in walked(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(module: str, tree: ast.Module, *, packages: frozenset[str] = frozenset()) -> Iterator[str]:
    """Full names of what is imported, at any place; `from a import b` gives `a.b`."""
    for node in import_statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = node.module or ""
            if node.level:
                up = node.level - (module in packages)
                parents = module.split(".")[: len(module.split(".")) - up]
                base = ".".join([*parents, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    """`mx.distributed.all_sum` for the expression that says so, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def top(module: str) -> str:
    return module.partition(".")[0]


GROUP = "mlxtp.engine.group"
COLLECTIVES = frozenset(
    ("all_sum", "all_gather", "all_max", "all_min", "sum_scatter", "send", "recv", "recv_like")
)


CUTS: Mapping[str, frozenset[str]] = {
    "mlxtp.engine.families": frozenset(
        f"mlx.nn.layers.distributed.{name}" for name in ("shard_inplace", "shard_linear")
    )
}
"""What else may be imported: how weights are cut, which is no collective."""


def distributed_outside_group(source: Source) -> list[str]:
    """`mx.distributed` is named in one file only."""
    found = []
    for module, tree in trees(having("distributed", source)):
        if module == GROUP:
            continue
        named = {name for name in imports(module, tree) if "distributed" in name.split(".")}
        if named - CUTS.get(module, frozenset()):
            found.append(f"{module} imports it")
        for node in walked(tree):
            if isinstance(node, ast.Attribute) and node.attr == "distributed":
                found.append(f"{module}:{node.lineno} names it")
            if isinstance(node, ast.Constant) and node.value == "distributed":
                found.append(f"{module}:{node.lineno} names it in a string")
    return found


BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.While, ast.Match, ast.Try, ast.BoolOp,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


def collectives_in_branches(source: Source) -> list[str]:
    """Return collectives that stand where ranks could part ways, or could have left already."""
    found = []
    for module, tree in trees(having("distributed", source)):
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not list(collective_calls(function)):
                continue
            for branch in ast.walk(function):
                if not isinstance(branch, BRANCHES):
                    continue
                found += [f"{module}:{call.lineno} in a branch" for call in collective_calls(branch)]
                if any(isinstance(node, (ast.Return, ast.Raise)) for node in ast.walk(branch)):
                    found.append(f"{module}:{branch.lineno} may leave before a collective")
    return found


def collective_calls(node: ast.AST) -> Iterator[ast.Call]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            *owner, name = dotted(call.func).split(".")
            if name in COLLECTIVES and owner[-1:] == ["distributed"]:
                yield call


def test_collectives_are_named_in_one_file() -> None:
    assert distributed_outside_group(PACKAGE) == []
    assert "mx.distributed" in PACKAGE[GROUP]


def test_no_collective_stands_in_a_branch() -> None:
    assert collectives_in_branches(PACKAGE) == []
    assert len(list(collective_calls(ast.parse(PACKAGE[GROUP])))) == 4, "the sum, the gather and the messages"


MAY_IMPORT: Mapping[str, frozenset[str]] = {
    part: frozenset(known.split())
    for part, known in {
        "admission_counter": "",
        "audit": "",
        "errors": "",
        "values": "errors",
        "background": "",
        "chunks": "wire",
        "description": "",
        "free_memory": "",
        "settings": "values",
        "config": "errors settings values",
        "model_files": "errors model_config",
        "vector_files": "errors model_config model_files",
        "wire": "admission_counter errors",
        "short_names": "",
        "verbs": "errors settings values",
        "model_config": "errors",
        "model_sources": "model_config",
        "engine": (
            "admission_counter chunks description errors free_memory model_config model_files model_sources "
            "vector_files wire"
        ),
        "placement": "chunks description errors free_memory model_config wire",
        "discovery": "background",
        "identity": "audit background config discovery errors wire",
        "text": "admission_counter errors imports model_files",
        "api": (
            "admission_counter audit config errors identity model_files short_names text vector_files verbs"
        ),
        "cluster": "audit background config discovery errors identity imports placement settings wire",
        "models": (
            "api background cluster config description errors identity model_config model_files "
            "model_sources placement short_names text vector_files wire"
        ),
        "gateway": "api errors models text wire",
        "diagnostics": "api cluster config discovery errors gateway identity imports placement wire",
        "groups": (
            "api background cluster config diagnostics discovery errors gateway identity models "
            "placement short_names values wire"
        ),
        "admin": (
            "api cluster config diagnostics errors gateway groups identity models placement "
            "short_names values verbs wire"
        ),
        "client": "errors verbs",
        "service": "client config errors verbs",
        "logs": "api audit errors settings wire",
        "agent": "admin api background cluster config errors gateway groups identity models placement wire",
        "imports": "",
        "cli": (
            "agent api audit background client cluster config description diagnostics errors "
            "free_memory groups identity imports logs mlxtp model_files models placement service "
            "settings short_names values verbs wire"
        ),
        "__main__": "cli imports",
        "mlxtp": "",
    }.items()
}
"""For each part of the package, the parts it may know; the package itself has its version alone."""
ALSO = frozenset(
    {
        # one definition of what requests may set
        ("mlxtp.api.backend", "mlxtp.wire.messages"),
        # one list of names of secrets
        ("mlxtp.text.renderer", "mlxtp.wire.rank_process"),
    }
)
"""Single modules that may, until what they need is handed to them."""


def imported_modules(source: Source) -> dict[str, set[str]]:
    """For each module the modules of `source` that it imports."""
    packages = frozenset(
        module for module in source if any(other.startswith(f"{module}.") for other in source)
    )
    graph: dict[str, set[str]] = {}
    for module, tree in trees(source):
        graph[module] = set()
        for name in imports(module, tree, packages=packages):
            target = name if name in source else name.rpartition(".")[0]
            if target in source and target != module:
                graph[module].add(target)
    return graph


def part(module: str) -> str:
    """The longest of the names above that the module is in."""
    name = module.removeprefix("mlxtp").removeprefix(".")
    inner = ".".join(name.split(".")[:2])
    return inner if inner in MAY_IMPORT else name.split(".")[0] or "mlxtp"


def wrong_directions(source: Source) -> list[str]:
    found = []
    for module, targets in imported_modules(source).items():
        if part(module) not in MAY_IMPORT:
            found.append(f"it is not known what {module} may import")
            continue
        found += [
            f"{module} imports {target}"
            for target in sorted(targets)
            if part(target) != part(module)
            and part(target) not in MAY_IMPORT[part(module)]
            and (module, target) not in ALSO
        ]
    return found


def cycles(source: Source) -> list[str]:
    try:
        TopologicalSorter(imported_modules(source)).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def test_imports_follow_the_direction() -> None:
    assert wrong_directions(PACKAGE) == []
    graph = imported_modules(PACKAGE)
    assert "mlxtp.wire.messages" in graph["mlxtp.engine.decode_loop"]
    assert "mlxtp.errors" in graph["mlxtp.wire.frames"]


def test_each_exception_is_still_needed() -> None:
    graph = imported_modules(PACKAGE)
    assert [pair for pair in sorted(ALSO) if pair[1] not in graph.get(pair[0], set())] == []


def test_no_imports_go_in_circles() -> None:
    assert cycles(PACKAGE) == []


PURE = frozenset(
    ".".join(filter(None, ("mlxtp", package, name)))
    for package, names in {
        "": "admission_counter chunks model_config short_names verbs",
        "api": "key_limits request_context request_metrics sampling",
        "cluster": "cluster_state leadership membership place reconcile",
        "diagnostics": "causes checks facts rows",
        "engine": "disk_index jaccl kv_cache lookup payoff scheduler sequence speculation steps",
        "gateway": "routing",
        "groups": "health history",
        "models": "manifest",
        "placement": (
            "candidates cost_model faults formation machines_file measurements model_shape planner "
            "probe_machine probe_macos tables topology"
        ),
        "service": "launchd",
        "text": "answers argument_types call_syntax chat_template json_mender markups",
        "wire": "cluster_messages codecs frames messages protocol rdma recording session",
    }.items()
    for name in names.split()
)
IMPURE = frozenset(
    ("asyncio", "io", "logging", "mlx", "mlx_lm", "multiprocessing", "os", "pathlib", "queue", "random",
     "secrets", "select", "selectors", "signal", "socket", "ssl", "subprocess", "sys", "threading", "time")
)  # fmt: skip
IMPURE_CALLS = frozenset(("open", "print", "input"))


def impurities(source: Source) -> list[str]:
    """Return what reads a clock, a socket or a file, or computes with MLX, in modules that only decide."""
    found = []
    for module, tree in trees(source):
        if module not in PURE:
            continue
        found += [f"{module} imports {name}" for name in imports(module, tree) if top(name) in IMPURE]
        found += [
            f"{module}:{node.lineno} calls {dotted(node.func)}"
            for node in walked(tree)
            if isinstance(node, ast.Call) and dotted(node.func) in IMPURE_CALLS
        ]
    return found


def test_pure_modules_are_pure() -> None:
    assert impurities(PACKAGE) == []
    assert set(PURE) <= set(PACKAGE)


MOST_FILES: Mapping[str, int] = {"a verb": 2, "a field of a deployment": 3}
"""Files of `mlxtp/` that one more of each may take; the tests below add one."""
VERB = {
    "verbs.py": (
        "# --- members",
        '''
class Greet(Verb, post="greet", key_scope="load"):
    """Greet a member."""

    node: str = option("", "Its name.")
    words: str | None = option("--words", "What to say.", default=None, parse=one_of("hello", "hi"))
    aloud: bool = option("--aloud", "So that all hear it.", default=False)


''',
    ),
    "admin/handlers.py": (
        "    def close(self)",
        "    async def greet(self, verb: verbs.Greet) -> Json:\n        return vars(verb)\n\n",
    ),
}
FIELD = {
    "wire/cluster_messages.py": (
        "    @property\n    def pinned",
        "    rush: str = _f(text(8), default='')\n\n",
    ),
    "verbs.py": (
        "    only: bool",
        "    rush: str | None = option('--rush', '', default=None, parse=one_of('no', 'yes'))\n",
    ),
}
"""Text of each file, and the line before which it goes."""
NEW_VERB = """
import asyncio, json, sys
import httpx, typer
from typer.testing import CliRunner
from mlxtp import verbs
from mlxtp.admin import handlers
from mlxtp.api.app import create_app
from mlxtp.api.guard import SHARED_ADMIN
from mlxtp.cli.options import sends

told, commands = [], typer.Typer()
kinds = [each for name, each in vars(handlers).items() if name.endswith("Handlers")]
agent, *parts = (each.__new__(each) for each in (handlers.Admin, *kinds))
agent.key, agent._handlers = "k", handlers.handlers_of(agent, *parts)
app = create_app(None, admin=agent)

@commands.command()
@sends(verbs.Greet)
def greet(verb):
    told.append(verb)

async def ask(method, path, body):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        response = await client.request(method, path, json=body, headers={"authorization": "Bearer k"})
        return response.json()

given = ["mini", "--words", "hi", "--aloud"], ["mini", "--words", "x"]
typed = [CliRunner().invoke(commands, each) for each in given]
[verb] = told
schemas = asyncio.run(ask("GET", "/openapi.json", {}))
operation = schemas["paths"]["/admin/greet"]["post"]
print(json.dumps({
    "typed": [str(each.exception or "") for each in typed],
    "sent": asyncio.run(ask(verb.method, f"/admin/{verb.path}", verb.body())),
    "wrong": asyncio.run(ask(verb.method, f"/admin/{verb.path}", {"node": 5}))["error"]["message"],
    "summary": operation["summary"],
    "fields": list(schemas["components"]["schemas"]["Greet"]["properties"]),
    "scope": SHARED_ADMIN["/admin/greet"],
}))
"""
NEW_FIELD = """
import json, sys
from types import SimpleNamespace
from mlxtp.admin.parts import DeploymentSnapshot, deployments_rendered
from mlxtp.cli.cluster import _as_deployed
from mlxtp.cli.status import _chosen
from mlxtp.cluster.cluster_state import ClusterState, DeploymentTable
from mlxtp.cluster.state_changes import DesiredDeployments
from mlxtp.cluster.state_file import SavedState, from_text, to_text
from mlxtp.verbs import Serve

asked = Serve.read({"model": "tiny", "rush": "yes"}).parsed()
desired = SimpleNamespace(table=DeploymentTable())
row, plain = (DesiredDeployments.row(desired, "tiny", **each) for each in (asked, {}))
table, other = (DeploymentTable().setting(each, "a" * 32) for each in (row, plain))
kept = from_text(to_text(SavedState(ClusterState(deployments=table)))).beliefs.deployments
[shown] = deployments_rendered([DeploymentSnapshot(row, ())], {})
print(json.dumps({
    "kept": kept == table,
    "differ": table.digest != other.digest,
    "merged": table.merged(other) == other.merged(table) == table,
    "shown": shown["rush"],
    "status": _chosen(shown),
    "served": _as_deployed({**row.wishes(), "parallel": "auto"}),
}))
"""


def added(folder: Path, texts: Mapping[str, tuple[str, str]], story: str) -> Any:
    """Return the words of `story` in a copy of the package with these texts."""
    shutil.copytree(ROOT / "mlxtp", folder / "mlxtp", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, text) in texts.items():
        path = folder / "mlxtp" / name
        whole = path.read_text().replace("import Parser", "import Parser, one_of")
        assert before in whole
        path.write_text(whole.replace(before, text + before, 1))
    environment, command = {**os.environ, "PYTHONPATH": str(folder)}, [sys.executable, "-c", story]
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_one_more_verb_is_a_class_and_a_handler(tmp_path: Path) -> None:
    assert len(VERB) <= MOST_FILES["a verb"]
    assert added(tmp_path, VERB, NEW_VERB) == {
        "typed": ["", "--words: 'x' is not one of hello, hi"],
        "sent": {"node": "mini", "words": "hi", "aloud": True},
        "wrong": "node: a string is expected",
        "summary": "Greet a member.",
        "fields": ["node", "words", "aloud"],
        "scope": "load",
    }


@pytest.mark.slow
def test_one_more_field_of_a_deployment_leaves_room_for_what_it_is_good_for(tmp_path: Path) -> None:
    """That is the third file: a planner, for example."""
    assert len(FIELD) < MOST_FILES["a field of a deployment"]
    assert added(tmp_path, FIELD, NEW_FIELD) == {
        "kept": True,
        "differ": True,
        "merged": True,
        "shown": "yes",
        "status": ", --rush yes",
        "served": "1 replica, --rush yes",
    }


def mlx_outside_engine(source: Source) -> list[str]:
    """An agent that never touches MLX cannot be taken along by a rank's crash."""
    return [
        f"{module} imports {name}"
        for module, tree in trees(source)
        if part(module) != "engine"
        for name in imports(module, tree)
        if top(name) in ("mlx", "mlx_lm")
    ]


def test_only_ranks_know_mlx() -> None:
    assert mlx_outside_engine(PACKAGE) == []


@pytest.mark.slow
def test_an_agent_starts_without_mlx() -> None:
    script = (
        "import sys, mlxtp.agent, mlxtp.models.inspect\n"
        "from mlxtp.text.tokenizer import Text\n"
        "from mlxtp.config import embedded_model_path\n"
        "text = Text.load(embedded_model_path())\n"
        "text.relaxed({'x': {'minProperties': 1}}, True)\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'llguidance', 'mlx', 'mlx_lm'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == "[]\n"


EXECUTABLE_MODULES = frozenset(("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"))
EXECUTABLE_CALLS = frozenset(("eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load"))
LOADERS = ("from_pretrained", "load_model")  #: that run a model's code if they are told so


def executable_data(source: Source) -> list[str]:
    """Data that would run as a program when it is read."""
    found = []
    for module, tree in trees(source):
        found += [
            f"{module} imports {name}"
            for name in imports(module, tree)
            if top(name) in EXECUTABLE_MODULES or name in EXECUTABLE_CALLS
        ]
        for node in walked(tree):
            if not isinstance(node, ast.Call):
                continue
            if dotted(node.func) in EXECUTABLE_CALLS:
                found.append(f"{module}:{node.lineno} calls {dotted(node.func)}")
            silent = all(keyword.arg != "trust_remote_code" for keyword in node.keywords)
            if dotted(node.func).rpartition(".")[2] in LOADERS and silent:
                found.append(f"{module}:{node.lineno} leaves trust_remote_code to the library")
            for keyword in node.keywords:
                trusted = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in ("trust_remote_code", "allow_pickle") and not trusted:
                    found.append(f"{module}:{node.lineno} gives {keyword.arg}")
    return found


#: `families` compiles the changed source of an installed class of mlx-lm, which has been imported by then.
COMPILES = ["mlxtp.engine.families calls compile", "mlxtp.engine.families calls exec"]


def test_nothing_that_is_read_can_run() -> None:
    assert [re.sub(r":\d+", "", each) for each in executable_data(PACKAGE)] == COMPILES


ONLY_IN = {
    "Accepted": "mlxtp.engine.requests",
    "Prefilled": "mlxtp.engine.requests",
    "Delta": "mlxtp.engine.requests",
    "ScoredDelta": "mlxtp.engine.requests",
    "Vectors": "mlxtp.engine.requests",
    "Finished": "mlxtp.engine.requests",
    "self._followers.send": "mlxtp.engine.decode_loop",
    "Ack": "mlxtp.engine.serve_loop",
    "os._exit": "mlxtp.engine.worker",
    "mx.distributed.init": GROUP,
}
"""Rank 0 alone decides and speaks, the others alone acknowledge, and each process has one way out."""
SAID_AGAIN = frozenset(product(("Delta", "Finished"), ("mlxtp.gateway.dispatcher", "mlxtp.gateway.request")))
"""Calls by which an agent gives rank 0's messages another uid, or ends what no rank has."""
DECIDED = frozenset({("Finished", "mlxtp.engine.sequence")})
"""A message that the scheduler gives to rank 0's loop, which sends it."""
WEDGED = frozenset({("os._exit", "mlxtp.background")})
"""An agent whose main thread stands still has no other way out."""


def out_of_place(source: Source) -> list[str]:
    """Calls that stand elsewhere than in the one module that may make them; `case Delta():` is no call."""
    return [
        f"{module}:{node.lineno} calls {dotted(node.func)}"
        for module, tree in trees(source)
        for node in walked(tree)
        if isinstance(node, ast.Call)
        and (call := dotted(node.func).removeprefix("msg."))  # as modules import messages
        and ONLY_IN.get(call, module) != module
        and (call, module) not in SAID_AGAIN | DECIDED | WEDGED
    ]


def test_each_thing_is_done_in_its_one_place() -> None:
    assert out_of_place(PACKAGE) == []
    for call, module in ONLY_IN.items():
        assert f"{call}(" in PACKAGE[module]


def toothless(source: Source) -> list[str]:
    """Test files in which nothing is asserted, and tests that always pass.

    A test without an assertion says that something is accepted: it must call it, and let its errors out.
    """
    found = []
    for module, tree in trees(source):
        functions = [
            node for node in statements(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        asserting = {function.name for function in functions if asserts(function)}
        tests = [function for function in functions if function.name.startswith("test_")]
        if tests and not asserting:
            found.append(module)
        for test in tests:
            if test.name in asserting:
                continue
            called = {name for name, _ in calls(test)}
            if called & asserting:
                continue
            swallows = any(isinstance(node, ast.Try) for node in ast.walk(test)) or "suppress" in called
            if swallows or not called:
                found.append(f"{module}.{test.name}")
    return found


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Each statement in it, at any depth, without the expressions, which are most of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            yield each
            yield from statements(each)


def calls(function: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Each call in it, with the last part of the name of what is called."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func), node


def asserts(function: ast.AST) -> bool:
    """Return whether it asserts or expects an error."""
    return any(isinstance(node, ast.Assert) for node in statements(function)) or any(
        name.startswith(("assert", "raises")) for name, _ in calls(function)
    )


@pytest.mark.slow
def test_every_test_can_fail() -> None:
    assert toothless(TESTS) == []
    assert len(TESTS) > 10


def against_direction(source: Source) -> list[str]:
    return wrong_directions({**PACKAGE, **source})


def circular(source: Source) -> list[str]:
    return cycles(
        {"mlxtp": "", "mlxtp.b": "def f():\n    from . import c", "mlxtp.c": "import mlxtp.a", **source}
    )


SOUND = "def test_sound():\n    assert f()\n"
BREAKS: Mapping[Rule, Mapping[str, Sequence[str]]] = {
    distributed_outside_group: dict.fromkeys(
        ("mlxtp.engine.runner", *CUTS),
        (
            "import mlx.core as mx\nmx.distributed.all_sum(x)",
            "from mlx.core import distributed",
            "import mlx.core.distributed as d",
            "from mlx.core.distributed import all_sum",
            "import mlx\ndef f():\n    return mlx.core.distributed.init()",
            "import mlx.core as mx\ngetattr(mx, 'distributed').init()",
        ),
    ),
    collectives_in_branches: {
        GROUP: [
            "def f(x):\n    if rank == 0:\n        mx.distributed.all_sum(x)",
            "def f(x):\n    y = mx.distributed.all_sum(x) if debug else x",
            "def f(x):\n    for _ in range(n):\n        mx.distributed.all_gather(x)",
            "def f(x):\n    debug and mx.distributed.all_max(x)",
            "def f(x):\n    try:\n        mx.distributed.all_sum(x)\n    except RuntimeError:\n        pass",
            "def f(x):\n    if late:\n        return\n    mx.distributed.all_sum(x)",
            "def f(x):\n    [mx.distributed.all_sum(y) for y in x]",
        ]
    },
    against_direction: {
        "mlxtp.wire.blocking": ["from ..engine import scheduler", "from .. import config"],
        "mlxtp.engine.worker": ["from ..config import Settings", "import mlxtp.agent"],
        "mlxtp.api.app": [
            "def f():\n    from ..wire.messages import Delta",
            "from ..wire.messages import Sampling",
        ],
        "mlxtp.api.backend": ["from ..wire.blocking import Link"],
        "mlxtp.agent": ["from .engine.worker import main", "from . import cli"],
        "mlxtp.models.hub_client": ["from ..groups import lifecycle"],
        "mlxtp.errors": ["from .wire import messages"],
        "mlxtp.plugins": ["x = 1"],
    },
    circular: {"mlxtp.a": ["from .b import x"]},
    impurities: {
        "mlxtp.verbs": [
            "import time",
            "from socket import create_server",
            "def f():\n    import asyncio",
            "import mlx.core as mx",
            "from threading import Thread",
            "open('x')",
        ]
    },
    mlx_outside_engine: {
        "mlxtp.agent": ["import mlx.core as mx", "def f():\n    from mlx_lm.utils import load_model"]
    },
    executable_data: {
        "mlxtp.text.tokenizer": [
            "import pickle",
            "from marshal import loads",
            "def f(x):\n    return eval(x)",
            "exec('x = 1')",
            "import yaml\nyaml.load(x)",
            "from yaml import load",
            "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
            "AutoTokenizer.from_pretrained(x)",
            "mlx_lm.utils.load_model(x)",
            "AutoTokenizer.from_pretrained(x, trust_remote_code=trust)",
            "np.load(x, allow_pickle=True)",
        ]
    },
    out_of_place: {
        "mlxtp.engine.serve_loop": [
            "pipe.send(Delta((1,), (0,), (5,)))",
            "self._followers.send(Forward((1,), (2,)))",
        ],
        "mlxtp.engine.decode_loop": ["link.send(Ack(1, 1, 1, 1))", "link.send(msg.Ack(1, 1, 1, 1))"],
        "mlxtp.groups.lifecycle": ["os._exit(1)"],
    },
    toothless: {
        "tests.test_x": [
            "def test_a():\n    f()",
            "def check(x):\n    return x\ndef test_a():\n    check(f())",
            "async def test_a():\n    await f()",
            SOUND + "def test_a():\n    pass",
            SOUND + "def test_a():\n    x = 1",
            SOUND + "def test_a():\n    try:\n        f()\n    except E:\n        pass",
            SOUND + "class TestB:\n    def test_a(self):\n        with suppress(E):\n            f()",
        ]
    },
}
"""Code that breaks each rule, by the module where it stands."""
KEEPS: Sequence[tuple[Rule, str, str]] = [
    (distributed_outside_group, GROUP, "import mlx.core as mx\nmx.distributed.all_sum(x)"),
    (circular, "mlxtp.c", ""),
    (impurities, "mlxtp.wire.blocking", "import time"),
    (mlx_outside_engine, "mlxtp.engine.runner", "import mlx.core as mx"),
    (executable_data, "mlxtp.engine.runner", "mx.eval(x)\nload(x, trust_remote_code=False)"),
    (toothless, "tests.test_x", "def helper():\n    f()"),
    (toothless, "tests.test_x", SOUND),
    (toothless, "tests.test_x", SOUND + "def test_accepted():\n    f()"),
    (toothless, "tests.test_x", "def test_a():\n    with pytest.raises(E):\n        f()"),
    (
        toothless,
        "tests.test_x",
        "def check(x):\n    assert x\ndef test_a():\n    try:\n        check(f())\n    finally:\n        g()",
    ),
    *((rule, "mlxtp.agent", "") for rule in BREAKS),
]
"""Code that keeps to a rule, where the same or its like would break it elsewhere."""


@pytest.mark.parametrize(
    ("rule", "module", "bad"),
    [(rule, module, bad) for rule, codes in BREAKS.items() for module, some in codes.items() for bad in some],
)
def test_what_breaks_a_rule_is_found(rule: Rule, module: str, bad: str) -> None:
    assert rule({module: bad})


@pytest.mark.parametrize(("rule", "module", "good"), KEEPS)
def test_what_keeps_to_a_rule_is_left_alone(rule: Rule, module: str, good: str) -> None:
    assert rule({module: good}) == []


def test_nothing_writes_out_the_arrays_of_a_rank() -> None:
    """Text of an array computes it, on one rank alone; `signal.signal` makes that of a handler's object."""
    found = [
        f"{module}: {node.name}"
        for module, tree in trees(PACKAGE)
        if module.startswith("mlxtp.engine.")
        for node in walked(tree)
        if isinstance(node, ast.ClassDef)
        for each in map(ast.unparse, node.decorator_list)
        if "dataclass" in each and "eq=False" in each and "repr=False" not in each
    ]
    assert found == []


def test_a_test_file_bears_the_name_of_its_module() -> None:
    """Folders of tests without a package of that name hold stories, which no module owns."""
    lost = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        package = ROOT / "mlxtp" / path.parent.relative_to(ROOT / "tests")
        modules = {module.stem for module in package.glob("*.py")}
        name = path.stem.removeprefix("test_")
        if package.is_dir() and not any(f"{name}_".startswith(f"{module}_") for module in modules):
            lost.append(str(path.relative_to(ROOT)))
    assert lost == []
