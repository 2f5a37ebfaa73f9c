"""Files of a model, read without MLX and without its Python code: its tokenizer, and facts of its weights.

Kimi's repositories have a list of byte strings instead of tokenizer.json, and Python code with the pattern
that splits text. Functions that read a file raise OSError, and ValueError if it makes no sense.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from .errors import Code, ModelError
from .model_config import Config, mtp_place, name_in_head, quantization, quantizations

TIKTOKEN_FILE = "tiktoken.model"
MAX_CONFIG_BYTES = 8 << 20  #: of config.json; with a quantization for each layer it has 2 MiB
MAX_TEXT_BYTES = 64 << 20  #: of any other file but weights; Gemma's tokenizer.json has 33 MiB
MAX_INDEX_BYTES = 32 << 20  #: of an index of weights; 9 MiB for DeepSeek V3, 15 MiB for 140,000 tensors
#: Values in a JSON file, which cost more than their bytes to read. Gemma's tokenizer.json has 1.9 million.
MAX_VALUES = 4 << 20
MAX_FEW_VALUES = 1 << 20  #: of a file that agents read: it already stops their threads for 0.1 s
LFS = b"version https://git-lfs.github.com/spec/"  #: Begins a pointer of Git LFS.
_LFS_BYTES = 1024  # most bytes of a pointer
RESERVED = 256  # special tokens after the list's; Kimi's `num_reserved_special_tokens`
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: Kimi's `pat_str`: tokenization_kimi.py and tokenization_moonshot.py have the same.
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
#: Model types whose tiktoken.model goes with that pattern. Moonlight is a deepseek_v3.
_KIMI = frozenset({"kimi_k2", "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl", "deepseek_v3"})
#: Model types published with Python code instead of a chat template. mlx-lm has no module for them either.
_PYTHON_CHATS = frozenset({"deepseek_v41", "deepseek_v41_text", "kimi_k3"})
_PROBE = " Hello,  world's END .\n\té 日本語ABC 12345 😀 e\u0301\r\n x"


def refusal(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], *, template: bool) -> str:
    """Return why a model without tokenizer.json cannot be used, or "". `template`: it has one."""
    family, kind = config.get("model_type"), tokenizer_config.get("tokenizer_class")
    if family not in _KIMI or kind != "TikTokenTokenizer":
        return (
            f"the tokenizer of the family {family!r}, {kind!r} over {TIKTOKEN_FILE}, is Python code in its "
            "repository, which mlxtp does not run; use a conversion that has tokenizer.json"
        )
    return chat_refusal(config, template=template)


def chat_refusal(config: Mapping[str, Any], *, template: bool) -> str:
    """Return why a model cannot answer chats; "" if it can, or if that is unknown."""
    family = config.get("model_type")
    if template or family not in _PYTHON_CHATS:
        return ""
    return (
        f"{family} writes its chats with Python code in its repository, which mlxtp does not run; "
        "use a conversion that has chat_template.jinja"
    )


def tokenizer_json(folder: Path) -> str:
    """Return tokenizer.json, or convert tiktoken.model (160,000 tokens in 3 s). Raises ModelError."""
    path = folder / "tokenizer.json"
    if path.is_file() or not (folder / TIKTOKEN_FILE).is_file():
        try:
            return text_of(path)
        except ValueError as error:
            raise ModelError(f"{folder}: {error}", Code.MODEL_INVALID) from None
    try:
        config, settings = table(folder / "config.json"), tokenizer_settings(folder)
        why = refusal(config, settings, template="chat_template" in settings)
        found = "" if why else converted(content_of(folder / TIKTOKEN_FILE), settings)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{TIKTOKEN_FILE} or tokenizer_config.json is damaged: {error}"
    if why:
        raise ModelError(f"{folder}: {why}", Code.MODEL_UNSUPPORTED)
    return found


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, with a chat template that has its own file."""
    path = folder / "tokenizer_config.json"
    settings = table(path) if path.is_file() else {}
    if (path := folder / "chat_template.jinja").is_file():
        settings["chat_template"] = text_of(path)
    # In other models chat_template.json is for a processor of images.
    elif not settings.get("chat_template") and (path := folder / "chat_template.json").is_file():
        settings |= {name: told for name, told in table(path).items() if name == "chat_template"}
    return settings


