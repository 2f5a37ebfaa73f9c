"""Train the head that drafts the tiny model's tokens, with the model frozen; add it to the model's folder.

The head is one more layer, in the form of DeepSeek V3's MTP layers. Its input at position ``i`` is the
model's hidden state there (after the last norm) and the embedding of token ``i + 1``. Its output predicts
token ``i + 2``. Embedding and output matrix are the model's own. Fed its own output with the token that it
drafted, it drafts one token further; it is trained for :data:`DRAFTS` of them.

One command, after ``train.py``: ``python examples/tiny_model/train_head.py``. One process with one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from pathlib import Path

import data
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizer import build_tokenizer
from torch import Tensor, nn
from train import (
    DEFAULT_OUT,
    Attention,
    Batch,
    Block,
    Encoder,
    Llama,
    LlamaShape,
    RMSNorm,
    rope_tables,
    rotate,
)

DRAFTS = 3
LENGTHS = (64, 128, 128, 256, 256, 500)  #: Tokens of a chat.
WEIGHTS = {"repeat": 0.35, "needle": 0.2, "mixed": 0.25, "count": 0.2}
Seen = list[tuple[Tensor, Tensor]]  #: Keys and values of each pass so far.


def later(x: Tensor, steps: int) -> Tensor:
    """Move the last axis but one by so many positions; zeros come in."""
    return F.pad(x, (0, 0, steps, 0))[..., : x.shape[-2], :]


class HeadAttention(Attention):
    """Attention whose keys and values come from several passes of the head."""

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Seen) -> Tensor:
        """``(batch, length, hidden)`` to the same shape; appends this pass to ``seen``.

        In pass ``p``, position ``j`` sees the first pass up to ``j - p + 1``, and one key of each later pass:
        that of the draft which was made there on the way to ``j``.
        """
        batch, length, _ = x.shape
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        v = heads(self.v_proj(x))
        k = rotate(heads(self.k_proj(x)), cos, sin).to(v.dtype)
        q = rotate(heads(self.q_proj(x)), cos, sin).to(v.dtype) * self.shape.head_dim**-0.5
        seen.append((k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)))
        (k, v), drafted = seen[0], seen[1:]
        drafted = [
            (later(k, n), later(v, n)) for n, (k, v) in zip(range(len(drafted))[::-1], drafted, strict=True)
        ]
        hidden = torch.full((length, length), -1e4, dtype=q.dtype).triu(1 - len(drafted))
        scores = [q @ k.transpose(2, 3) + hidden, *((q * k).sum(-1, keepdim=True) for k, _ in drafted)]
        shares = torch.cat(scores, dim=-1).softmax(-1, dtype=q.dtype)
        out = shares[..., :length] @ v
        for n, (_, v) in enumerate(drafted):
            out = out + shares[..., length + n, None] * v
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class Head(nn.Module):  # type: ignore[misc]
    """The head; parameters are named as in the export, but for ``shared_head.norm.weight``.

    That norm has one factor for all channels, which the first norm of the next pass cancels. So what is fed
    back may be taken before or after it: programs differ in that.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = Block(shape)
        self.block.self_attn = HeadAttention(shape)
        self.scale = nn.Parameter(torch.ones(1))
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(weight, std=residual * weight.shape[1] ** -0.5)

    def forward(self, hidden: Tensor, following: Tensor) -> list[Tensor]:
        """Outputs of all passes, each ``(batch, length, hidden)`` as both arguments are.

        ``following`` are the embeddings of the tokens after. The output of every pass at position ``j``
        predicts token ``j + 2``. Pass ``p`` starts from the model's hidden state at ``j - p + 1``, as if all
        drafts between had been right.
        """
        cos, sin = rope_tables(hidden.shape[1], self.shape)
        outputs: list[Tensor] = []
        seen: Seen = []
        following = self.enorm(following)
        for _ in range(DRAFTS):
            x = self.eh_proj(torch.cat((following, self.hnorm(hidden)), dim=-1))
            x = x + self.block.self_attn.attend(self.block.input_layernorm(x), cos, sin, seen)
            x = x + self.block.mlp(self.block.post_attention_layernorm(x))
            x = F.rms_norm(x, (x.shape[-1],), eps=self.shape.rms_norm_eps)
            outputs.append(x * self.scale)
            hidden = later(x, 1)
        return outputs

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the export, as the layer after the model's own."""
        named = {name.removeprefix("block."): weight.detach() for name, weight in self.named_parameters()}
        named["shared_head.norm.weight"] = named.pop("scale").repeat(self.shape.hidden_size)
        layer = self.shape.num_hidden_layers
        return {f"model.layers.{layer}.{name}": weight.contiguous() for name, weight in named.items()}


def draft_losses(model: Llama, head: Head, batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Loss of each draft over the answers, and the share of its tokens that are right.

    The model itself chooses the first token of an answer, so draft ``p`` begins with token ``p + 1``.
    """
    with torch.no_grad():
        hidden = model.hidden(batch.tokens)
        following = model.embed_tokens(batch.tokens.roll(-1, dims=1))
    found = []
    for p, output in enumerate(head(hidden, following), start=1):
        inside = batch.answer[p:] == batch.answer[:-p]
        targets = batch.targets[p:][inside]
        logits = F.linear(output.flatten(0, 1)[batch.wanted[p:][inside] - 1], model.embed_tokens.weight)
        right = (logits.argmax(-1) == targets).float().mean()
        found.append((F.cross_entropy(logits.float(), targets), right))
    return found


def make_batch(step: int, args: argparse.Namespace, encoder: Encoder) -> Batch:
    """The batch of a step; it depends on the step and the seed alone."""
    rng = random.Random(f"head:{args.seed}:{step}")
    tokens = rng.choice(LENGTHS)
    chats = data.sample_chats(rng, data.Limits(tokens, 60, WEIGHTS), encoder.count)
    return encoder.batch([next(chats) for _ in range(args.batch // tokens)])


def export(head: Head, out: Path) -> None:
    """Add the head to the model's folder; each file is replaced in one move."""
    config = json.loads((out / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tiny-") as name:
        folder = Path(name)
        save_file(head.tensors(), folder / "mtp.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in (folder / "mtp.safetensors", folder / "config.json"):
            file.chmod(0o644)
            file.replace(out / file.name)


def train(args: argparse.Namespace) -> None:
    """Train until the last step, from the checkpoint if there is one; then export."""
    torch.manual_seed(args.seed)
    encoder = Encoder(build_tokenizer())
    model, head = Llama(LlamaShape()), Head(LlamaShape())
    weights = load_file(args.out / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    model.requires_grad_(False)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    checkpoint = args.work / "head.pt"
    step, start = 0, time.perf_counter()
    if checkpoint.exists():
        state = torch.load(checkpoint)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < args.steps:
        for group in optimizer.param_groups:
            falling = 0.5 + 0.5 * math.cos(math.pi * step / args.steps)
            group["lr"] = args.lr * min(1.0, (step + 1) / 50) * falling
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = draft_losses(model, head, make_batch(step, args, encoder))
        optimizer.zero_grad()
        sum(loss / p for p, (loss, _) in enumerate(found, start=1)).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0 or step == args.steps:
            rates = " ".join(f"{loss:.3f} ({right:.2f})" for loss, right in found)
            print(f"step {step}: {rates}, {time.perf_counter() - start:.0f} s", flush=True)
            args.work.mkdir(parents=True, exist_ok=True)
            state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    export(head, args.out)


def main() -> None:
    """Parse the options, train, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the exported model")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tiny_model_run")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--batch", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    train(args)


if __name__ == "__main__":
    main()
