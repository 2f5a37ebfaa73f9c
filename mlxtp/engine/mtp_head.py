"""MTP head of a model: an extra layer after the model's own that predicts the token after the next one.

It reads a position's hidden state and the embedding of the next token; for more drafts, its own output and
proposal. After a truncation, the last entry of its KV cache may be another token's, which changes no text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..errors import Code, ModelError
from ..model_config import Config, family, mtp_place, name_in_head, quantizations, table
from ..model_files import MTP_FILE, weight_files
from .batch import LayerView
from .loader import MLX_LM_RAISES, as_mlx_lm_reads, brief, read_config, read_header, read_numbers
from .mlx_compat import code_of, import_mlx_lm
from .sharding import Vocabulary, at_ends

PROPOSES = 3  #: most tokens that a head proposes in a step


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a family's head parts in model files, after the prefix in `MTP_PLACES`."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str = ""  # prefix of the layer's parts
    hidden_first: bool = False  # order of the projection's input; False: the embedding is first
    less_one: bool = False  # original files store norm weights minus 1; conversions do not


_NEXT_N = Names("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = Names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0.", less_one=True)
#: Heads by mlx-lm's name of the family. Their projection's input is ordered as in vLLM (`deepseek_mtp.py`,
#: `glm4_moe_mtp.py`, `mimo_mtp.py`, `qwen3_next_mtp.py`) and transformers (`modular_glm4_moe.py`). As there,
#: a head reads hidden states after the model's final norm, and its own output after its norm. This raised
#: acceptance for DeepSeek R1 (ROCm/ATOM #1764), GLM-5 (vLLM #46075, #47448) and Qwen3.5 (llama.cpp #24025,
#: Rapid-MLX #3371).
FAMILIES: Mapping[str, Names] = {
    "deepseek_v3": _NEXT_N,
    "glm4_moe": _NEXT_N,
    "glm4_moe_lite": _NEXT_N,
    "llama": _NEXT_N,
    "mimo": Names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _QWEN),
}
_ONE_LAYER: Config = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "layer_types": ["full_attention"],
    "full_attention_interval": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_ONLY_LAYER = "model.layers.0."
_NOT_USED = ("embed_tokens.", "shared_head.head.")  # copies of the model's own


class MtpHead(nn.Module):  # type: ignore[misc]  # mlx is untyped here
    def __init__(self, layer: Any, size: int, eps: float, *, hidden_first: bool) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(size, eps)
        self._hidden_first = hidden_first

    def __call__(self, hidden: mx.array, following: mx.array, cache: Any) -> mx.array:
        """Turn hidden states and the next tokens' embeddings into the head's output, [B, L, hidden]."""
        from mlx_lm.models.base import create_attention_mask

        kind = self.hidden_norm.weight.dtype
        pair = [self.embedding_norm(following.astype(kind)), self.hidden_norm(hidden.astype(kind))]
        x = self.projection(mx.concatenate(pair[::-1] if self._hidden_first else pair, axis=-1))
        mask = create_attention_mask(x, cache, return_array=True)
        found: mx.array = self.norm(self.layer(x, mask, cache))
        return found

    def unrun(self, tokens: int, cache: Any) -> None:
        zeros = mx.zeros((1, tokens, self.norm.weight.shape[0]))
        self(zeros, zeros, cache)

    def propose(
        self, vocabulary: Vocabulary, found: mx.array, ends: mx.array, view: LayerView, count: int
    ) -> mx.array:
        """Return the next `count` tokens of each row, int32 [rows, count], with one collective for each.

        `found` [rows, 1, hidden]: its output at each row's last token; `ends` int32 [rows]: next position.
        """
        tokens, embeddings = vocabulary.winners(vocabulary.logits(found))
        drafts = [tokens]
        for number in range(count - 1):
            view = view.at(ends + number)
            found = self(found, embeddings, view)
            tokens, embeddings = vocabulary.winners(vocabulary.logits(found))
            drafts.append(tokens)
        return mx.concatenate(drafts, axis=1)


@dataclass(frozen=True, slots=True)
class ChosenStep:
    hidden: mx.array  # hidden states [rows, width, hidden]
    following: mx.array  # embeddings of the chosen tokens, of the same shape
    chosen: mx.array  # the chosen tokens, int32 [rows, width]
    fed: mx.array  # the model's input tokens, int32 [rows, width]
    counts: mx.array  # tokens of each row without padding, int32 [rows]


def follow(
    head: MtpHead, vocabulary: Vocabulary, step: ChosenStep, view: LayerView, drafts: int
) -> list[mx.array]:
    """Add a step to the head's cache. Returns its proposals, int32 [rows, drafts], or [] without drafts."""
    found = head(step.hidden, step.following, view)
    if not drafts:
        return []
    last = accepted(step.fed, step.chosen, step.counts)
    return [head.propose(vocabulary, at_ends(found, last), view.offset + last + 1, view, drafts)]


