from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from benchmarks.published_models import PUBLISHED
from mlxtp.api.backend import StoredModelInfo
from mlxtp.api.catalog import read_card
from mlxtp.cli.planning import read_shape
from mlxtp.config import embedded_model_path
from mlxtp.engine import loader
from mlxtp.engine.grammar import build, read_tokenizer
from mlxtp.errors import ModelError, RequestError
from mlxtp.groups.fabric import row_bytes
from mlxtp.model_files import (
    CHARACTER_OF,
    KIMI_PATTERN,
    MAX_CONFIG_BYTES,
    MAX_FEW_VALUES,
    MAX_TEXT_BYTES,
    RESERVED,
    config_in,
    converted,
    fingerprint,
    has_mtp_head,
    indexed,
    parameters_in,
    text_of,
    token_count,
    tokenizer_json,
    tokenizer_settings,
)
from mlxtp.models import hub_client, inspect
from mlxtp.models.hub_cache import lacks
from mlxtp.text.conversation import Call, ChatMessage, Conversation, Tool
from mlxtp.text.renderer import LocalRenderer, template_module
from mlxtp.text.tokenizer import Text

from .api.conftest import byte_level, save
from .hub import Hub, Model
from .reference import chat_ids

pytestmark = pytest.mark.slow

NAMED = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|tool_call_begin|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
HAN = "日本語漢字中文"
WORDS = [
    *(*NAMED, " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "Hello", " folder", "def ", "return", "12345"),
    *("é", "e\u0301", "😀", "👩‍👧", "ǅ", "\u3000", "ʰ", "½"),
]


def trained() -> list[bytes]:
    """A small vocabulary in tiktoken's order, made of the words below."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    texts = [Path(__file__).read_text(), (Path(__file__).parent / "hub.py").read_text(), HAN, HAN[::-1]]
    tokenizer.train_from_iterator(texts * 3, trainer)
    byte_of = {sign: byte for byte, sign in CHARACTER_OF.items()}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [bytes(byte_of[sign] for sign in token) for token, _ in by_id]


TOKENS = trained()
RANKS = {token: rank for rank, token in enumerate(TOKENS)}
SETTINGS: dict[str, Any] = {
    "added_tokens_decoder": {
        str(len(TOKENS) + at): {"content": name, "special": not name.startswith("<|tool")}
        for at, name in enumerate(NAMED)
    },
    "bos_token": "[BOS]",
    "eos_token": {"content": "[EOS]", "special": True},
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
}


def lines(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def kimi(folder: Path, family: str = "kimi_k2", template: str | None = TEMPLATE, **settings: object) -> Path:
    """A folder as Kimi's repositories have it, without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "tiktoken.model").write_bytes(lines(TOKENS))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    (folder / "config.json").write_text(json.dumps({"model_type": family, "auto_map": {"AutoConfig": "x.Y"}}))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('the code of the model ran')")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def reference(text: str) -> list[int]:
    """tiktoken's algorithm, step by step: special tokens, the pattern, and the pair of the smallest rank."""
    ids = {name: len(TOKENS) + at for at, name in enumerate(NAMED)}
    unnamed = range(len(TOKENS) + len(NAMED), len(TOKENS) + RESERVED)
    ids |= {f"<|reserved_token_{id_}|>": id_ for id_ in unnamed}
    pattern = regex.compile(KIMI_PATTERN, regex.VERSION1)
    found: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, ids)) + ")", text):
        if part in ids:
            found.append(ids[part])
            continue
        for word in pattern.findall(part):
            pieces = [bytes([byte]) for byte in word.encode()]
            while word.encode() not in RANKS:
                joined = [RANKS.get(a + b, len(RANKS)) for a, b in pairwise(pieces)]
                if not joined or min(joined) == len(RANKS):
                    break
                at = joined.index(min(joined))
                pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
            found += [RANKS[word.encode()]] if word.encode() in RANKS else [RANKS[piece] for piece in pieces]
    return found


def random_texts(count: int) -> list[str]:
    random_, words = random.Random(7), [*WORDS, f"<|reserved_token_{len(TOKENS) + 200}|>"]
    letters = [chr(code) for code in [*range(0x20, 0x250), *range(0x3B1, 0x3C9), *range(0x5D0, 0x5EA)]]

    def some(most: int) -> str:
        kinds = [random_.choice((words, letters, HAN)) for _ in range(random_.randint(0, most))]
        return "".join(map(random_.choice, kinds))

    return [random_.choice((words, letters, HAN))[random_.randrange(7)] + some(14) for _ in range(count)]


