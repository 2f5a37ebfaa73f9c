"""Model classes of mlx-vlm: the language models of families that mlx-lm lacks, for text alone.

A family's package is imported without its `__init__`, which imports code for images. Names that it would
offer are looked up in the modules that `__init__` takes them from.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from ..model_config import Config, family
from ..model_sources import MLX_LM, MLX_VLM, source_of
from .families import change
from .mlx_compat import Absent

#: Imported by mlx-vlm for images and downloads: empty stand-ins, unless a process has the real ones already.
_UNUSED = frozenset({"PIL", "cv2", "huggingface_hub", "requests", "transformers"})
#: Parts of a configuration with a class of arguments each, such as `TextConfig`.
_PARTS = ("text", "vision", "perceiver", "projector", "audio")
#: Caches that mlx-vlm has copied from mlx-lm; the engine meets mlx-lm's.
_CACHES = (
    *("BatchKVCache", "BatchRotatingKVCache", "CacheList", "ChunkedKVCache", "ConcatenateKVCache"),
    *("KVCache", "QuantizedKVCache", "RotatingKVCache"),
)
_EVALUATES = "async_eval"  #: The engine alone evaluates, so language models must not.


def is_of_vlm(config: Config) -> bool:
    return source_of(family(config)) == MLX_VLM


def classes_of(config: Config) -> tuple[Any, Any]:
    """Return the classes of a model and its arguments, as `load_model` of mlx-lm takes them."""
    name = family(config)
    if is_of_vlm(config):
        return _vlm_classes(name)
    module: Any = import_module(f"{MLX_LM}.models.{name}")
    return module.Model, module.ModelArgs


class LanguageModel(nn.Module):  # type: ignore[misc]  # mlx is untyped here
    """Language model of a family of mlx-vlm, called as mlx-lm's models are: tokens [B, L] -> logits."""

    package: Any  # set by the subclass of each family

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        whole = self.package.Model(arguments)
        text = whole.language_model
        self.model_type = self.package.__name__.rpartition(".")[2]
        self.language_model = text
        reads = hasattr(self.package, "LanguageModel") and hasattr(arguments, "text_config")
        self._readers = lambda: (whole, text) if reads else (whole,)  # no modules of this one
        self._told_positions = hasattr(text, "_rope_deltas")  # else it keeps an earlier prompt's
        for layer in self.layers:
            _keep_overlaps(layer)
            for part in layer.modules():
                if type(part).__name__ == "HyV4Indexer":  # compiled for the length of its first keys
                    part.__class__ = type(part).__base__
        if hasattr(text, "_supports_batch_invariant_decode"):
            text._supports_batch_invariant_decode = lambda: False  # it would not call the layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        more = {"position_ids": _positions(tokens, cache)} if self._told_positions else {}
        return cast("mx.array", self.language_model(tokens, cache=cache, **more).logits)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        for part in self._readers():
            weights = getattr(part, "sanitize", dict)(weights)
        return {name: array for name, array in weights.items() if name.startswith("language_model.")}

    @property
    def layers(self) -> Sequence[Any]:
        text = self.language_model
        return cast("Sequence[Any]", text.layers if hasattr(text, "layers") else text.model.layers)

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import ArraysCache, make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.language_model)
        for layer, each in zip(self.layers, caches, strict=False):
            if parts := _overlapping(layer):
                each.caches = (*each.caches, *(ArraysCache(2) for _ in parts))
        return caches


def _positions(tokens: mx.array, caches: Any) -> mx.array:
    parts = [part for each in caches or () for part in getattr(each, "caches", (each,))]
    first = next((part.offset for part in parts if hasattr(part, "offset")), 0)
    return mx.array(first).reshape(-1, 1) + mx.broadcast_to(mx.arange(tokens.shape[1]), tokens.shape)


# --- groups of tokens that overlap (DeepSeek V4) ---------------------------------------------------------
# A group's keys are made of its tokens and of the group before. Mlx-vlm forgets the latter at the begin of
# each chunk and step, so that answers depend on these. One more cache for each such part of a layer keeps it.


def _overlapping(layer: Any) -> list[Any]:
    return [part for part in layer.modules() if getattr(part, "overlap", False)]


def _keep_overlaps(layer: Any) -> None:
    parts = _overlapping(layer)
    if not parts:
        return
    attend = type(layer.attn).__call__

    def attending(attention: Any, *args: Any, cache: Any = None, **named: Any) -> mx.array:
        for at, part in enumerate(parts, -len(parts)):
            part.before = None if cache is None else cache[at]
        return cast("mx.array", attend(attention, *args, cache=cache, **named))

    change(layer.attn, attending)
    for part in parts:
        change(part, _compressing(type(part).__call__))


