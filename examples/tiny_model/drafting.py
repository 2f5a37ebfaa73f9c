"""Draft tokens with the head of the tiny model, through mlx-lm's own layers, and count the right ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import TransformerBlock


class DraftHead:
    """The head in ``folder/mtp.safetensors`` and its cache; ``model`` is what mlx-lm loaded from there."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.cache = KVCache()
        place = f"model.layers.{model.args.num_hidden_layers}."
        stored = mx.load(str(folder / "mtp.safetensors"))
        self.weights = {name.removeprefix(place): weight for name, weight in stored.items()}
        own = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
        self.layer = TransformerBlock(model.args)
        self.layer.load_weights([pair for pair in self.weights.items() if not pair[0].startswith(own)])

    def _norm(self, x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, self.weights[f"{name}.weight"], self.model.args.rms_norm_eps)

    def feed(self, hidden: mx.array, following: mx.array) -> mx.array:
        """``(1, length, hidden)`` to the same shape, by the tokens ``(1, length)`` after each position."""
        embedded = self._norm(self.model.model.embed_tokens(following), "enorm")
        pair = mx.concatenate([embedded, self._norm(hidden, "hnorm")], axis=-1)
        x = pair @ self.weights["eh_proj.weight"].T
        return self._norm(self.layer(x, create_attention_mask(x, self.cache), self.cache), "shared_head.norm")

    def best(self, hidden: mx.array) -> mx.array:
        """The most likely tokens after hidden states."""
        return self.model.model.embed_tokens.as_linear(hidden).argmax(-1)

    def drafts(self, hidden: mx.array, following: mx.array, count: int) -> list[int]:
        """Return the drafts after the last of these positions. The cache keeps the positions only."""
        hidden = self.feed(hidden, following)[:, -1:]
        found = [self.best(hidden)]
        for _ in range(count - 1):
            hidden = self.feed(hidden, found[-1])
            found.append(self.best(hidden))
        self.cache.trim(count - 1)
        return [token.item() for token in found]


def right_drafts(
    model: Any, folder: Path, prompt: list[int], answer: list[int], count: int
) -> list[list[bool]]:
    """For each token of a greedy answer: is each of the next ``count`` drafts right, and all before it?

    The model chose that token itself. Where the answer ends sooner, there are fewer drafts.
    """
    head = DraftHead(model, folder)
    tokens = mx.array([prompt + answer])
    hidden = model.model(tokens[:, :-1])
    found, begin = [], 0
    for n in range(len(answer) - 1):
        end = len(prompt) + n
        drafts = head.drafts(hidden[:, begin:end], tokens[:, begin + 1 : end + 1], count)
        wanted = answer[n + 1 : n + 1 + count]
        found.append([drafts[: k + 1] == wanted[: k + 1] for k in range(len(wanted))])
        begin = end
    return found
