"""Import of mlx-lm without modules that no rank needs, and the meaning of MLX's errors."""

from __future__ import annotations

import re
import sys
from types import ModuleType

from ..errors import Code

# --- import of mlx-lm; only agents handle text and the Hub -----------------------------------------------
# Transformers and huggingface-hub take 2.2 of the 2.7 s of `import mlx_lm`, and delay a group's recovery.

#: Names that mlx-lm imports from modules that it needs only to tokenize and to download.
_ABSENT = {
    "transformers": ("PreTrainedTokenizer",),
    "huggingface_hub": ("snapshot_download",),
    "mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"),
}


def import_mlx_lm() -> None:
    """Import mlx-lm with empty stand-ins for these modules, or if that fails, with the real ones."""
    if "mlx_lm" in sys.modules:
        return
    empty = {name: _empty(name, needed) for name, needed in _ABSENT.items() if name not in sys.modules}
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
        setattr(module, attribute, type(attribute, (Absent,), {"__module__": name}))
    return module


class Absent:
    def __new__(cls, *_: object, **__: object) -> Absent:
        raise RuntimeError(f"a rank used {cls.__module__}.{cls.__name__}, which only agents load")


# --- MLX's errors by their text: out of memory, and a GPU that took too long -----------------------------
# Out of memory is a MemoryError on Linux. On Metal, it is a RuntimeError, as is a timeout. Its text is in the
# user's language, with the error's name in parentheses.

_NAME = "kIOGPUCommandBufferCallbackError"
_MEMORY = rf"^\[(?:metal::)?malloc\] |\[METAL\] .*(?:Insufficient Memory|{_NAME}OutOfMemory)"
_TIME = (
    r"\[METAL\] .*(?:GPU Timeout|GPU Hang|Impacting Interactivity"
    rf"|{_NAME}(?:Timeout|Hang|ImpactingInteractivity))"
)
_CODES = ((re.compile(_MEMORY), Code.OUT_OF_MEMORY), (re.compile(_TIME), Code.GPU_TIMEOUT))


def code_of(error: BaseException, otherwise: Code) -> Code:
    """Return OUT_OF_MEMORY, GPU_TIMEOUT, or `otherwise` for an error that is neither."""
    if isinstance(error, MemoryError):
        return Code.OUT_OF_MEMORY
    return next((code for text, code in _CODES if text.search(str(error))), otherwise)
