"""Train the tiny model on a CPU and export it as a Hugging Face Llama folder.

One command: ``python examples/tiny_model/train.py``. Every worker process trains on its own part of the
batch with one thread, and the gradients are averaged once a step; that is much faster than one process
with several threads. The run is seeded; every step draws its batch from the seed, its own number and the
worker, so a run resumed from a checkpoint continues as if it had never stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import data
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizer import BOS, END, EOT, ROLES, SPECIAL_TOKENS, build_tokenizer, save_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
DEFAULT_OUT = HERE.parent.parent / "mlxtp" / "models" / "tiny"


@dataclass(frozen=True)
class LlamaShape:
    """The fields of a Hugging Face ``LlamaConfig`` that shape the network."""

    hidden_size: int = 128
    intermediate_size: int = 320
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    vocab_size: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096


class RMSNorm(nn.Module):  # type: ignore[misc]
    """Root-mean-square norm with a learned weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_tables(length: int, shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each ``(length, head_dim)``."""
    half = shape.head_dim // 2
    frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-rotation form; ``x`` is ``(batch, heads, length, head_dim)``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over ``(batch, heads, length, head_dim)``.

    Below 512 tokens two plain products in bfloat16 beat the fused kernel of this CPU by far.
    """
    batch, heads, length, size = q.shape
    if length >= 512 or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    bias = torch.full((length, length), -1e4, dtype=q.dtype).triu(1).expand(batch * heads, length, length)
    q, k, v = (x.reshape(batch * heads, length, size) for x in (q, k, v))
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1, dtype=q.dtype), v).view(batch, heads, length, size)


