"""Files that make a model one for embeddings or reranking, as sentence-transformers writes them.

Without such files, the few families are known by name whose conversions leave them out. Reading blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .model_config import Config, number, text_config
from .model_files import MAX_CONFIG_BYTES, table, text_of

EMBED, RERANK = "embedding", "rerank"  #: kinds
SETTINGS, LIMITS = "config_sentence_transformers.json", "sentence_bert_config.json"
#: Files to read, on the Hub too.
VECTOR_FILES = ("modules.json", SETTINGS, LIMITS, "?_*/config.json")
#: Reads texts in both directions, which no decoder does.
ENCODERS = frozenset(
    ("albert", "bert", "camembert", "deberta", "distilbert", "electra", "eurobert", "modernbert", "mpnet",
     "new", "nomic_bert", "roberta", "xlm-roberta")
)  # fmt: skip
SUITABLE = "such as Qwen/Qwen3-Embedding-0.6B"  #: ends words that refuse another model
_QUERY = "Given a web search query, retrieve relevant passages that answer the query"
_KNOWN = re.compile(r"qwen3[-_](embedding|reranker)", re.IGNORECASE)
_MODE = "pooling_mode_"
_KINDS = {"lasttoken": "last", "mean": "mean", "cls": "cls"}


@dataclass(frozen=True, slots=True)
class VectorModel:
    """Recipe for a model's vectors or scores.

    `pooling` is a kind of `wire.messages.Pooling`, `width` the numbers of a vector. `context` is the
    most tokens of a text, 0 for the model's own. `end` is appended to each text, -1 for none. `scored`: the
    tokens for no and yes; () for the tokenizer's. `flaw` says why it cannot be served; "" if it can.
    """

    kind: str
    pooling: str = "last"
    width: int = 0
    normalized: bool = True
    context: int = 0
    end: int = -1
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    scored: tuple[int, ...] = ()
    flaw: str = ""


def vector_model(folder: Path, config: Config) -> VectorModel | None:
    """Return how a model makes vectors; None for a model that writes text. Raises OSError and ValueError."""
    known = next(filter(None, map(_KNOWN.search, folder.parts[-3:])), None)
    found = _of_modules(folder)
    if found is None and (folder / "1_Pooling" / "config.json").is_file():
        found = VectorModel(EMBED, **_pooling(_table(folder / "1_Pooling")))
    if found is None and known is not None:
        kind = EMBED if known[1].lower() == "embedding" else RERANK
        prompts = {"query": f"Instruct: {_QUERY}\nQuery:", "document": ""} if kind == EMBED else {}
        found = VectorModel(kind, prompts=prompts)
    if found is None:
        return None
    if known is not None and found.kind == EMBED and isinstance(end := config.get("eos_token_id"), int):
        found = replace(found, end=end)
    if known is None and found.kind == RERANK:
        found = replace(found, flaw="it ranks by a prompt that is not known; Qwen3-Reranker's is")
    if text_config(config).get("use_bidirectional_attention"):
        found = replace(found, flaw="its layers read texts in both directions, and mlx-lm's only forwards")
    told, limits = _optional(folder / SETTINGS), _optional(folder / LIMITS)
    return replace(
        found,
        width=number(text_config(config), "hidden_size"),
        context=number(limits, "max_seq_length"),
        prompts={str(name): str(text) for name, text in (told.get("prompts") or found.prompts).items()},
        default_prompt=str(told.get("default_prompt_name") or ""),
    )


def headless(vectors: VectorModel | None) -> Config:
    """Return changes of the configuration: a model for embeddings may be stored without its output head."""
    return {"tie_word_embeddings": True} if vectors is not None and vectors.kind == EMBED else {}


def _table(folder: Path) -> dict[str, Any]:
    return table(folder / "config.json", MAX_CONFIG_BYTES)


def _optional(path: Path) -> dict[str, Any]:
    return table(path, MAX_CONFIG_BYTES) if path.is_file() else {}


def _of_modules(folder: Path) -> VectorModel | None:
    path = folder / "modules.json"
    if not path.is_file():
        return None
    told = json.loads(text_of(path, MAX_CONFIG_BYTES))
    try:
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in told]
    except (LookupError, TypeError) as error:
        raise ValueError(f"modules.json is no list of modules: {error!r}") from None
    found = VectorModel(EMBED, normalized=False)
    for kind, name in modules:
        if "/" in name or name.startswith("."):
            raise ValueError(f"modules.json: {name!r:.80} is no folder inside the model's")
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                found = replace(found, **_pooling(_table(folder / name)))
            case "Normalize":
                found = replace(found, normalized=True)
            case "LogitScore":
                layer = _table(folder / name)
                scored = number(layer, "false_token_id"), number(layer, "true_token_id")
                found = replace(found, kind=RERANK, scored=scored)
            case _:
                found = replace(found, flaw=f"modules.json names a {kind:.40}, which mlxtp does not compute")
    return found if len(modules) > 1 else replace(found, flaw="modules.json names no pooling")


def _pooling(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `VectorModel` that a pooling's configuration decides."""
    named = told.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    on = [name.removeprefix(_MODE) for name, chosen in told.items() if _MODE in name and chosen is True]
    modes = modes or [name.removesuffix("_tokens").removesuffix("_token") for name in on]
    if len(modes) != 1 or modes[0] not in _KINDS:
        words = " and ".join(map(str, modes)) or "nothing"
        return {"flaw": f"it pools by {words:.80}; mlxtp knows {', '.join(_KINDS)}"}
    if told.get("include_prompt") is False:
        return {"flaw": "its pooling leaves the prompt's tokens out"}
    return {"pooling": _KINDS[modes[0]]}
