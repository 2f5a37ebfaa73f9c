"""Measure the exported tiny model through mlx-lm: greedy decoding, prompts built by the chat template.

An answer counts only if the text is exactly right and the model then ends its turn by itself. The chats
are drawn from a fixed seed that training does not use. ``--drafts`` measures the head instead: the share of
its drafts that are the tokens which the model chooses.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import data
import mlx.core as mx
from drafting import right_drafts
from mlx_lm import stream_generate
from mlx_lm.utils import load

DEFAULT_MODEL = Path(__file__).resolve().parent.parent.parent / "mlxtp" / "models" / "tiny"
MAX_TOKENS = 512
DRAFTS = 3
NEEDLE_LENGTHS = (250, 500, 1000, 2000)


@dataclass(frozen=True)
class Result:
    """Exact answers of one task, and the first few wrong ones as (right answer, given answer)."""

    task: str
    exact: int
    total: int
    wrong: list[tuple[str, str]]


class Subject:
    """The loaded model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model, self.tokenizer, *_ = load(str(path))

    def count(self, text: str) -> int:
        """Number of tokens of a plain text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, chat: data.Chat) -> list[int]:
        """Prompt tokens that ask for the last answer of ``chat``."""
        messages = [{"role": "system", "content": chat.system}] if chat.system else []
        for turn in chat.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.answer})
        tokens: list[int] = self.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
        return tokens

    def answer(self, chat: data.Chat) -> str:
        """The greedy answer to the last turn; an answer without an end is marked as such."""
        text, reason = "", None
        for part in stream_generate(self.model, self.tokenizer, self.prompt(chat), max_tokens=MAX_TOKENS):
            text += part.text
            reason = part.finish_reason
        return text if reason == "stop" else text + "<no end>"

    def right_drafts(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[list[bool]]:
        """The drafts of the greedy answer, with its end: see :func:`drafting.right_drafts`."""
        parts = stream_generate(self.model, self.tokenizer, prompt, max_tokens=max_tokens)
        answer = [part.token for part in parts]
        return right_drafts(self.model, self.path, prompt, answer, DRAFTS)


def repeat(text: str) -> data.Chat:
    """The chat that asks for ``text``."""
    return data.Chat([data.Turn(f"Repeat exactly: {text}", text)])


def any_turn(rng: data.Rng, count: data.Count) -> data.Turn:
    """A turn of any task."""
    choice = rng.randrange(4)
    if choice == 0:
        return data.needle_chat(rng, data.Limits(200, 0), count).turns[0]
    if choice == 1:
        return data.count_turn(rng, 30)
    return data.chat_turn(rng) if choice == 2 else data.repeat_turn(rng, 40)


def task_chats(count: data.Count, seed: int) -> dict[str, list[data.Chat]]:
    """The chats of every task."""
    rng = random.Random(f"measure:{seed}")

    def uniform(low: int, high: int) -> data.Chat:
        return repeat(data.uniform_string(rng, rng.randint(low, high)))

    def several() -> data.Chat:
        turns = [any_turn(rng, count) for _ in range(rng.randint(2, 3))]
        return data.Chat(turns, data.system_message(rng))

    makers: dict[str, tuple[int, Callable[[], data.Chat]]] = {
        "repeat, 1-40 uniform characters": (200, lambda: uniform(1, 40)),
        "repeat, 41-100 uniform characters": (100, lambda: uniform(41, 100)),
        "repeat, every kind of string": (200, lambda: data.Chat([data.repeat_turn(rng, 60)])),
        "repeat, periodic": (50, lambda: repeat(data.periodic_string(rng, 40))),
        "repeat, words and numbers": (50, lambda: repeat(data.joined_string(rng, rng.randint(5, 40)))),
        "repeat, non-ASCII": (50, lambda: repeat(data.unicode_string(rng, rng.randint(1, 30)))),
        "count": (50, lambda: data.Chat([data.count_turn(rng)])),
        "small talk": (50, lambda: data.Chat([data.chat_turn(rng)], data.system_message(rng))),
        "last of 2-3 turns, any task": (100, several),
    }
    chats = {task: [make() for _ in range(number)] for task, (number, make) in makers.items()}
    chats["repeat, held-out string"] = [repeat(text) for text in data.HELD_OUT]
    for length in NEEDLE_LENGTHS:
        chats[f"code among {length} tokens"] = [
            data.single_needle_chat(rng, length, count) for _ in range(50)
        ]
    return chats


def measure(subject: Subject, task: str, chats: list[data.Chat]) -> Result:
    """Ask for the last answer of every chat."""
    given = [(chat.turns[-1].answer, subject.answer(chat)) for chat in chats]
    wrong = [(right, answer) for right, answer in given if right != answer]
    return Result(task, len(given) - len(wrong), len(given), wrong[:5])


def print_table(results: list[Result]) -> None:
    """Print a Markdown table, then the wrong answers."""
    print(f"| {'task':<34} | exact    | share   |\n| {'-' * 34} | -------- | ------- |")
    for result in results:
        share = 100.0 * result.exact / result.total
        print(f"| {result.task:<34} | {result.exact:>3}/{result.total:<4} | {share:>5.1f} % |")
    for result in results:
        for right, answer in result.wrong:
            print(f"{result.task}: right {right!r}, given {answer!r}")


def draft_prompts(subject: Subject, seed: int) -> dict[str, list[list[int]]]:
    """Prompts of every kind of answer that is drafted."""
    rng = random.Random(f"drafts:{seed}")
    makers: dict[str, Callable[[], data.Chat]] = {
        "count": lambda: data.Chat([data.count_turn(rng)]),
        "repeat, 1-40 uniform characters": lambda: repeat(data.uniform_string(rng, rng.randint(1, 40))),
        "repeat, words and numbers": lambda: repeat(data.joined_string(rng, rng.randint(5, 40))),
        "repeat, sentences": lambda: repeat(data.sentence_string(rng, 60)),
        "repeat, periodic": lambda: repeat(data.periodic_string(rng, 40)),
        "code among 250 tokens": lambda: data.single_needle_chat(rng, 250, subject.count),
        "small talk": lambda: data.Chat([data.chat_turn(rng)], data.system_message(rng)),
    }
    prompts = {task: [subject.prompt(make()) for _ in range(30)] for task, make in makers.items()}
    plain = "sentences, no chat, 60 tokens"
    prompts[plain] = [subject.tokenizer.encode(data.sentence_string(rng, 60)) for _ in range(30)]
    return prompts


def measure_drafts(subject: Subject, seed: int, only: str) -> None:
    """Print a Markdown table: shares of right drafts, and tokens for each forward of the model."""
    print(f"| {'answer':<34} | draft 1 | draft 2 | draft 3 | tokens |")
    print(f"| {'-' * 34} | ------- | ------- | ------- | ------ |")
    for task, prompts in draft_prompts(subject, seed).items():
        if only not in task:
            continue
        most = 60 if "no chat" in task else MAX_TOKENS
        found = [drafts for prompt in prompts for drafts in subject.right_drafts(prompt, most)]
        places = [[drafts[k] for drafts in found if k < len(drafts)] for k in range(DRAFTS)]
        shares = [sum(right) / len(right) for right in places]
        columns = " | ".join(f"{100 * share:>5.1f} %" for share in shares)
        print(f"| {task:<34} | {columns} | {1 + sum(shares):>6.2f} |")


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="measure only the tasks whose name contains this")
    parser.add_argument("--drafts", action="store_true", help="measure the drafts of the head")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    start = time.perf_counter()
    subject = Subject(args.model)
    if args.drafts:
        measure_drafts(subject, args.seed, args.only)
        return
    chats = task_chats(subject.count, args.seed)
    results = [measure(subject, task, chats[task]) for task in chats if args.only in task]
    if args.json:
        found: dict[str, Any] = {"seed": args.seed, "results": [asdict(result) for result in results]}
        print(json.dumps(found, indent=2))
        return
    print_table(results)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
