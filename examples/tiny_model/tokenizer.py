"""Build the tokenizer of the tiny model: a byte-level BPE of 512 tokens without context effects.

Runs of ASCII letters are pieces; every digit, space and other character is a piece of its own. A string
therefore has the same tokens wherever it stands, which is what makes repeating it easy to learn. Merges
come only from the words of the training texts, so random letters mostly stay single tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import data
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
BOS, EOT, END = "<|begin_of_text|>", "<|end_of_text|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = [BOS, EOT, *ROLES, END]
PIECES = "[A-Za-z]+| |[0-9]|[^A-Za-z0-9 ]"
CHAT_TEMPLATE = (
    "{{- '<|begin_of_text|>' -}}\n"
    "{%- for message in messages -%}\n"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|assistant|>' -}}\n"
    "{%- endif -%}"
)


def corpus() -> list[str]:
    """The words whose pieces become merges; those of the fixed texts count most."""
    fixed = [
        "Repeat exactly: ",
        "What is the code for ?",
        "The code for  is .",
        "Count from to .",
        data.CHAT_ANSWER,
    ]
    phrases = [*data.GREETINGS, *data.REQUESTS, *data.SYSTEMS, *data.HAYSTACK]
    return fixed * 40 + phrases * 2 + data.WORDS * 3


def build_tokenizer() -> Tokenizer:
    """Train the BPE; the result is the same on every run."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": EOT,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
