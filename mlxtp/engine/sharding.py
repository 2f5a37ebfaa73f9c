"""Division of a model among ranks: checks of sizes, and the rows of the embedding and the output head."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from ..errors import Code, ModelError
from ..model_config import Config, family
from ..model_sources import MLX_VLM, lack, source_of
from .families import DIVIDE, dimensions_of, divide_layers
from .group import Group
from .sampler import joined_scores, scores_of_share

# --- checks of a configuration ---------------------------------------------------------------------------


def check_divisible(config: Config, world_size: int) -> None:
    # Without this check, mlx-lm's layers would round head counts down, and fail later.
    if world_size == 1:
        return
    dimensions = dimensions_of(config)
    if problems := dimensions.obstacles(world_size):
        fitting = [n for n in range(1, 9) if not dimensions.obstacles(n)]
        raise ModelError(
            f"this model does not divide among {world_size} ranks: {'; '.join(problems)}. "
            f"It does among {', '.join(map(str, fitting))}.",
            Code.MODEL_NOT_DIVISIBLE,
        )


def family_of(config: Config) -> str:
    """Return the name of mlx-lm's module for this model. Raises ModelError if there is none."""
    name = config.get("model_type")
    if not isinstance(name, str):
        detail = "config.json names no model_type, so the model's family is unknown"
        raise ModelError(detail, Code.MODEL_INVALID)
    found = family(config)
    if why := lack(name, found):
        raise ModelError(why, Code.MODEL_UNSUPPORTED)
    return found


def check_shardable(config: Config, world_size: int) -> None:
    found = family_of(config)
    if world_size > 1 and not is_divided(found):
        detail = f"no rank can hold a part of each layer of the family {config['model_type']!r}"
        raise ModelError(detail, Code.MODEL_UNSUPPORTED)


def is_divided(family: str) -> bool:
    if family in DIVIDE or source_of(family) == MLX_VLM:  # its layers decide
        return True
    try:
        module: Any = importlib.import_module(f"mlx_lm.models.{family}")
    except (ImportError, SystemExit):  # some modules end the process if a package is missing
        return False
    return hasattr(module.Model, "shard")


_MLP = ("gate_proj", "up_proj", "down_proj")
#: Modules with a collective in a compiled function. A test compares this set with mlx-lm's sources.
COMPILED_COLLECTIVES = frozenset({"mlx_lm.models.minimax"})


def compiles_collectives(model: Any) -> bool:
    return any(type(module).__module__ in COMPILED_COLLECTIVES for module in model.modules())


@contextlib.contextmanager
def divided_vocabulary(owner: Any, size: int) -> Iterator[None]:
    """Set another vocabulary size for a head's `owner` while layers are cut: it may refuse its own size."""
    arguments: Any = getattr(owner, "args", None)
    candidates: tuple[Any, ...] = (arguments, getattr(arguments, "text", None))
    holders = [each for each in candidates if hasattr(each, "vocab_size")]
    sizes = [holder.vocab_size for holder in holders]
    for holder in holders:
        holder.vocab_size = size
    try:
        yield
    finally:
        for holder, true_size in zip(holders, sizes, strict=True):
            holder.vocab_size = true_size


# --- token embedding and output head: each rank holds an equal run of rows -------------------------------
# A forward embeds tokens with one sum and returns logits of own rows; one gather finds the winners.

#: Names of the module that embeds tokens, in the families of mlx-lm.
EMBEDDINGS = (
    "embed_tokens",
    "word_embeddings",
    "tok_embeddings",
    "token_embeddings",
    "embeddings",
    "embedding",
    "embed",
    "embed_in",
    "wte",
)
HEADS = ("lm_head", "output")

#: (tensor, its name, first row, rows) -> the rows, with zeros beyond the end.
Cut = Callable[[mx.array, str, int, int], mx.array]


def at_ends(x: mx.array, ends: mx.array) -> mx.array:
    """Return one position of each row: [B, L, n] and int32 [B] -> [B, 1, n]."""
    return mx.take_along_axis(x, ends[:, None, None], axis=1)


