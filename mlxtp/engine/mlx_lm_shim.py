"""Import of mlx-lm without modules that no rank needs, because only agents handle text and the Hub.

`import mlx_lm` loads transformers and huggingface-hub, which takes 2.2 of its 2.7 s of processor time (Linux,
one core) whenever a rank starts. A recovering group waits for that.
"""

from __future__ import annotations

import sys
from types import ModuleType

#: Names that mlx-lm imports from modules that it needs only to tokenize and to download.
_ABSENT = {
    "transformers": ("PreTrainedTokenizer",),
    "huggingface_hub": ("snapshot_download",),
    "mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"),
}


def import_mlx_lm() -> None:
    """Import mlx-lm while these modules are empty, then remove the empty ones.

    A later import, such as one by a model's own code, gets the real ones. An mlx-lm that needs other names of
    these modules is imported as a whole.
    """
    if "mlx_lm" in sys.modules:
        return
    empty = {
        name: _empty(name, attributes) for name, attributes in _ABSENT.items() if name not in sys.modules
    }
    sys.modules.update(empty)
    try:
        import mlx_lm.utils
    except Exception:  # noqa: BLE001 - see the docstring
        for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]:
            del sys.modules[name]
    finally:
        for name, module in empty.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
    import mlx_lm.utils  # noqa: F401


def _empty(name: str, attributes: tuple[str, ...]) -> ModuleType:
    module = ModuleType(name)
    for attribute in attributes:
        setattr(module, attribute, type(attribute, (_Absent,), {"__module__": name}))
    return module


class _Absent:
    """Placeholder for a class or a function."""

    def __new__(cls, *_: object, **__: object) -> _Absent:
        raise RuntimeError(f"a rank used {cls.__module__}.{cls.__name__}, which only agents load")
