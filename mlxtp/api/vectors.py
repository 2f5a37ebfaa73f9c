"""From texts to the tokens of a request for vectors, and its limits. Blocks where it encodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Code, RequestError
from ..text.conversation import Prompt
from ..text.tokenizer import Text
from ..vector_files import EMBED, RERANK, VectorModel
from .backend import Generate, ModelInfo, Pooling
from .catalog import UNNAMED
from .request_body import shown, wrong

MOST_TEXTS = 2048  #: of one request, as in OpenAI's API
MOST_TOKENS = 300_000  #: of all texts of one request, as in OpenAI's API
COUNTED = 1024  #: bytes of a text at least: each is a round trip to the tokenizer's process
MOST_NUMBERS = 1 << 22  #: in all vectors of one request: 80 MB of JSON

TEXT = "text"  #: kind of a model that makes no vectors
_DOES = {TEXT: "writes text", EMBED: "makes embeddings", RERANK: "scores documents"}
_NEEDS = {
    TEXT: "an answer needs a model that writes text",
    EMBED: "embeddings need an embedding model, such as Qwen/Qwen3-Embedding-0.6B",
    RERANK: "a ranking needs a reranking model, such as Qwen/Qwen3-Reranker-0.6B",
}
#: The prompt that Qwen3-Reranker was trained with, as its model card has it.
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_PAIR = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
_VERDICT = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
#: Cohere's and others' values of `input_type`, and sentence-transformers' names of their prompts.
_TYPES = {"search_query": "query", "search_document": "document", "passage": "document"}


@dataclass(frozen=True, slots=True)
class VectorRequest:
    """A request for vectors of `texts`; with a `query`, for scores of texts as documents for it.

    `field` is the client's name of the texts. `prompt` names a prompt of the model; `strict`: refuse an
    unknown one. `cut`: shorten texts that do not fit; `most`: to so many tokens, 0 for the model's limit.
    """

    model: str | None
    texts: tuple[Prompt, ...]
    field: str = "input"
    query: str | None = None
    instruction: str = TASK
    prompt: str | None = None
    strict: bool = False
    dimensions: int = 0
    cut: bool = False
    most: int = 0
    keep_s: float | None = None
    user: str = ""

    @property
    def kind(self) -> str:
        return EMBED if self.query is None else RERANK


@dataclass(frozen=True, slots=True)
class VectorAnswer:
    """Vectors by text, float32, little-endian. `tokens`: in all texts."""

    model: str
    vectors: tuple[bytes, ...]
    tokens: int
    loaded_ns: int = 1


def check_kind(model: ModelInfo, wanted: str) -> None:
    """Raise RequestError unless the model suits a request."""
    kind = TEXT if model.vectors is None else model.vectors.kind
    if kind != wanted:
        words = f"{model.id} {_DOES[kind]}, and {_NEEDS[wanted]}: `mlxtp serve MODEL` loads one beside it"
        raise RequestError(words, Code.NOT_SUPPORTED, param="model")


def named(name: str | None, kind: str, models: Sequence[ModelInfo]) -> str | None:
    """Return a model's name; for `default` or none, the first loaded model's for such requests."""
    suited = [each for each in models if each.vectors is not None and each.vectors.kind == kind]
    return suited[0].id if name in UNNAMED and suited else name


def check_count(texts: Sequence[object], field: str) -> None:
    if not texts:
        raise RequestError(f"{field} is empty", param=field)
    if len(texts) > MOST_TEXTS:
        words = f"{field} has {len(texts)} texts; at most {MOST_TEXTS}: send them in several requests"
        raise RequestError(words, param=field)


def bytes_of(ask: VectorRequest, model: ModelInfo) -> int:
    """Return the size of all vectors of the answer."""
    assert model.vectors is not None
    return 4 * len(ask.texts) * (2 if ask.kind == RERANK else ask.dimensions or model.vectors.width)


def told_of(ask: VectorRequest, model: ModelInfo, text: Text, *, batch: bool = False) -> Generate:
    """Return the request for the ranks. Raises RequestError."""
    vectors = model.vectors
    assert vectors is not None
    if ask.dimensions > vectors.width:
        words = f"dimensions {ask.dimensions} is more than the {vectors.width} of {model.id}"
        raise RequestError(words, param="dimensions")
    width = ask.dimensions or vectors.width
    if bytes_of(ask, model) > 4 * MOST_NUMBERS:
        words = (
            f"{len(ask.texts)} vectors of {width} numbers; one request gets at most {MOST_NUMBERS} numbers"
        )
        raise RequestError(f"{ask.field}: {words}: send fewer texts", param=ask.field)
    writer = _Writer(ask, model, vectors, text)
    rows: list[tuple[int, ...]] = []
    total = 0
    for place in range(len(ask.texts)):
        rows.append(writer.row(place))
        total += len(rows[-1])
        if total > MOST_TOKENS:
            words = f"the first {place + 1} texts of {ask.field} have {total} tokens; a request takes"
            raise RequestError(f"{words} {MOST_TOKENS}: send fewer texts", param=ask.field)
    lengths, normalized = tuple(map(len, rows)), vectors.normalized or bool(ask.dimensions)
    pooling = Pooling(lengths, vectors.pooling, normalized, ask.dimensions)
    if ask.kind == RERANK:
        pooling = Pooling(lengths, "scores", scored=writer.verdicts())
    return Generate(0, tuple([token for row in rows for token in row]), 1, batch=batch, pooling=pooling)


class _Writer:
    """Writer of the tokens of each text."""

    def __init__(self, ask: VectorRequest, model: ModelInfo, vectors: VectorModel, text: Text) -> None:
        self._ask, self._model, self._vectors, self._text = ask, model, vectors, text
        self._limit = min(vectors.context or model.context, model.context)
        self._before: tuple[int, ...] = ()
        self._after: tuple[int, ...] = ()
        if ask.kind == RERANK:
            self._before = text.encoded(_JUDGE, special=False)
            self._after = text.encoded(_VERDICT, special=False)
            around = len(self._before) + len(self._after) + len(self._pair(""))
            if around >= self._limit:
                words = f"query has {around} tokens with the model's prompt"
                words += f", and {model.id} takes {self._limit} with a document"
                raise RequestError(words, Code.CONTEXT_OVERFLOW, param="query")
            self._limit = min(self._limit, around + ask.most) if ask.most else self._limit
        self._prompt = self._named_prompt()

    def verdicts(self) -> tuple[int, ...]:
        if self._vectors.scored:
            return self._vectors.scored
        found = [self._text.encoded(word, special=False) for word in ("no", "yes")]
        if any(len(each) != 1 for each in found):
            words = f"{self._model.id} has no tokens for yes and no, so it scores no documents"
            raise RequestError(words, Code.MODEL_INVALID, status=422)
        return tuple(token for (token,) in found)

    def row(self, place: int) -> tuple[int, ...]:
        """Return a text's tokens. Raises RequestError if it is empty, or has too many."""
        ask, given, field = self._ask, self._ask.texts[place], self._ask.field
        where = field if len(ask.texts) == 1 and field == "input" else f"{field}[{place}]"
        if not given:
            raise RequestError(f"{where} is empty", param=where)
        around = len(self._before) + len(self._after)
        most, enough = self._limit, (self._limit + 1) * self._text.longest_token
        ids = given if isinstance(given, tuple) else self._encoded(given[:enough])
        end = self._vectors.end
        if end >= 0 and ids and ids[-1] not in (end, *self._text.specials):
            ids = (*ids, end)
        if len(ids) + around > most:
            if not ask.cut:
                count = f"{'more than ' * (len(given) > enough)}{len(ids) + around}"
                words = f"{where} has {count} tokens, and {self._model.id} takes at most {most}"
                words += ": send it in parts"
                raise RequestError(words, Code.CONTEXT_OVERFLOW, param=where)
            last = ids[-1:] if ids[-1] in self._text.specials else ()
            ids = (*ids[: max(most - around - len(last), 0)], *last)
        if not ids or (isinstance(given, tuple) and max(ids) >= self._model.vocabulary):
            raise wrong(where, f"token ids below {self._model.vocabulary}", list(ids))
        return (*self._before, *ids, *self._after)

    def _encoded(self, given: str) -> tuple[int, ...]:
        if self._ask.query is not None:
            return self._pair(given)
        return self._text.encoded(self._prompt + given, special=True)

    def _pair(self, document: str) -> tuple[int, ...]:
        pair = _PAIR.format(self._ask.instruction, self._ask.query, document)
        return self._text.encoded(pair, special=False)

    def _named_prompt(self) -> str:
        name, prompts = self._ask.prompt or "", self._vectors.prompts
        if self._ask.strict and name not in prompts:
            words = f"prompt_name {shown(name)}: the model's prompts are {', '.join(prompts) or 'none'}"
            raise RequestError(words, param="prompt_name")
        return prompts.get(_TYPES.get(name, name) or self._vectors.default_prompt, "")