def test_a_converted_tokenizer_has_the_ids_of_tiktoken_and_gives_the_text_back() -> None:
    tokenizer = Tokenizer.from_str(converted(lines(TOKENS), SETTINGS))
    for text in random_texts(1500):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_kimi_chats_without_running_the_code_of_its_repository(tmp_path: Path) -> None:
    text = Text(LocalRenderer.load(kimi(tmp_path)))
    prompt = chat_ids(text, [{"role": "user", "content": "Hello 日本"}])
    assert prompt == tuple(reference("<|im_user|>Hello 日本<|im_end|><|im_assistant|>"))
    assert text.eos == (len(TOKENS) + 1,)
    begin = len(TOKENS) + NAMED.index("<|tool_call_begin|>")
    assert begin not in text.specials, "answers show it, for the calls in them"
    shown = text.detokenizer()
    assert shown.push([*reference("日本😀"), len(TOKENS) + 2, begin]) == "日本😀<|tool_call_begin|>"
    assert lacks(tmp_path) == "weights (model*.safetensors)"


def test_kimi_answers_can_be_held_to_a_grammar(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(kimi(tmp_path), len(TOKENS) + RESERVED, frozenset({len(TOKENS) + 1}))
    matcher = build(tokenizer, "regex", "Hello")
    assert matcher.consume_tokens(reference("Hello"))
    assert not matcher.consume_tokens(reference("x"))
    with pytest.raises(RequestError, match="kimi_k9"):
        read_tokenizer(kimi(tmp_path, "kimi_k9"), len(TOKENS) + RESERVED, frozenset())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"family": "qwen"}, "the tokenizer of the family 'qwen'"),
        ({"tokenizer_class": "OtherTokenizer"}, "'OtherTokenizer' over tiktoken.model, is Python code"),
        ({"family": "kimi_k3", "template": None}, "kimi_k3 writes its chats with Python code"),
        ({"added_tokens_decoder": {"5": {"content": "[BOS]"}}}, r"'\[BOS\]' must be 5 and is \["),
        ({"added_tokens_decoder": {"x": {}}}, "tokenizer_config.json is damaged"),
    ],
)
def test_a_tiktoken_model_of_another_kind_is_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        Text(LocalRenderer.load(kimi(tmp_path, **changes)))


@pytest.mark.parametrize(
    "damage", [lines(TOKENS[1:]), lines(TOKENS)[5:], b"x", b"", lines(TOKENS) + b"QUFB 9999\n"]
)
def test_a_damaged_list_of_tokens_is_refused(tmp_path: Path, damage: bytes) -> None:
    (kimi(tmp_path) / "tiktoken.model").write_bytes(damage)
    with pytest.raises(ModelError, match=r"damaged"):
        tokenizer_json(tmp_path)


@pytest.mark.parametrize(("id_", "refused"), [(1, False), (300, True)])
def test_other_ids_than_the_model_says_are_refused(tmp_path: Path, id_: int, refused: bool) -> None:
    """Without tokenizer.json the library makes a tokenizer of what is there."""
    folder = save(byte_level(), tmp_path)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in vocabulary["merges"]))
    settings = {
        **{"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<s>"},
        "added_tokens_decoder": {id_: {"content": "</s>", "special": True}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    why = "'</s>' token 1 instead of 300"
    with pytest.raises(ModelError, match=why) if refused else contextlib.nullcontext():
        Text(LocalRenderer.load(folder))


def test_the_count_of_tokens_is_the_largest_id_plus_1(tmp_path: Path) -> None:
    assert token_count(kimi(tmp_path / "kimi")) == len(TOKENS) + RESERVED
    folder = save(byte_level(), tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    count = Tokenizer.from_str(json.dumps(content)).get_vocab_size()
    assert token_count(folder) == count
    (folder / "tokenizer_config.json").unlink()
    assert token_count(folder) == count
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"700": {}}}))
    assert token_count(folder) == 701
    content["added_tokens"].append({"id": 900, "content": "<x>"})
    content["model"] = {"vocab": [["a", -1.0]] * 800}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert token_count(folder) == 901
    for damaged in ("[]", "{", '{"model": {"vocab": {"a": "b"}}, "added_tokens": []}'):
        (folder / "tokenizer.json").write_text(damaged)
        assert token_count(folder) == 0
    assert token_count(tmp_path / "nothing") == 0