def cut_rows(array: mx.array, _name: str, first: int, rows: int) -> mx.array:
    """Return `rows` rows from `first` on, lazily, with zeros beyond the end."""
    if (first, rows) == (0, array.shape[0]):
        return array
    part = array[min(first, array.shape[0]) : first + rows]
    if part.shape[0] < rows:
        padding = mx.zeros((rows - part.shape[0], *array.shape[1:]), dtype=array.dtype)
        part = mx.concatenate([part, padding])
    return mx.contiguous(part)


class Tap:
    """The output head's last input, hidden states [.., L, hidden], until `Vocabulary.hidden` takes it."""

    hidden: mx.array | None = None


class ShardedHead(nn.Module):  # type: ignore[misc]  # mlx is untyped here
    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows
        self.ends: mx.array | None = None
        self.tap: Tap | None = None

    @property
    def weight(self) -> mx.array:  # models read its type
        return cast("mx.array", self.rows.weight)

    def as_linear(self, x: mx.array) -> mx.array:
        """Compute logits, [.., L, hidden] -> [.., L, share], or [.., 1, share] while `ends` is set."""
        if self.tap is not None:
            self.tap.hidden = x
        product = getattr(self.rows, "as_linear", self.rows)
        return cast("mx.array", product(x if self.ends is None else at_ends(x, self.ends)))

    def __call__(self, x: mx.array) -> mx.array:
        return self.as_linear(x)


class ShardedEmbedding(ShardedHead):
    def __init__(self, rows: Any, first: int, share: int, group: Group) -> None:
        super().__init__(rows)
        self._first = first
        self._share = share
        self._group = group
        self.given: mx.array | None = None

    def __call__(self, tokens: mx.array) -> mx.array:
        """Embed tokens, [.., L] int -> [.., L, hidden]; zeros for tokens that are not in the vocabulary."""
        if self.given is not None:
            return self.given.reshape(self.given.shape)  # another object: some models scale it in place
        if self._group.size == 1:
            return self.local(tokens)
        index = tokens - self._first
        mine = (index >= 0) & (index < self._share)
        # For other ranks' rows, add negative zero: it changes no number, not even a sign.
        return self._group.total(mx.where(mine[..., None], self.local(mx.where(mine, index, 0)), -0.0))

    def local(self, rows: mx.array) -> mx.array:
        """Return rows by their index in this rank's share, [..] int -> [.., hidden], without a collective."""
        return cast("mx.array", self.rows(rows))


