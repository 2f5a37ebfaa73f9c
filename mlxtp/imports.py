"""Imports of many modules at the start of a process, and facts of packages without importing them."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process silently, and collect no garbage, until the context ends.

    The system ends the process, since a module that is being imported could catch or print an exception. A
    background process still ignores Ctrl-C. Collections would find nothing and take a tenth of an agent's
    start. Later collections skip all objects that exist at the end of the context.
    """
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def installed(package: str) -> str:
    import importlib.metadata

    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def metal_wheel() -> str:
    """Return the platform of the installed mlx-metal, such as "macosx_26_0_arm64"; "" without it.

    Wheels of one version for macOS 14, 15 and 26 have different kernels.
    """
    import importlib.metadata

    with suppress(importlib.metadata.PackageNotFoundError):
        about = importlib.metadata.distribution("mlx-metal").read_text("WHEEL") or ""
        return "".join(re.findall(r"^Tag: .*-(macosx_\w+)$", about, re.MULTILINE)[:1])
    return ""


# --- transformers' tokenizers without its packages' own files, which read the source of every model ---------
# Reading them takes 0.55 of a tokenizer process's 0.9 s of processor time (Linux, one core).

_PACKAGES = ("transformers", "transformers.models")
#: Names of `transformers` that a tokenizer needs, with their modules.
_NAMES = {
    "AutoTokenizer": "models.auto.tokenization_auto",
    "PreTrainedTokenizer": "tokenization_python",
    "PreTrainedTokenizerFast": "tokenization_utils_tokenizers",
}


class LightPackage(ModuleType):
    """A package whose own file runs only when code needs another name of the package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _remove()
        return getattr(importlib.import_module(self.__name__), name)


def import_tokenizers() -> None:
    """Import the tokenizer classes of transformers, and the rest only when code needs it.

    For a separate process. A version of transformers with other modules is imported whole.
    """
    import importlib.metadata

    try:
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            package = importlib.util.module_from_spec(spec)
            package.__class__ = LightPackage
            sys.modules[name] = package
        light = sys.modules["transformers"]
        vars(light)["__version__"] = importlib.metadata.version("transformers")
        for name, module in _NAMES.items():
            vars(light)[name] = getattr(importlib.import_module(f"transformers.{module}"), name)
    except Exception:  # noqa: BLE001 - see the docstring
        _remove()


def _remove() -> None:
    for name in _PACKAGES:
        if isinstance(sys.modules.get(name), LightPackage):
            del sys.modules[name]