#: Files that `tokenizer_settings` reads.
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def token_count(folder: Path) -> int:
    """Return the largest token id plus 1; 0 if the tokenizer's files do not show it."""
    path = folder / "tokenizer.json"
    try:
        if not path.is_file():
            return len(content_of(folder / TIKTOKEN_FILE).split()) // 2 + RESERVED
        found, settings = table(path, values=MAX_VALUES), tokenizer_settings(folder)
        vocabulary = found["model"]["vocab"]
        ids = set(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))
        ids |= {token["id"] for token in found["added_tokens"]}
        ids |= {int(id_) for id_ in settings.get("added_tokens_decoder", {})}
        return int(max(ids)) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0


def config_in(folder: Path) -> dict[str, Any]:
    """Return config.json, with the quantization that ModelOpt keeps in its own file."""
    config, beside = table(folder / "config.json", MAX_CONFIG_BYTES), folder / "hf_quant_config.json"
    if not quantizations(config) and beside.is_file():
        config["quantization_config"] = {"quant_method": "modelopt", **table(beside)}
    return config


def table(path: Path, most: int = MAX_TEXT_BYTES, values: int = MAX_FEW_VALUES) -> dict[str, Any]:
    """Return the JSON object in a file of at most so many bytes and values."""
    text = text_of(path, most)
    if (count := text.count(",")) > values:
        raise ValueError(f"{path.name} has {count:,} values; the most that mlxtp reads is {values:,}")
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def text_of(path: Path, most: int = MAX_TEXT_BYTES) -> str:
    return content_of(path, most).decode()


def content_of(path: Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """Return a file's bytes. Raises ValueError if it is too large or a pointer of Git LFS."""
    with path.open("rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"{path.name} has more than {most >> 20} MiB; no model needs that many")
    if found.startswith(LFS):
        raise ValueError(lfs_pointer(path))
    return found


def lfs_pointer(path: Path) -> str:
    return f"{path.name} is a pointer of Git LFS, not the file: run `git lfs pull`, or download it again"


def is_lfs_pointer(path: Path) -> bool:
    return path.stat().st_size <= _LFS_BYTES and path.read_bytes().startswith(LFS)


def converted(ranks: bytes, settings: Mapping[str, Any]) -> str:
    """Make tokenizer.json of "BASE64 RANK" lines and tokenizer_config.json. Raises ValueError for damage."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    pairs = [line.split() for line in ranks.splitlines() if line]
    tokens = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    lacks_bytes = any(bytes([byte]) not in tokens for byte in range(256))
    if lacks_bytes or sorted(tokens.values()) != list(range(len(pairs))):
        raise ValueError(
            f"its {len(pairs)} lines do not have the ranks 0 to {len(pairs) - 1}, with each byte"
        )
    name = {token: token.decode("latin-1").translate(CHARACTER_OF) for token in tokens}
    # tiktoken joins the pair whose result has the lowest rank, so any pair that makes a token is a merge.
    merges = [
        (rank, tokens[token[:at]], tokens[token[at:]], name[token[:at]], name[token[at:]])
        for token, rank in tokens.items()
        for at in range(1, len(token))
        if token[:at] in tokens and token[at:] in tokens
    ]
    model = models.BPE(
        vocab={name[token]: rank for token, rank in tokens.items()},
        merges=[merge[3:] for merge in sorted(merges)],
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    known = {int(id_): token for id_, token in settings.get("added_tokens_decoder", {}).items()}
    added = [
        AddedToken(
            known.get(id_, {}).get("content", f"<|reserved_token_{id_}|>"),
            special=known.get(id_, {}).get("special", True),
            normalized=False,
        )
        for id_ in range(len(tokens), len(tokens) + RESERVED)
    ]
    tokenizer.add_tokens(added)
    _check_round_trip(tokenizer, len(tokens), [token.content for token in added], known)
    return str(tokenizer.to_str())


def _check_round_trip(tokenizer: Any, first: int, added: list[str], known: Mapping[int, Any]) -> None:
    contents = {id_: token["content"] for id_, token in known.items()} | dict(enumerate(added, first))
    for id_, content in contents.items():
        found = tokenizer.encode(content, add_special_tokens=False).ids
        if found != [id_]:
            raise ValueError(f"the token {content!r} must be {id_} and is {found}")
    text = _PROBE + added[0] + _PROBE
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise ValueError(f"the text {text!r} does not come back from its tokens")


_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(0x100) if byte not in _SHOWN]
#: GPT-2's table: printable bytes stand for themselves, characters from U+0100 on for the others.
CHARACTER_OF = {byte: chr(byte) for byte in _SHOWN} | {byte: chr(0x100 + i) for i, byte in enumerate(_HIDDEN)}


# --- weights --------------------------------------------------------------------------------------------

_SAMPLE_BYTES = 1 << 20
WEIGHTS = "model*.safetensors"  #: mlx-lm reads no others
MTP_FILE = "mtp.safetensors"  #: for an MTP head outside the model's own files
INDEX = "model.safetensors.index.json"


def indexed(folder: Path) -> frozenset[str]:
    if not (folder / INDEX).is_file():
        return frozenset()
    try:
        return frozenset(map(str, table(folder / INDEX, MAX_INDEX_BYTES)["weight_map"].values()))
    except (LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{INDEX} names no files: {error!r}") from None


def weight_files(folder: Path) -> list[Path]:
    """Return the model's weight files that are here. Files that its index does not name are left out."""
    named = indexed(folder)
    return [path for path in sorted(folder.glob(WEIGHTS)) if not named or path.name in named]


def stray_files(folder: Path) -> list[str]:
    return sorted({path.name for path in folder.glob(WEIGHTS)} - {path.name for path in weight_files(folder)})


def weight_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (*weight_files(folder), *folder.glob(MTP_FILE))}


def has_mtp_head(folder: Path, config: Config) -> bool:
    place = mtp_place(config)
    if not place:
        return False
    if (folder / MTP_FILE).is_file():
        return True
    if (index := folder / INDEX).is_file():
        return any(name_in_head(name, place) for name in table(index, MAX_INDEX_BYTES)["weight_map"])
    if not (whole := folder / "model.safetensors").is_file():
        return False
    with whole.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, MAX_TEXT_BYTES))
    return any(f'"{before}{place}'.encode() in header for before in ("", "language_model."))


