"""mlx-lm without what no rank needs: text is the agent's business, and so is the Hub.

`import mlx_lm` loads transformers and huggingface-hub, which takes 2.2 of its 2.7 s of processor time (Linux,
one core) whenever a rank starts, and a group that recovers waits for that.
"""

from __future__ import annotations

import sys
from types import ModuleType

_ABSENT = {
    "transformers": ("PreTrainedTokenizer",),
    "huggingface_hub": ("snapshot_download",),
    "mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"),
}
"""What mlx-lm takes from modules that it then only needs to tokenize and to download."""


def import_mlx_lm() -> None:
    """Import mlx-lm while these modules are empty, then take the empty ones away.

    Whatever imports them later, a model's own code say, gets the real ones. An mlx-lm that needs more of them
    than this knows is imported as a whole.
    """
    if "mlx_lm" in sys.modules:
        return
    empty = {
        name: _empty(name, attributes) for name, attributes in _ABSENT.items() if name not in sys.modules
    }
    sys.modules.update(empty)
    try:
        import mlx_lm.utils
    except Exception:  # noqa: BLE001 - as said above
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
    """In place of a class or a function."""

    def __new__(cls, *_: object, **__: object) -> _Absent:
        raise RuntimeError(f"a rank was to use {cls.__module__}.{cls.__name__}, which only agents load")