@pytest.mark.parametrize(
    ("family", "lost", "why"),
    [
        ("kimi_k2", "", ""),
        ("kimi_k3", "", ""),
        ("kimi_k3", "chat_template.jinja", "kimi_k3 writes its chats with Python code"),
        ("kimi_k3", "to chat_template.json", ""),
        ("qwen", "", "the tokenizer of the family 'qwen'"),
        ("kimi_k2", "tiktoken.model", "it has no tokenizer.json"),
    ],
)
def test_a_model_without_text_is_refused_before_a_download(
    tmp_path: Path, hub: Hub, family: str, lost: str, why: str
) -> None:
    folder = kimi(tmp_path / "model", family)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != lost}
    if lost == "to chat_template.json":
        template = files.pop("chat_template.jinja").decode()
        files["chat_template.json"] = json.dumps({"chat_template": template}).encode()
    hub.models["o/kimi"] = Model(files | {"model.safetensors": b"x" * 100})
    if why:
        with pytest.raises(ModelError, match=why):
            hub_client.look_up("o/kimi", "main")
    else:
        found = {file.path for file in hub_client.look_up("o/kimi", "main").files}
        assert "tiktoken.model" in found
        assert "tokenization_kimi.py" not in found
    assert "model.safetensors" not in hub.models["o/kimi"].sent


def without_weights(config: Mapping[str, Any], **settings: str) -> dict[str, bytes]:
    """The files of a model, and weights that nothing reads."""
    files = {"config.json": config, "tokenizer.json": {}, "tokenizer_config.json": settings}
    return {name: json.dumps(text).encode() for name, text in files.items()} | {"model.safetensors": b"x"}


@pytest.mark.parametrize(
    ("changes", "refused"),
    [({}, True), ({"chat_template": "x"}, False), ({"chat_template_type": "deepseek_v32"}, False)],
)
@pytest.mark.parametrize("remote", [True, False])
def test_a_model_that_writes_chats_in_python_is_refused_before_its_weights_come(
    tmp_path: Path, hub: Hub, changes: dict[str, str], refused: bool, remote: bool
) -> None:
    files = without_weights({**PUBLISHED["deepseek-v3.1-4bit"], "model_type": "deepseek_v41"}, **changes)
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    hub.models["o/deepseek"] = Model(files)
    why = "deepseek_v41 writes its chats with Python code .* use a conversion that has chat_template"
    with pytest.raises(ModelError, match=why) if refused else contextlib.nullcontext():
        inspect.inspect("o/deepseek" if remote else str(folder), ask_hub=remote)
    assert "model.safetensors" not in hub.models["o/deepseek"].sent


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        ({"quant_method": "exl2", "bits": 4.25}, "exl2"),
        ({"producer": {}, "quantization": {"quant_algo": "NVFP4"}}, "modelopt"),
    ],
)
def test_a_quantization_that_cannot_be_read_is_refused_before_the_weights_come(
    hub: Hub, content: dict[str, Any], words: str
) -> None:
    config = PUBLISHED["llama-3.1-8b-bf16"]
    if words == "modelopt":
        files = without_weights(config) | {"hf_quant_config.json": json.dumps(content).encode()}
    else:
        files = without_weights({**config, "quantization_config": content})
    hub.models["o/llama"] = Model(files)
    with pytest.raises(ModelError, match=words):
        inspect.inspect("o/llama", ask_hub=True)
    with pytest.raises(ModelError, match=words):
        read_shape(inspect.find_config("o/llama"))
    assert "model.safetensors" not in hub.models["o/llama"].sent


def test_a_configuration_that_the_library_refuses_is_not_needed_for_text(tmp_path: Path) -> None:
    """Llama 4's, as it is published."""
    folder = shutil.copytree(embedded_model_path(), tmp_path / "model")
    expected = LocalRenderer.load(folder)
    config = {"model_type": "llama4_text", "attn_temperature_tuning": 4}
    (folder / "config.json").write_text(json.dumps(config))
    found = LocalRenderer.load(folder)
    assert found.facts == expected.facts
    assert found.encode("two words", special=True) == expected.encode("two words", special=True)


