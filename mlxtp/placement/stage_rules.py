"""Layers between which a model cannot be cut into stages, by its configuration. Pure.

`engine/pipeline.py` finds the same when it cuts a loaded model, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model_config import Config, number
from .model_weights import gemma4_shared, is_gemma4, layers, mixing, sliding_layers

#: Families whose linear attention is given positions, which only the caches of the other layers count.
_COUNTED = frozenset(("bailing_hybrid", "bailing_moe_linear"))


@dataclass(frozen=True, slots=True)
class StageRules:
    """Rules for stages.

    joined   layers that must be on the rank of the layer before, because they read results of earlier ones
    keepers  layers whose caches count positions, of which each stage needs one; () where any layer will do
    """

    joined: frozenset[int] = frozenset()
    keepers: tuple[int, ...] = ()

    def flaw(self, begin: int, end: int) -> str:
        """Return why no stage can have the layers from `begin` up to `end`; empty if one can."""
        if begin in self.joined:
            return f"layer {begin} reads results of earlier layers, so both must be on one Mac"
        if self.keepers and not any(begin <= layer < end for layer in self.keepers):
            named = f"layers {begin} to {end - 1} have" if end - begin > 1 else f"layer {begin} has"
            return f"{named} no cache that counts positions, of which each Mac needs one"
        return ""

    def border(self, at: int, step: int) -> int:
        """Return `at`, or the next layer by `step` (1 or -1) before which a stage may begin."""
        while at in self.joined:
            at += step
        return at

    def end(self, begin: int, most: int) -> int:
        """Return where a stage from `begin` on ends, at `most` or before; `begin` where none can be."""
        end = self.border(most, -1)
        return begin if end <= begin or self.flaw(begin, end) else end

    def latest(self, total: int, stages: int) -> list[int]:
        """Return where each of so many stages of `total` layers must end; [] where they cannot be so many."""
        ends = [total]
        while len(ends) < stages:
            keepers = (layer for layer in reversed(self.keepers) if layer < ends[0])
            ends.insert(0, self.border(next(keepers, -1) if self.keepers else ends[0] - 1, -1))
        return [] if ends[0] <= 0 or self.flaw(0, ends[0]) else ends


def stage_rules(config: Config) -> StageRules:
    """Return the rules for a model. `config` holds the fields of its language model."""
    total, family = layers(config), config.get("model_type")
    if family == "hunyuan" and config.get("use_cla"):
        group = number(config, "cla_share_factor") or 2
        return StageRules(frozenset(layer for layer in range(total) if layer % group))
    if is_gemma4(config) and number(config, "hidden_size_per_layer_input"):
        return StageRules(frozenset(range(1, total)))  # each layer reads an input of its own
    if is_gemma4(config) and (shared := gemma4_shared(config)):
        return StageRules(
            frozenset(range(_first_read(sliding_layers(config), total - shared, total) + 1, total))
        )
    if mixers := mixing(config, "M*"):
        return StageRules(keepers=mixers)
    if family in _COUNTED:
        group = number(config, "layer_group_size") or 1
        full = (
            layer for layer in range(total) if (layer + 1) % group == 0 or layer >= total // group * group
        )
        return StageRules(keepers=tuple(full))
    return StageRules()


def _first_read(sliding: Sequence[int], own: int, total: int) -> int:
    """Return the first layer whose keys and values are read by others: by those from `own` on.

    Each reads those of the last layer of its kind that has its own.
    """
    kinds = {layer in sliding for layer in range(own, total)}
    return min(max((at for at in range(own) if (at in sliding) == kind), default=0) for kind in kinds)
