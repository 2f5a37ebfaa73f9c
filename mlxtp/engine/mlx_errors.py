"""Classification of MLX's errors by their text: out of memory, and a GPU that took too long. Pure.

On Linux a lack of memory is a MemoryError. On Metal it is a RuntimeError like any other, from MLX's allocator
or from a command buffer. A command that the system ended because it took too long is one, too.
"""

from __future__ import annotations

import re

from ..errors import Code

_CODES = (
    (re.compile(r"^\[(?:metal::)?malloc\] |\[METAL\] .*Insufficient Memory"), Code.OUT_OF_MEMORY),
    (re.compile(r"\[METAL\] .*(?:GPU Timeout|GPU Hang|Impacting Interactivity)"), Code.GPU_TIMEOUT),
)


def code_of(error: BaseException, otherwise: Code) -> Code:
    """Return OUT_OF_MEMORY, GPU_TIMEOUT, or `otherwise` for an error that is neither."""
    if isinstance(error, MemoryError):
        return Code.OUT_OF_MEMORY
    return next((code for text, code in _CODES if text.search(str(error))), otherwise)
