"""A pytest plugin of the suites' own environment: plays the peer's server and modules, writes each result.

`PEER_URL` is the endpoint, `PEER_RESULTS` the file that gets a JSON line for each test, `PEER_TOKENIZER` the
model's folder. It imports nothing of mlxtp.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import types
from fnmatch import fnmatchcase as fnmatch
from functools import partialmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest

URL = os.environ["PEER_URL"]
ABSENT = re.compile(r"(vllm|torch|wget|xgrammar|PIL|librosa|soundfile|model_hosting_container_standards)\b")
SERVES = re.compile(r"client|server|openai_api|base_url")


class Nothing:
    """In place of what a suite imports and a test over HTTP never needs: false and empty."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __radd__(self, other: Any) -> Any:
        return other

    def __sub__(self, _: Any) -> int:
        return 0

    __getitem__ = __or__ = __ror__ = __truediv__ = __add__ = __enter__ = __call__

    def __exit__(self, *_: object) -> None:
        pass


class Absent(types.ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return get_tokenizer if name == "get_tokenizer" else Nothing()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are absent."""

    def find_spec(self, name: str, *_: Any) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if ABSENT.match(name) else None

    def create_module(self, spec: Any) -> Any:
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, Finder())


def get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["PEER_TOKENIZER"])


class RemoteOpenAIServer:
    """vLLM's name for a server that a test starts. It runs already."""

    DUMMY_API_KEY = "none"
    host, port = URL.removeprefix("http://").split(":")
    url_root = URL
    uds = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *parts])

    def _made(self, library: str, name: str, **given: Any) -> Any:
        base = self.url_for("v1") if library == "openai" else URL
        given = {"base_url": base, "api_key": self.DUMMY_API_KEY, "timeout": 60, "max_retries": 0} | given
        return getattr(__import__(library), name)(**given)

    get_client = partialmethod(_made, "openai", "OpenAI")
    get_async_client = partialmethod(_made, "openai", "AsyncOpenAI")
    get_client_anthropic = partialmethod(_made, "anthropic", "Anthropic")
    get_async_client_anthropic = partialmethod(_made, "anthropic", "AsyncAnthropic")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what asks no server, all models of a suite but one, and what `suites.toml` leaves out."""
    left_out = json.loads(os.environ["PEER_LEFT_OUT"])
    items[:] = [
        item
        for item in items
        if ("vllm" not in str(config.rootpath) or any(map(SERVES.search, item.fixturenames)))
        and ("server_config" not in item.fixturenames or "[hermes" in item.name)
        and not any(fnmatch(item.nodeid, pattern) for pattern in left_out)
    ]


def pytest_collection_finish(session: Any) -> None:
    """Note every test, so that one counts that a dying process never came to."""
    for item in session.items:
        _write(item.nodeid, False, "it did not run")


def pytest_runtest_logreport(report: Any) -> None:
    """Write a test's end, or its failure before. A test that is skipped did not fail."""
    if report.failed or report.skipped or report.when == "call":
        crash = getattr(report.longrepr, "reprcrash", None)
        note = crash.message if crash else str(report.longrepr or "")
        _write(report.nodeid, None if report.skipped else report.passed, note[:1000])


def _write(test: str, passed: bool | None, note: str) -> None:
    with Path(os.environ["PEER_RESULTS"]).open("a") as file:
        file.write(json.dumps({"test": test, "passed": passed, "note": note}) + "\n")


@pytest.fixture(scope="session")
def url() -> str:
    return URL