JINJA = "jinja{% for m in messages %}{{ m.content }}{% endfor %}"


def deepseek(folder: Path, template: str | None = None, **settings: object) -> Path:
    save(byte_level(), folder, template)
    found = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(found | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "family", "begins"),
    [
        ({"chat_template_type": "deepseek_v32", "template": JINJA}, "llama", "<｜begin▁of▁sentence｜>"),
        ({}, "deepseek_v32", "<｜begin▁of▁sentence｜>"),
        ({"template": JINJA}, "deepseek_v32", "jinja"),
    ],
)
def test_deepseek_chats_by_the_template_of_mlx_lm(
    tmp_path: Path, settings: dict[str, Any], family: str, begins: str
) -> None:
    folder = deepseek(tmp_path, **settings)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    text = Text(LocalRenderer.load(folder))
    assert text.has_chat_template
    for thinking, end in ((True, "<think>"), (False, "</think>")):
        options = {"enable_thinking": thinking, "thinking": thinking}
        ids = chat_ids(text, [{"role": "user", "content": "hello"}], template_options=options)
        assert text.decoded(ids).startswith(begins)
        assert begins == "jinja" or text.decoded(ids).endswith(f"<｜User｜>hello<｜Assistant｜>{end}")


def test_a_template_module_gets_tools_and_calls_as_text_and_refuses_what_it_cannot_write(
    tmp_path: Path,
) -> None:
    text = Text(LocalRenderer.load(deepseek(tmp_path, chat_template_type="deepseek_v32")))
    turns = (
        ChatMessage("user", "Rain?"),
        ChatMessage("assistant", "", calls=(Call("7", "weather", '{"city": "Oslo"}'),)),
        ChatMessage("tool", "wet", call_id="7", name="weather"),
    )
    prompt = text.rendered(Conversation(turns, tools=(Tool("weather", "Tells it.", {"type": "object"}),)))
    assert '"description": "Tells it."' in prompt
    assert '"name": "weather", "arguments": {"city": "Oslo"}' in prompt
    assert "<tool_response>\nwet\n</tool_response>" in prompt
    with pytest.raises(RequestError, match="refuses these messages"):
        chat_ids(text, [{"role": "pope", "content": "x"}])


@pytest.mark.parametrize("name", ["muse_spark", "missing", "../utils", "__init__", "os.path", ""])
def test_other_names_are_no_template_module(name: str) -> None:
    assert template_module(name) is None


def test_a_template_module_lives_with_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "chat_templates"
    folder.mkdir()
    (folder / "own.py").write_text("def apply_chat_template(messages):\n    return __name__\n")
    package = importlib.util.spec_from_file_location("mlx_lm", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: package)
    render = template_module("own")
    assert render([]) == render.__module__ == "mlxtp_chat_template_own"


def test_a_template_module_brings_no_mlx() -> None:
    code = (
        "import sys\nfrom mlxtp.text.renderer import template_module\n"
        "assert template_module('deepseek_v32')([{'role': 'user', 'content': 'x'}])\n"
        "sys.exit(bool({name.split('.')[0] for name in sys.modules} & {'mlx', 'mlx_lm'}))"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def large(path: Path, size: int) -> None:
    """A file of so many bytes, none of which is on the disk."""
    with path.open("wb") as file:
        file.truncate(size)


def test_a_file_that_is_larger_than_models_need_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    large(path, MAX_CONFIG_BYTES)
    assert len(text_of(path, MAX_CONFIG_BYTES)) == MAX_CONFIG_BYTES
    large(path, MAX_CONFIG_BYTES + 1)
    with pytest.raises(ValueError, match="file has more than 8 MiB"):
        text_of(path, MAX_CONFIG_BYTES)


def test_nor_in_the_places_where_models_are_looked_at(tmp_path: Path) -> None:
    large(tmp_path / "config.json", MAX_TEXT_BYTES + 1)
    for read in (inspect.read_config, loader.read_config):
        with pytest.raises(ModelError, match=r"config\.json has more than 8 MiB"):
            read(tmp_path)
    assert row_bytes(tmp_path) == 0
    assert len(fingerprint(tmp_path)) == 64
    for name in ("tokenizer.json", "model.safetensors.index.json"):
        large(tmp_path / name, MAX_TEXT_BYTES + 1)
    with pytest.raises(ModelError, match=r"tokenizer\.json has more than 64 MiB"):
        tokenizer_json(tmp_path)
    assert token_count(tmp_path) == 0
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert lacks(tmp_path).startswith("files that can be read (model.safetensors.index.json has more")
    (tmp_path / "tokenizer.json").unlink()
    large(tmp_path / "tiktoken.model", MAX_TEXT_BYTES + 1)
    assert token_count(tmp_path) == 0


def weights(path: Path, tensors: Mapping[str, tuple[str, list[int]]], more: int = 0) -> None:
    """Write the header of a file of weights, which claims `more` bytes than it has, and no weights."""
    table = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [0, 0]}
        for name, (kind, shape) in tensors.items()
    }
    text = json.dumps({"__metadata__": {"format": "mlx"}, **table}).encode()
    path.write_bytes((len(text) + more).to_bytes(8, "little") + text)