def accepted(fed: mx.array, chosen: mx.array, counts: mx.array) -> mx.array:
    """Return how many drafts in `fed`, int32 [rows, width], equal the token that the model chose."""
    if fed.shape[1] == 1:
        return mx.zeros_like(counts)
    right = (fed[:, 1:] == chosen[:, :-1]) & (mx.arange(1, fed.shape[1]) < counts[:, None])
    return mx.cumprod(right.astype(mx.int32), axis=1).sum(axis=1)


def read_head(folder: Path, config: Config, *, numbers: bool = True) -> MtpHead | None:
    """Read the MTP head if it is complete and fits; with `numbers`, its weights. Raises `MLX_LM_RAISES`."""
    try:
        place = mtp_place(config)
        head = _read(folder, config, place) if place and _has_head(folder, place) else None
        if head is not None and numbers:
            weights = dict(tree_flatten(head.parameters()))
            for _ in read_numbers("", weights, weights):
                pass
        return head
    except (*MLX_LM_RAISES, ModelError) as error:
        if code_of(error, Code.MODEL_INVALID) is not Code.MODEL_INVALID:
            raise
        sys.stderr.write(f"{folder.name} is served without its MTP head: {brief(error)}\n")
        return None


def _has_head(folder: Path, place: str) -> bool:
    files = [*weight_files(folder), *folder.glob(MTP_FILE)]
    tensors = [tensor for path in files for tensor in read_header(path)]  # check all, as MLX reads all
    return any(name_in_head(tensor.name, place) for tensor in tensors)


def one_layer(config: Config) -> Config:
    text = table(config, "text_config")
    return {**_ONE_LAYER, "text_config": {**text, **_ONE_LAYER}} if text else _ONE_LAYER


def _read(folder: Path, config: Config, place: str) -> MtpHead:
    from mlx_lm.utils import load_model

    names = FAMILIES[family(config)]

    def classes(config: Config) -> tuple[Any, Any]:
        module: Any = import_module(f"mlx_lm.models.{family(config)}")

        def make(args: Any) -> MtpHead:
            model = module.Model(args)
            sizes = getattr(model, "language_model", model).args
            head = MtpHead(
                model.layers[0], sizes.hidden_size, sizes.rms_norm_eps, hidden_first=names.hidden_first
            )
            head.sanitize = lambda weights: _own_weights(weights, folder, names, place, model)
            return head

        return make, module.ModelArgs

    head: MtpHead
    with as_mlx_lm_reads(folder) as alone:
        head, _ = load_model(
            alone,
            lazy=True,
            strict=True,
            model_config={**one_layer(config), **quantizations(config)},
            get_model_classes=classes,
            trust_remote_code=False,
        )
    del head.sanitize
    return head


def _own_weights(
    weights: Mapping[str, mx.array], folder: Path, names: Names, place: str, model: Any
) -> dict[str, mx.array]:
    if (beside := folder / MTP_FILE).is_file():
        weights = {**weights, **cast("dict[str, mx.array]", mx.load(str(beside)))}
    parts = [(name_in_head(name, place), weight) for name, weight in weights.items()]
    own = {
        _ONLY_LAYER + part.removeprefix(names.layer): weight
        for part, weight in parts
        if part and not part.startswith(_NOT_USED)
    }
    norms = _factors(own, names) if names.less_one else {}
    known = {getattr(names, part): part for part in ("embedding_norm", "hidden_norm", "projection", "norm")}
    found = {}
    sanitized = model.sanitize({name: own[name] for name in own.keys() - norms.keys()})
    for name, weight in {**sanitized, **norms}.items():
        module, _, kind = name.removeprefix("language_model.").removeprefix(_ONLY_LAYER).rpartition(".")
        found[f"{known.get(module, f'layer.{module}')}.{kind}"] = weight
    return found


def _factors(weights: Mapping[str, mx.array], names: Names) -> dict[str, mx.array]:
    """Add 1 to norms that are stored minus 1; the layer's norms tell for small ones (omlx #3750)."""
    norms = {name: weight for name, weight in weights.items() if "norm" in name}
    small = {_ONLY_LAYER + name + ".weight" for name in (names.embedding_norm, names.hidden_norm)}
    less = {name for name in norms.keys() - small if cast("float", norms[name].mean().item()) < 0.5}
    if any(".layers.0.self_attn." in name for name in less):
        less |= small
    return {name: weight + 1 if name in less else weight for name, weight in norms.items()}


def main() -> None:
    """Exit with 0 if ranks would load an MTP head from the given folder, by names and shapes."""
    folder = Path(sys.argv[1])
    mx.set_default_device(mx.cpu)  # the GPU may serve others
    import_mlx_lm()
    sys.exit(read_head(folder, read_config(folder), numbers=False) is None)


if __name__ == "__main__":
    main()