def _compressing(whole: Any) -> Any:
    def compress(part: Any, x: mx.array, pool: Any, offset: Any) -> mx.array:
        if pool is None:
            return cast("mx.array", whole(part, x, pool, offset))
        size, before = part.compress_ratio, part.before
        new = [part.wkv(x), part.wgate(x)]
        if before[0] is None:
            shape = (x.shape[0], size, new[0].shape[-1])
            before[0], before[1] = mx.zeros(shape, x.dtype), mx.full(shape, -mx.inf, x.dtype)
        *closed, begin = pool.accumulate_windows(*new, offset)
        if not closed[0].shape[1]:
            return cast("mx.array", pool.update_and_fetch(mx.zeros((x.shape[0], 0, part.head_dim), x.dtype)))
        both = [mx.concatenate([before[at], each], axis=1) for at, each in enumerate(closed)]
        groups = [mx.unflatten(each, 1, (-1, size)) for each in both]
        join = vars(sys.modules[type(part).__module__])["_overlap_compress_kv"]
        keys = part.norm(join(*groups, part.ape, part.head_dim)[:, 1:])
        if (done := getattr(pool, "_processed", None)) is not None:  # rows of a batch, one token each
            counts = zip(done, pool.remainder, pool._pool_lengths, strict=True)
            row = mx.array([(at - rest) // size > had for at, rest, had in counts])[:, None, None]
            closed = [mx.where(row, each, before[at]) for at, each in enumerate(closed)]
        before[0], before[1] = (each[:, -size:] for each in closed)
        return cast("mx.array", pool.update_and_fetch(part.rope(keys[:, None], offset=begin).squeeze(1)))

    return compress


# --- classes --------------------------------------------------------------------------------------------


@cache
def _vlm_classes(name: str) -> tuple[Any, Any]:
    with _light_imports():
        package: Any = import_module(f"{MLX_VLM}.models.{name}")
        arguments_class, model_class = package.ModelConfig, package.Model
        own = {part: getattr(package, f"{part.title()}Config", None) for part in _PARTS}

    class ModelArgs:
        @staticmethod
        def from_dict(config: Config) -> Any:
            told = deepcopy(dict(config))
            told.setdefault("text_config", told.pop("llm_config", {}))
            for each in ("vision_config", "audio_config"):
                told.setdefault(each, {})
            arguments = arguments_class.from_dict(told)
            for part, kind in own.items():
                field = f"{part}_config"
                if kind is not None and hasattr(arguments, field) and told.get(field) is not None:
                    setattr(arguments, field, kind.from_dict(told[field]))
            return arguments

    named = {"package": package, "__module__": package.__name__}
    return type(model_class.__name__, (LanguageModel,), named), ModelArgs


# --- imports --------------------------------------------------------------------------------------------


@contextmanager
def _light_imports() -> Iterator[None]:
    if not any(isinstance(finder, _Packages) for finder in sys.meta_path):
        from mlx_lm.models import cache as plain_caches

        sys.meta_path.insert(0, _Packages())
        caches: Any = import_module(f"{MLX_VLM}.models.cache")
        for name in _CACHES:
            setattr(caches, name, getattr(plain_caches, name))
    before, stand_ins = set(sys.modules), _StandIns()
    sys.meta_path.insert(0, stand_ins)
    try:
        yield
    finally:
        sys.meta_path.remove(stand_ins)
        new = [sys.modules[name] for name in set(sys.modules) - before]
        for module in new:
            if _is_unused(module.__name__):
                del sys.modules[module.__name__]
            elif _evaluates(module):
                vars(module)["mx"] = _unevaluating()


def _evaluates(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None) if module.__name__.startswith(MLX_VLM) else None
    return path is not None and f"mx.{_EVALUATES}(" in Path(path).read_text()


@cache
def _unevaluating() -> ModuleType:
    quiet = ModuleType(mx.__name__)
    vars(quiet).update(vars(mx), **{_EVALUATES: lambda *_: None})
    return quiet


class _Packages(MetaPathFinder, Loader):
    """Import of mlx-vlm's packages without their `__init__`."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        top, *inside = name.split(".")
        found = PathFinder.find_spec(top) if top == MLX_VLM else None
        if found is None or not found.submodule_search_locations:
            return None
        folder = Path(found.submodule_search_locations[0], *inside)
        if not (folder / "__init__.py").is_file():
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        text = (Path(next(iter(module.__path__))) / "__init__.py").read_text()
        places = {
            alias.asname or alias.name: (f"{'.' * node.level}{node.module or ''}", alias.name)
            for node in ast.parse(text).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

        def offered(name: str) -> Any:
            if name not in places:
                raise AttributeError(f"{module.__name__} has no {name}")
            where, own = places[name]
            return getattr(import_module(where, module.__name__), own)

        module.__getattr__ = offered  # type: ignore[method-assign]


def _is_unused(name: str) -> bool:
    """Return True for modules that no language model calls. Mlx-vlm's own `processing` prepare images."""
    top, _, inside = name.partition(".")
    return top in _UNUSED or (top == MLX_VLM and inside.rpartition(".")[2].startswith("processing"))


class _StandIns(MetaPathFinder, Loader):
    """Empty modules in place of unused ones."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if _is_unused(name) else None

    def exec_module(self, module: ModuleType) -> None:
        def absent(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Absent,), {"__module__": module.__name__})

        module.__getattr__ = absent  # type: ignore[method-assign]
