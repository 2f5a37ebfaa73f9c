"""Chat template and tokenizer of one model: all code that runs files of the model.

An agent runs it in a process of its own (`sandbox.py`), because a template may never end and a tokenizer may
take any amount of memory. Work on texts waits in a queue with a bound on the wait.

mlx-lm has chat templates as Python modules, for models without a Jinja template: DeepSeek V3.2's. They are
mlx-lm's code and never the model's. A module is loaded from its file, because `import mlx_lm` would import
MLX.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..errors import Code, ModelError, RequestError, is_library_error
from ..tokenizer_file import TIKTOKEN_FILE, table, tokenizer_json, tokenizer_settings

# --- the queue of work ------------------------------------------------------------------------------------


T = TypeVar("T")

MOST_WAIT_S = 30.0  # seconds before a request is refused


class WorkerQueue:
    """One thread that runs one piece of work after the other. Work that waits too long is refused."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "text")
        self._thread = self._pool.submit(threading.get_ident).result()

    @property
    def here(self) -> bool:
        """True in the thread of this queue."""
        return threading.get_ident() == self._thread

    def run_blocking(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, at once in the queue's own thread. Raises as `work` does."""
        return work() if self.here else self._pool.submit(work).result()

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises as `work` does, and RequestError 503."""
        working = self._pool.submit(copy_context().run, work)
        waiting = asyncio.wrap_future(working)
        try:
            done, _ = await asyncio.wait({waiting}, timeout=MOST_WAIT_S)
            if not done and working.cancel():  # it has not begun
                detail = f"other prompts kept the tokenizer busy for {MOST_WAIT_S:g} s"
                raise RequestError(detail, Code.OVERLOADED, status=503)
            return await waiting
        finally:
            working.cancel()


# --- templates in Python ----------------------------------------------------------------------------------


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


# --- the renderer -----------------------------------------------------------------------------------------


Json = Mapping[str, Any]

_SHOWN = 200  # characters of another library's error
_SETTINGS = ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template", "chat_template_type")


@dataclass(frozen=True, slots=True)
class RendererFacts:
    """Facts of a model's text that an agent needs.

    `tokenizer` is the model's tokenizer.json, `eos` its end token or -1.
    `template` holds the model's chat templates, empty where mlx-lm's module (or nothing) takes their place.
    `renders` is True where there is either.
    """

    tokenizer: str
    template: str
    renders: bool
    eos: int


class Renderer(Protocol):
    """Chat template and tokenizer. Methods block, and may be called from any thread. Raise RequestError."""

    @property
    def facts(self) -> RendererFacts: ...

    def render(
        self, messages: Sequence[Json], tools: Sequence[Json], options: Json, *, prompting: bool
    ) -> str:
        """Return a conversation as the template writes it; `prompting` adds the beginning of an answer."""
        ...

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Return token ids; `special` adds the tokens that begin every sequence."""
        ...

    def line(self, size: int) -> WorkerQueue:
        """Return the queue for work on texts of `size` bytes or characters.

        The work may call this renderer.
        """
        ...


class LocalRenderer:
    """Renderer in this process. `tokenizer` is a `transformers` tokenizer with a `tokenizers` backend."""

    def __init__(self, tokenizer: Any, module: ModuleRender | None = None) -> None:
        """Use `module`, if there is one, in place of the tokenizer's own chat template."""
        self._tokenizer = tokenizer
        self._module = module
        self._backend = tokenizer.backend_tokenizer
        self._line = WorkerQueue()
        self._backend.no_truncation()
        self._backend.no_padding()

    @classmethod
    def load(cls, path: Path) -> LocalRenderer:
        """Read a model folder, which takes a second or more. Raises ModelError."""
        if not path.is_dir():
            raise ModelError(f"{path} is not a folder", Code.MODEL_NOT_FOUND)
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if (path / TIKTOKEN_FILE).is_file():
                backend, settings = Tokenizer.from_str(tokenizer_json(path)), tokenizer_settings(path)
                options = {name: _plain(settings[name]) for name in _SETTINGS if name in settings}
                tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
            else:
                tokenizer = AutoTokenizer.from_pretrained(
                    path, local_files_only=True, trust_remote_code=False
                )
        except ModelError:
            raise
        except BaseException as error:
            if not is_library_error(error):
                raise
            what = " ".join(str(error).split())[:_SHOWN]
            raise ModelError(
                f"the tokenizer or config.json in {path} cannot be read ({type(error).__name__}: {what}); "
                "a complete model folder has tokenizer.json and tokenizer_config.json"
            ) from error
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ModelError(f"{path} has no tokenizer.json; tokenizers written in Python are not supported")
        if not (path / "tokenizer.json").is_file():
            _check_added_tokens(tokenizer, path)
        return cls(tokenizer, _template_module(tokenizer, path))

    @property
    def facts(self) -> RendererFacts:
        own = self._tokenizer.chat_template
        eos = self._tokenizer.eos_token_id
        return RendererFacts(
            self._backend.to_str(),
            "" if self._module else _whole_template(own),
            bool(self._module or own),
            -1 if eos is None else int(eos),
        )

    def render(
        self, messages: Sequence[Json], tools: Sequence[Json], options: Json, *, prompting: bool
    ) -> str:
        try:
            plain = [dict(message) for message in messages]
            if self._module is not None:
                known = {name: options[name] for name in ("enable_thinking",) if name in options}
                return str(self._module(plain, add_generation_prompt=prompting, **known))
            return str(
                self._tokenizer.apply_chat_template(
                    plain,
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=prompting,
                    **options,
                )
            )
        except MemoryError:
            raise too_large() from None
        except Exception as error:  # a template may raise anything
            raise RequestError(
                f"the model's chat template refuses these messages: {error or type(error).__name__}",
                param="messages",
            ) from error

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        try:
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        except (TypeError, UnicodeError) as error:
            raise RequestError(
                f"the messages hold half a character, such as \\ud800, which is no text: {error}",
                param="messages",
            ) from None
        except BaseException as error:
            if not is_library_error(error):
                raise
            raise broken(f"{type(error).__name__}: {str(error)[:_SHOWN]}") from error
        return tuple(found.ids)

    def line(self, size: int) -> WorkerQueue:
        return self._line


def broken(why: str) -> RequestError:
    """Return the error of a model whose template or tokenizer does not work."""
    detail = f"the model's chat template or tokenizer fails: {why}"
    return RequestError(detail, Code.MODEL_INVALID, status=422, param="messages")


def too_large() -> RequestError:
    """Return the error of a conversation that took too much memory."""
    return broken("these messages need more memory than its process may use")


def _plain(setting: Any) -> Any:
    """Return the text of a special token, without the flags that may be written beside it."""
    return setting.get("content") if isinstance(setting, Mapping) else setting


def _template_module(tokenizer: Any, path: Path) -> ModuleRender | None:
    """Return mlx-lm's template module: the one that the tokenizer names, or else the family's."""
    name = tokenizer.init_kwargs.get("chat_template_type")
    if name is None and not tokenizer.chat_template:
        with contextlib.suppress(OSError, ValueError):
            name = table(path / "config.json").get("model_type")
    return template_module(name) if isinstance(name, str) else None


def _check_added_tokens(tokenizer: Any, path: Path) -> None:
    """Raise ModelError if a tokenizer that the library made has other ids than tokenizer_config.json."""
    try:
        added = table(path / "tokenizer_config.json").get("added_tokens_decoder", {})
        wanted = {int(id_): token["content"] for id_, token in added.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return  # nothing to compare with
    for id_, content in wanted.items():
        if (found := tokenizer.backend_tokenizer.token_to_id(content)) != id_:
            raise ModelError(
                f"{path} has no tokenizer.json, and its other files make {content!r} token {found} instead "
                f"of {id_}; use a conversion that has tokenizer.json",
                Code.MODEL_UNSUPPORTED,
            )


def _whole_template(template: Any) -> str:
    """Return all texts of a model that has one template for chats and one for tools."""
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return str(template or "")