class Attention(nn.Module):  # type: ignore[misc]
    """Grouped-query causal attention."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``(batch, length, hidden)`` to the same shape."""
        batch, length, _ = x.shape
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        v = heads(self.v_proj(x))
        q = rotate(heads(self.q_proj(x)), cos, sin).to(v.dtype)
        k = rotate(heads(self.k_proj(x)), cos, sin).to(v.dtype)
        out = attention(q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class MLP(nn.Module):  # type: ignore[misc]
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):  # type: ignore[misc]
    """One transformer layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):  # type: ignore[misc]
    """A Llama with tied embeddings; parameter names are those of Hugging Face without ``model.``."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self._initialize()

    def _initialize(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = "o_proj" in name or "down_proj" in name
                scale = (2 * self.shape.num_hidden_layers) ** -0.5 if residual else 1.0
                nn.init.normal_(weight, std=scale * weight.shape[1] ** -0.5)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden states ``(batch, length, hidden)`` after the last norm."""
        cos, sin = rope_tables(tokens.shape[1], self.shape)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Logits ``(wanted, vocab)`` at the flat positions ``wanted`` of ``tokens`` ``(batch, length)``."""
        return F.linear(self.hidden(tokens).flatten(0, 1)[wanted], self.embed_tokens.weight)


@dataclass(frozen=True)
class Batch:
    """Padded chats: ``tokens`` is ``(batch, length)``; the rest is ``(answers,)`` over all answer tokens.

    ``wanted`` holds the flat positions whose next token counts, ``targets`` those next tokens, and
    ``answer`` the number of the answer to which each belongs.
    """

    tokens: Tensor
    wanted: Tensor
    targets: Tensor
    answer: Tensor


class Encoder:
    """Turns chats into token lists and batches."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = {token: self.ids(token)[0] for token in SPECIAL_TOKENS}

    def ids(self, text: str) -> list[int]:
        """Tokens of a plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def count(self, text: str) -> int:
        """Number of tokens of a plain text."""
        return len(self.ids(text))

    def chat(self, chat: data.Chat) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of a chat, and the span of every answer with its end token."""
        system, user, assistant = (self.special[role] for role in ROLES)
        end = self.special[END]
        tokens = [self.special[BOS]]
        spans = []
        if chat.system:
            tokens += [system, *self.ids(chat.system), end]
        for turn in chat.turns:
            tokens += [user, *self.ids(turn.user), end, assistant]
            first = len(tokens)
            tokens += [*self.ids(turn.answer), end]
            spans.append((first, len(tokens)))
        return tokens, spans

    def batch(self, chats: list[data.Chat]) -> Batch:
        """Pad chats on the right; few different lengths save the preparation of kernels."""
        encoded = [self.chat(chat) for chat in chats]
        width = 32 * math.ceil(max(len(tokens) for tokens, _ in encoded) / 32)
        pad = self.special[EOT]
        rows: list[list[int]] = []
        wanted: list[int] = []
        targets: list[int] = []
        answer: list[int] = []
        answers = 0
        for row, (tokens, spans) in enumerate(encoded):
            rows.append(tokens + [pad] * (width - len(tokens)))
            for first, last in spans:
                wanted += range(row * width + first - 1, row * width + last - 1)
                targets += tokens[first:last]
                answer += [answers] * (last - first)
                answers += 1
        return Batch(torch.tensor(rows), *(torch.tensor(x) for x in (wanted, targets, answer)))


#: Last step of each stage, and its tokens of a chat, characters of a string, tokens of a batch.
CURRICULUM: tuple[tuple[float, tuple[int, ...], int, int], ...] = (
    (500, (64,), 40, 4096),
    (1200, (64, 128, 256), 40, 4096),
    (4000, (64, 128, 256, 256, 500), 80, 4096),
    (5500, (64, 128, 256, 500, 768, 1024, 1280), 100, 4096),
    (math.inf, (64, 128, 256, 500, 768, 1024, 1280, 2048), 100, 6144),
)


def stage(step: int, rng: data.Rng) -> tuple[data.Limits, int]:
    """The curriculum: limits of a chat and number of chats of the batch at ``step``."""
    lengths, chars, size = next(part[1:] for part in CURRICULUM if step < part[0])
    tokens = rng.choice(lengths)
    needle = 0.0 if step < 300 else min(0.6, 0.3 + tokens / 1000)
    mixed = 0.0 if step < 300 else 0.2
    count = 0.0 if step < 5000 else 0.2
    weights = {"repeat": 1.0 - needle - mixed, "needle": needle, "mixed": mixed, "count": count}
    return data.Limits(tokens, min(chars, 10 + step // 20), weights), size // tokens


def make_batch(step: int, seed: int, encoder: Encoder, worker: int, workers: int) -> Batch:
    """A worker's part of the batch of a step; it depends on these numbers alone."""
    limits, size = stage(step, random.Random(f"{seed}:{step}"))
    chats = data.sample_chats(random.Random(f"{seed}:{step}:{worker}"), limits, encoder.count)
    return encoder.batch([next(chats) for _ in range(max(1, size // workers))])


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Warm-up, a constant part, a cosine between two steps, and a line to zero at the very end."""
    first, last = args.decay
    falling = 0.5 + 0.5 * math.cos(math.pi * min(1.0, max(0.0, (step - first) / (last - first))))
    return float(args.lr * min(1.0, (step + 1) / args.warmup) * falling * min(1.0, (args.steps - step) / 300))


def make_optimizer(model: Llama, args: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW with weight decay on the matrices of the layers only."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("layers")]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or not n.startswith("layers")]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), eps=1e-9)


def eval_sets(encoder: Encoder) -> dict[str, list[Batch]]:
    """Unseen chats of every task."""
    rng = random.Random("eval")

    def batches(chats: list[data.Chat], size: int) -> list[Batch]:
        return [encoder.batch(chats[i : i + size]) for i in range(0, len(chats), size)]

    uniform = [data.uniform_string(rng, rng.randint(1, 40)) for _ in range(200)]
    long = [data.uniform_string(rng, rng.randint(64, 100)) for _ in range(100)]
    sets = {
        "repeat40": [data.Chat([data.Turn(f"Repeat exactly: {s}", s)]) for s in uniform],
        "repeat100": [data.Chat([data.Turn(f"Repeat exactly: {s}", s)]) for s in long],
        "kinds": [data.Chat([data.repeat_turn(rng, 60)]) for _ in range(200)],
        "falcon": [data.Chat([data.Turn(f"Repeat exactly: {s}", s)]) for s in data.HELD_OUT],
        "count": [data.Chat([data.count_turn(rng)]) for _ in range(64)],
        "chat": [data.Chat([data.chat_turn(rng)], data.system_message(rng)) for _ in range(100)],
    }
    found = {name: batches(chats, 50) for name, chats in sets.items()}
    for size in (250, 500, 1000):
        needles = [data.single_needle_chat(rng, size, encoder.count) for _ in range(40)]
        found[f"needle{size}"] = batches(needles, 8)
    return found


def exact_rate(model: Llama, batches: list[Batch]) -> float:
    """Share of answers that greedy decoding gets exactly right.

    An answer is exact if and only if every one of its tokens is the most likely one given the right
    tokens before it, so no decoding is needed.
    """
    right = total = 0
    for batch in batches:
        with torch.no_grad():
            hit = model(batch.tokens, batch.wanted).argmax(-1) == batch.targets
        answers = int(batch.answer[-1]) + 1
        wrong = torch.zeros(answers).index_add(0, batch.answer, (~hit).float())
        right += int((wrong == 0).sum())
        total += answers
    return right / total


def config_json(shape: LlamaShape, encoder: Encoder) -> dict[str, Any]:
    """``config.json`` of the export."""
    special = encoder.special
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": special[BOS],
        "eos_token_id": [special[END], special[EOT]],
        "pad_token_id": special[EOT],
    }


def export(model: Llama, encoder: Encoder, out: Path) -> None:
    """Write the model folder; every file is replaced in one move."""
    out.mkdir(parents=True, exist_ok=True)
    config = config_json(model.shape, encoder)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {**{key: config[key] for key in keys}, "do_sample": False}
    weights = {f"model.{name}": weight.detach().contiguous() for name, weight in model.named_parameters()}
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tiny-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        save_tokenizer(encoder.tokenizer, folder, model.shape.max_position_embeddings)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        for file in sorted(folder.iterdir()):
            file.chmod(0o644)
            file.replace(out / file.name)


def update_average(average: Llama, model: Llama, step: int) -> None:
    """Move the running average of the weights towards the model's."""
    decay = min(0.998, (step + 1) / (step + 20))
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 1.0 - decay)


def average_gradients(model: Llama, workers: int) -> None:
    """Replace every worker's gradients by their mean."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= workers
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class Trainer:
    """One worker of the training run: model, its averaged copy, optimizer and the step reached."""

    def __init__(self, args: argparse.Namespace, worker: int) -> None:
        self.args = args
        self.worker = worker
        torch.manual_seed(args.seed)
        self.encoder = Encoder(build_tokenizer())
        self.model = Llama(LlamaShape())
        self.average = Llama(LlamaShape())
        self.average.load_state_dict(self.model.state_dict())
        self.optimizer = make_optimizer(self.model, args)
        self.evals = eval_sets(self.encoder)
        self.step = 0
        self.seconds = 0.0
        self.checkpoint = args.work / "checkpoint.pt"
        if self.checkpoint.exists():
            self.load()

    def load(self) -> None:
        """Continue from the checkpoint."""
        state = torch.load(self.checkpoint)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        """Write the checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        self.args.work.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".tmp")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def train_step(self) -> tuple[float, int]:
        """One optimizer step; returns this worker's loss and number of tokens."""
        batch = make_batch(self.step, self.args.seed, self.encoder, self.worker, self.args.workers)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.args)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(batch.tokens, batch.wanted)
        loss = F.cross_entropy(logits.float(), batch.targets)
        self.optimizer.zero_grad()
        loss.backward()
        average_gradients(self.model, self.args.workers)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        update_average(self.average, self.model, self.step)
        self.step += 1
        return loss.item(), batch.tokens.numel()

    def report(self, loss: float, rate: float) -> None:
        """Print loss and speed per worker, and now and then the accuracies; then checkpoint and export."""
        print(f"step {self.step} loss {loss:.4f} {rate:.0f} tok/s {self.seconds / 60:.1f} min", flush=True)
        if self.step % self.args.eval_every == 0 or self.step == self.args.steps:
            rates = {name: exact_rate(self.average, batches) for name, batches in self.evals.items()}
            print("  " + " ".join(f"{name} {value:.3f}" for name, value in rates.items()), flush=True)
            self.save()
            export(self.average, self.encoder, self.args.out)

    def run(self) -> None:
        """Train until the last step."""
        losses: list[float] = []
        tokens = 0
        start = time.perf_counter()
        while self.step < self.args.steps:
            loss, size = self.train_step()
            losses.append(loss)
            tokens += size
            if self.worker == 0 and (self.step % 50 == 0 or self.step == self.args.steps):
                now = time.perf_counter()
                self.seconds += now - start
                self.report(sum(losses) / len(losses), tokens / (now - start))
                losses, tokens, start = [], 0, now


def work(worker: int, args: argparse.Namespace, meeting: str) -> None:
    """Run one worker; all meet through the file ``meeting``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=worker, world_size=args.workers)
    Trainer(args, worker).run()
    dist.destroy_process_group()


def main() -> None:
    """Parse the options, train, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the exported model")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "tiny_model_run")
    parser.add_argument("--steps", type=int, default=7300)
    parser.add_argument("--decay", type=int, nargs=2, default=(4500, 8000), help="steps of the cosine")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, str(Path(folder) / "meeting")), nprocs=args.workers)


if __name__ == "__main__":
    main()
