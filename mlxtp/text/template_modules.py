"""Chat templates that mlx-lm has as Python modules, for models without a Jinja template: DeepSeek V3.2's.

They are mlx-lm's code and never the model's. A module is loaded from its file, because `import mlx_lm` would
import MLX.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

#: Messages in, with `add_generation_prompt` and perhaps `enable_thinking`; the prompt out.
ModuleRender = Callable[..., str]


@cache
def template_module(name: str) -> ModuleRender | None:
    """Return `apply_chat_template` of the module `name` of mlx_lm.chat_templates; None if there is none."""
    package = importlib.util.find_spec("mlx_lm")
    if package is None or package.origin is None or not name.isidentifier():
        return None
    path = Path(package.origin).parent / "chat_templates" / f"{name}.py"
    if name.startswith("_") or not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"mlxtp_chat_template_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: ModuleRender | None = getattr(module, "apply_chat_template", None)
    return found