def packed(name: str, bits: int) -> dict[str, tuple[str, list[int]]]:
    """The tensors of 64 * 128 weights in groups of 32."""
    few = ("BF16", [64, 4])
    return {f"{name}.weight": ("U32", [64, 4 * bits]), f"{name}.scales": few, f"{name}.biases": few}


def test_parameters_are_counted_by_the_headers_of_weights(tmp_path: Path) -> None:
    def count(config: Mapping[str, Any], *files: Mapping[str, tuple[str, list[int]]], more: int = 0) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        for i, tensors in enumerate(files):
            weights(tmp_path / f"model-{i}.safetensors", tensors, more)
        parameters_in.cache_clear()
        return read_card(StoredModelInfo("x", tmp_path, 0, 0)).parameters

    plain: dict[str, tuple[str, list[int]]] = {
        "a.weight": ("BF16", [100, 50]),
        "a.bias": ("F32", [8]),
        "n": ("F8_E4M3", []),
    }
    assert count({}, plain) == "5.0K"
    told = {
        "quantization": {"bits": 4, "group_size": 32, "b": {"bits": 8, "group_size": 32}, "lm_head": False}
    }
    assert count(told, packed("a", 4), packed("b", 8) | {"norm.biases": ("F16", [200])}) == "16.6K"
    unknown = (
        ({}, packed("a", 4), 0), ({"quantization": {"bits": 0}}, packed("a", 4), 0),
        ({"quantization_config": {"quant_method": "awq"}}, {"a.qweight": ("I32", [9, 9])}, 0),
        ({}, {"a": ("F16", [2] * 9)}, 0), ({}, {"a": ("F16", [1 << 48])}, 0), ({}, plain, 1 << 40),
    )  # fmt: skip
    for config, tensors, more in unknown:
        assert count(config, tensors, {}, more=more) == "", (config, tensors)
    (tmp_path / "model-0.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    assert count({}) == ""


def test_headers_are_read_once_until_a_folder_changes(tmp_path: Path) -> None:
    stored = StoredModelInfo("x", tmp_path, 0, 0)
    (tmp_path / "config.json").write_text("{}")
    weights(tmp_path / "model.safetensors", {"a": ("F16", [7])})
    assert read_card(stored).parameters == "7"
    hits = parameters_in.cache_info().hits
    assert read_card(stored).parameters == "7"
    assert parameters_in.cache_info().hits == hits + 1
    weights(tmp_path / "model.safetensors", {"ab": ("F16", [8])})
    assert read_card(stored).parameters == "8"
    index = {"metadata": {"total_parameters": 9}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_card(stored).parameters == "9"
    assert read_card(StoredModelInfo("tiny", embedded_model_path(), 0, 0)).parameters == "951.4K"


def test_a_file_of_more_values_than_models_need_is_not_read(tmp_path: Path) -> None:
    """Its reader would keep all threads from running for seconds."""
    for name in ("model.safetensors.index.json", "config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text('{"weight_map": {}, "x": [' + "{}," * MAX_FEW_VALUES + "{}, {}]}")
    few = f"json has {MAX_FEW_VALUES + 2:,} values; the most that mlxtp reads is {MAX_FEW_VALUES:,}"
    for read in (indexed, tokenizer_settings, config_in):
        with pytest.raises(ValueError, match=few):
            read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=few):
        has_mtp_head(tmp_path, {"model_type": "qwen3_next", "num_nextn_predict_layers": 1})
    assert read_card(StoredModelInfo("x", tmp_path, 0, 0)).parameters == ""