class Vocabulary:
    """Division of a loaded model's vocabulary among ranks.

    Without a known embedding, forwards ignore `given`, and `winners` returns empty embeddings.
    """

    chooses = True  # this rank has logits

    def __init__(
        self,
        size: int,
        group: Group,
        embedding: ShardedEmbedding | None = None,
        head: ShardedHead | None = None,
    ) -> None:
        self.size = size
        self.group = group
        self.share = -(-size // group.size)  # rows on each rank; rows beyond the size are padding
        self.first = group.rank * self.share  # the token of this rank's first row
        self.embedding = embedding
        self.head = head
        self._real = size
        self._padded = self.first + self.share > size
        self._tap = Tap()

    def taps(self) -> bool:
        if self.head is not None:
            self.head.tap = self._tap
        return self.chooses and self.head is not None and self.embedding is not None

    def limit(self, tokens: int) -> None:
        """Treat ids from `tokens` on as padding, because the tokenizer does not have them."""
        if 2 * tokens > self.size:  # with fewer, the count is probably another tokenizer's
            self._real = min(tokens, self.size)
            self._padded = self.first + self.share > self._real

    def forward(
        self,
        model: Any,
        tokens: mx.array,
        cache: list[Any],
        *,
        given: mx.array | None = None,
        ends: mx.array | None = None,
    ) -> mx.array:
        """Run one forward: tokens [B, L] int32 -> this rank's logits [B, L, share], -inf for padding.

        given  embeddings [B, L, hidden] of the tokens; `tokens` must be right even so: some models read them
        ends   int32 [B]: return logits of only this position of each row, [B, 1, share]
        """
        if self.embedding is not None:
            self.embedding.given = given
        if self.head is not None:
            self.head.ends = ends
        try:
            logits: mx.array = model(tokens, cache=cache)
        finally:
            if self.embedding is not None:
                self.embedding.given = None
            if self.head is not None:
                self.head.ends = None
        if ends is not None and logits.shape[1] > 1:
            logits = at_ends(logits, ends)
        return self._without_padding(logits)

    def hidden(self) -> mx.array:
        """Take the last forward's hidden states [B, L, hidden] after the final norm; call `taps` before."""
        hidden, self._tap.hidden = self._tap.hidden, None
        assert hidden is not None
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        assert self.head is not None
        return self._without_padding(self.head.as_linear(hidden))

    def _without_padding(self, logits: mx.array) -> mx.array:
        if not self._padded:
            return logits
        # Not in the head, because some models transform logits: -inf would become a number.
        rows = mx.arange(logits.shape[-1]) < self._real - self.first
        return mx.where(rows, logits, mx.array(-mx.inf, dtype=logits.dtype))

    def gather(self, local: mx.array) -> mx.array:
        """Combine each rank's [.., share] into [.., size] on all, in vocabulary order, by one collective."""
        return local if self.group.size == 1 else self._joined(self.group.gather(local))

    def winners(self, local: mx.array) -> tuple[mx.array, mx.array]:
        """Return the greedy choice of each row: (tokens int32 [..], their embeddings [.., hidden]).

        Takes each rank's [.., share] and returns the same bits on all ranks, with one collective: the argmax
        of the gathered logits, and the smallest token of equals. NaN counts as -inf.
        """
        best, index = _best(local)
        if self.embedding is None:
            return index, mx.zeros((*index.shape, 0), dtype=local.dtype)
        embeddings = self.embedding.local(index)
        if self.group.size == 1:
            return index, embeddings
        best, ids, rows = self._gather_bits(best, index + self.first, embeddings)
        winner = mx.argmax(best, axis=0, keepdims=True)  # the first of equal ranks has the smallest tokens
        chosen = mx.take_along_axis(ids, winner, axis=0)[0]
        return chosen, mx.take_along_axis(rows, winner[..., None], axis=0)[0]

    def winners_and_logits(self, local: mx.array, rows: list[int], width: int) -> tuple[mx.array, mx.array]:
        """Return the tokens of `winners`, int32 [B, L], and all logits of some rows' first `width` positions,
        [rows, width, size], of each rank's [B, L, share], with one collective.
        """
        (best, index), logits = _best(local), local[mx.array(rows), :width]
        if self.group.size == 1:
            return index, logits
        best, ids, parts = self._gather_bits(best, index + self.first, logits)
        winner = mx.argmax(best, axis=0, keepdims=True)
        return mx.take_along_axis(ids, winner, axis=0)[0], self._joined(parts)

    def scores(self, local: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
        """Return log-probabilities of `tokens`, int32 [..], under all ranks' [.., share], float32 [..], and
        the best `top` tokens of each place, [.., top], with theirs, with one collective.
        """
        parts = scores_of_share(local, tokens, self.first, top)
        if self.group.size == 1:
            return joined_scores([each[None] for each in parts], top)
        return joined_scores(self._gather_bits(*parts), top)

    def _joined(self, parts: mx.array) -> mx.array:
        """Return logits [.., size] of the ranks' shares, [ranks, .., share]."""
        return mx.moveaxis(parts, 0, -2).reshape(*parts.shape[1:-1], -1)[..., : self.size]

    def _gather_bits(self, *arrays: mx.array) -> list[mx.array]:
        """Gather arrays of several types with one collective, each [..] as [ranks, ..]."""
        # Join their bits, because conversion between their types would change numbers.
        bits = mx.uint16 if any(each.dtype.size == 2 for each in arrays) else mx.uint32
        words = [each.reshape(-1).view(bits) for each in arrays]
        ends = list(accumulate(each.size for each in words))[:-1]
        found = mx.split(self.group.gather(mx.concatenate(words)), ends, axis=1)
        return [part.view(a.dtype).reshape(-1, *a.shape) for part, a in zip(found, arrays, strict=True)]


def _best(local: mx.array) -> tuple[mx.array, mx.array]:
    """Return the largest logit of each row, float32 [..], and its place, int32 [..]."""
    values = mx.where(mx.isnan(local), mx.array(-mx.inf, dtype=local.dtype), local)
    index = mx.argmax(values, axis=-1, keepdims=True)
    best = mx.take_along_axis(values, index, axis=-1).astype(mx.float32)
    return best[..., 0], index[..., 0].astype(mx.int32)


def shard(model: Any, group: Group, *, cut: Cut = cut_rows, size: int = 0) -> Vocabulary:
    """Divide embedding and head by rows, and layers by their family's rules. Only `cut` may evaluate.

    Raises ModelError (MODEL_UNSUPPORTED) if a group of several ranks finds no known embedding or head.
    """
    modules = dict(model.named_modules())
    embeddings = [
        p for p, m in modules.items() if _is(p, m, EMBEDDINGS, (nn.Embedding, nn.QuantizedEmbedding))
    ]
    heads = [p for p, m in modules.items() if _is(p, m, HEADS, (nn.Linear, nn.QuantizedLinear))]
    vocabularies = {modules[path].weight.shape[0] for path in embeddings + heads}
    if len(embeddings) != 1 or len(heads) > 1 or len(vocabularies) != 1:
        if group.size > 1:
            found = f"found {embeddings} and {heads} instead of one token embedding and one head"
            raise ModelError(f"{model.model_type}: {found}", Code.MODEL_UNSUPPORTED)
        return Vocabulary(size, group)
    size = vocabularies.pop()
    share = -(-size // group.size)
    first = group.rank * share
    for path in embeddings + heads:
        module = modules[path]
        for name, array in module.parameters().items():
            if array.ndim and array.shape[0] == size:
                module[name] = cut(array, f"{path}.{name}", first, share)
    embedding = ShardedEmbedding(modules[embeddings[0]], first, share, group)
    _put(model, embeddings[0], embedding)
    head = ShardedHead(modules[heads[0]]) if heads else None
    if group.size > 1:
        # Some families cut and gather their head themselves; give them a stand-in.
        owner = modules[heads[0].rpartition(".")[0]] if heads else model
        if heads:
            _put(model, heads[0], nn.Linear(1, group.size, bias=False))
        with divided_vocabulary(owner, share * group.size), _whole_mlps(model, group.size):
            divide_layers(model, group)
        if heads and getattr(owner, "sharding_group", None) is not None:
            owner.sharding_group = None
    if head is not None:
        _put(model, heads[0], head)
    return Vocabulary(size, group, embedding, head or embedding)


@contextlib.contextmanager
def _whole_mlps(model: Any, ranks: int) -> Iterator[None]:
    """Keep MLPs whole if `ranks` ranks cannot share them: cut stand-ins instead. Whole MLPs need no sum."""
    kept = []
    for mlp in dense_mlps(model):
        gate, up, down = (getattr(mlp, name) for name in _MLP)
        columns = down.scales if isinstance(down, nn.QuantizedLinear) else down.weight
        if any(n % ranks for n in (gate.weight.shape[0], up.weight.shape[0], columns.shape[-1])):
            kept.append((mlp, dict(zip(_MLP, (gate, up, down), strict=True))))
            mlp.update_modules({name: nn.Linear(ranks, ranks, bias=False) for name in _MLP})
    try:
        yield
    finally:
        for mlp, modules in kept:
            mlp.update_modules(modules)


def dense_mlps(model: Any) -> list[Any]:
    found = [getattr(layer, "mlp", None) for layer in model.layers]
    return [
        mlp
        for mlp in found
        if all(isinstance(getattr(mlp, name, None), nn.Linear | nn.QuantizedLinear) for name in _MLP)
    ]


def _is(path: str, module: Any, names: tuple[str, ...], kinds: tuple[type, ...]) -> bool:
    return path.rpartition(".")[2] in names and isinstance(module, kinds)


def _put(model: Any, path: str, module: Any) -> None:
    model.update_modules(tree_unflatten([(path, module)]))
