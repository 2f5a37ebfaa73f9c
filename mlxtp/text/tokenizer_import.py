"""Import of transformers' tokenizers without the files of its packages, which read the source of every model.

That reading takes 0.55 of the 0.9 s of processor time of a tokenizer process (Linux, one core).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType
from typing import Any

_PACKAGES = ("transformers", "transformers.models")
#: Names of `transformers` that reading a tokenizer needs, by their modules.
_NAMES = {
    "AutoTokenizer": "models.auto.tokenization_auto",
    "PreTrainedTokenizer": "tokenization_python",
    "PreTrainedTokenizerFast": "tokenization_utils_tokenizers",
}


class LightPackage(ModuleType):
    """A package whose own file has not run. It runs when code needs another name of the package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _remove()
        return getattr(importlib.import_module(self.__name__), name)


def import_tokenizers() -> None:
    """Import what `from transformers import AutoTokenizer, PreTrainedTokenizerFast` needs.

    For a process of its own: transformers stays light until code needs the rest of it. Other versions of
    transformers, which may lie elsewhere, are imported as a whole.
    """
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