_MOST_AXES = 8  # of a tensor
_ODD = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    ModelError,
)


@lru_cache(maxsize=256)
def parameters_in(folder: Path, _stamp: str) -> int:
    """Return the number of parameters by the headers of the weights; 0 if these do not tell.

    It counts as mlx-lm does: quantized weights before they were packed, without their scales. `_stamp`:
    another one has the headers read again.
    """
    shapes: dict[str, Any] = {}
    left = MAX_INDEX_BYTES  # of all headers
    try:
        bits = quantization(config_in(folder))
        for path in weight_files(folder):
            with path.open("rb") as file:
                left -= (size := int.from_bytes(file.read(8), "little"))
                text = file.read(size).decode() if left >= 0 else ""
            if text.count(",") > MAX_FEW_VALUES:
                return 0
            shapes |= json.loads(text)
        shapes.pop("__metadata__", None)
        return sum(_parameters(name, shapes, bits) for name in shapes)
    except _ODD:
        return 0


def _parameters(name: str, shapes: Mapping[str, Any], quantized: Config) -> int:
    """Return the number of parameters in a tensor. Raises ValueError for one packed in an unknown way."""
    module, _, kind = name.rpartition(".")
    shape, packed = shapes[name]["shape"], f"{module}.scales" in shapes
    if len(shape) > _MOST_AXES or max(shape, default=1) >= 1 << 48:
        raise ValueError(f"{name} is larger than any tensor")
    count = prod(shape)
    if kind == "weight" and packed and shapes[name]["dtype"] == "U32":
        own = quantized.get(module)
        return int(count * 32 // (own if isinstance(own, dict) else quantized)["bits"])
    if (packed and kind in ("scales", "biases")) or kind.endswith("scale_inv"):
        return 0
    if shapes[name]["dtype"][0] not in "FB":
        raise ValueError(f"{name} holds no numbers with a fraction")
    return int(count)


def fingerprint(folder: Path) -> str:
    """Return a hash of the configuration and of samples of every weight file. Raises ModelError.

    A file's size, beginning (with the tensors' names and shapes), middle and end tell models apart. They show
    no forgery, but hashing all of a large model would take minutes.
    """
    with (folder / "config.json").open("rb") as file:
        digest = hashlib.sha256(file.read(MAX_CONFIG_BYTES))
    try:
        sizes = weight_sizes(folder)
    except ValueError as error:
        raise ModelError(f"{folder}: {error}", Code.MODEL_INVALID) from None
    for name, size in sizes.items():
        digest.update(f"{name}:{size}".encode())
        with (folder / name).open("rb") as file:
            for start in (0, max(size // 2, 0), max(size - _SAMPLE_BYTES, 0)):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
