from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from mlxtp.config import embedded_model_path
from mlxtp.errors import Code, ModelError, RequestError
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Detokenizer, Text

from ..api.conftest import BYTE_FALLBACK, BYTE_LEVEL, KINDS, Loaded, byte_level, save
from ..reference import chat_ids

HALF = "\ufffd"
TINY = embedded_model_path()
quick = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

words = st.sampled_from(
    [*" \n\u2028½éx.😀", "  ", "hello", " wide", "world", "日本語", "e\u0301", "👩‍👩‍👧", "🇩🇪"]
)
texts = st.lists(words | st.text(max_size=3), max_size=12).map("".join).filter(lambda text: HALF not in text)
cuts = st.lists(st.integers(1, 5), max_size=60)


def push_all(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Return the result of each push, the ids given in pieces of `sizes` and then one by one."""
    said, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        said.append(detokenizer.push(ids[at : at + size]))
        at += size
    return said


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(text=texts, sizes=cuts)
def test_any_split_of_the_tokens_gives_the_same_whole_characters(
    loaded: dict[str, Loaded], kind: str, text: str, sizes: list[int]
) -> None:
    tokenizer = loaded[kind].tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    said = push_all(loaded[kind].text.detokenizer(), ids, sizes)
    assert "".join(said) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any(HALF in piece for piece in said)


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(text=texts, data=st.data())
def test_an_answer_cut_anywhere_is_a_clean_beginning(
    loaded: dict[str, Loaded], kind: str, text: str, data: st.DataObject
) -> None:
    tokenizer = loaded[kind].tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    cut = ids[: data.draw(st.integers(0, len(ids)))]
    said = "".join(push_all(loaded[kind].text.detokenizer(), cut, []))
    assert whole.startswith(said)
    assert HALF not in said


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(data=st.data(), sizes=cuts)
def test_random_tokens_never_raise(
    loaded: dict[str, Loaded], kind: str, data: st.DataObject, sizes: list[int]
) -> None:
    known = loaded[kind].tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, known + 100), max_size=80))
    together = push_all(loaded[kind].text.detokenizer(), ids, sizes)
    assert "".join(push_all(loaded[kind].text.detokenizer(), ids, [])) == "".join(together)


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_is_not_held_back_for_ever(loaded: dict[str, Loaded], kind: str) -> None:
    name = "<0x80>" if kind != BYTE_LEVEL else "Ģ"  # a byte no character begins with
    token = loaded[kind].tokenizer.token_to_id(name)
    detokenizer = loaded[kind].text.detokenizer()
    assert HALF in "".join(detokenizer.push([token]) for _ in range(200))


def test_the_first_space_is_the_tokenizers_the_others_are_the_models(loaded: dict[str, Loaded]) -> None:
    ids = [loaded[BYTE_FALLBACK].tokenizer.token_to_id(name) for name in ("▁hello", "▁", "▁world")]
    detokenizer = loaded[BYTE_FALLBACK].text.detokenizer()
    assert [detokenizer.push([i]) for i in ids] == ["hello", " ", " world"]


def test_special_and_skipped_tokens_have_no_text(loaded: dict[str, Loaded]) -> None:
    for kind in KINDS:
        tokenizer = loaded[kind].tokenizer
        special = tokenizer.token_to_id("<|user|>")
        a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
        assert "".join(push_all(loaded[kind].text.detokenizer(skip=[b]), [a, special, b, a], [])) == "aa"


def test_the_prompt_has_one_bos_and_ends_where_the_answer_begins(loaded: dict[str, Loaded]) -> None:
    tokenizer = loaded[BYTE_LEVEL].tokenizer
    ids = chat_ids(
        loaded[BYTE_LEVEL].text, [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|system|>be<|user|>hello<|assistant|>"
    assert ids.count(tokenizer.token_to_id("<s>")) == 1
    assert ids[-1] == tokenizer.token_to_id("<|assistant|>")


def test_what_the_template_refuses_is_the_clients_mistake(loaded: dict[str, Loaded]) -> None:
    with pytest.raises(RequestError, match="no mood is known") as caught:
        chat_ids(loaded[BYTE_LEVEL].text, [{"role": "user", "content": "I"}], template_options={"mood": 1})
    assert caught.value.status == 400


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    text = Text(LocalRenderer.load(save(byte_level(), tmp_path, template=None)))
    with pytest.raises(RequestError, match="no chat template") as caught:
        chat_ids(text, [{"role": "user", "content": "hello"}])
    assert caught.value.code == Code.NOT_SUPPORTED


def test_a_folder_that_is_no_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a folder"):
        Text(LocalRenderer.load(tmp_path / "missing"))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Text(LocalRenderer.load(tmp_path))
    for broken in ("{", "{}", "[]", '{"model": 1, "added_tokens": []}'):
        folder = save(byte_level(), tmp_path / "broken")
        (folder / "tokenizer.json").write_text(broken)
        with pytest.raises(ModelError, match="cannot be read"):
            Text(LocalRenderer.load(folder))


def test_a_models_own_code_is_never_run(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["own.Own", "own.Own"]}
    config["tokenizer_class"] = "Own"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Text(LocalRenderer.load(folder)).encoded("hello", special=False)
    assert not (tmp_path / "ran").exists()
    config["added_tokens_decoder"] = {"1": {"content": "hello"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"'hello' token .* instead of 1, and Python code of its own is not run"
    ):
        LocalRenderer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError):
        LocalRenderer.load(folder)
    assert not (tmp_path / "ran").exists()


def change(folder: Path, name: str, **fields: object) -> None:
    """Set fields of a JSON file; one that becomes None is left out. A file that is not there is begun."""
    path = folder / name
    found = json.loads(path.read_text()) if path.is_file() else {}
    found.update(fields)
    path.write_text(json.dumps({field: value for field, value in found.items() if value is not None}))


SPLIT = "a1b22c333 HELLO world １２ é  x\n\ny don't"


def in_its_own_way(folder: Path) -> Path:
    """Have tokenizer.json split and normalize text as no class of the library does."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    words = pre_tokenizers.Split(Regex(r"\s+|\w|\W+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, tokenizer.pre_tokenizer])
    return save(tokenizer, folder)


CLASSES = (
    *("Qwen2Tokenizer", "GPT2Tokenizer", "LlamaTokenizer", "GemmaTokenizerFast", "MistralCommonBackend"),
    *("Own", 5, None),
)
OWN = ({"AutoTokenizer": ["own.Own", None]}, {"AutoTokenizer": "own.Own"}, ["own.Own", None])


@pytest.mark.parametrize("family", ["qwen2", "llama", "brand_new", None])
@pytest.mark.parametrize(
    "settings_",
    [
        *({"tokenizer_class": name} for name in CLASSES),
        *({"auto_map": named, "tokenizer_class": "Own"} for named in OWN),
    ],
    ids=str,
)
def test_a_tokenizer_json_counts_alone(
    tmp_path: Path, settings_: dict[str, object], family: str | None
) -> None:
    folder = in_its_own_way(tmp_path)
    wanted = Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(folder, "tokenizer_config.json", **settings_)
    change(folder, "config.json", model_type=family, auto_map={"AutoConfig": "own.Config"}, hidden_size=1.5)
    text = Text(LocalRenderer.load(folder))
    assert list(text.encoded(SPLIT, special=False)) == wanted.encode(SPLIT, add_special_tokens=False).ids
    assert (text.eos, text.has_chat_template) == ((wanted.token_to_id("</s>"),), True)


FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize("end", ["<|user|>", {"content": "<|user|>", **FLAGS}], ids=["text", "object"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_may_stand_beside(tmp_path: Path, file: str, end: object) -> None:
    folder = save(byte_level(), tmp_path)
    if file == "special_tokens_map.json":
        (folder / "tokenizer_config.json").unlink()
    change(folder, file, eos_token=end, bos_token="<s>")
    text = Text(LocalRenderer.load(folder))
    assert text.eos == (byte_level().token_to_id("<|user|>"),)


def named(name: str, text: str) -> dict[str, str]:
    return {"name": name, "template": text}


#: Files of a model with chat templates, and what is written for a message, with tools too.
def configured(template: object) -> dict[str, object]:
    return {"tokenizer_config.json": {"chat_template": template}}


def processed(template: object) -> dict[str, object]:
    return {"chat_template.json": {"chat_template": template}}


WITH_TOOLS = [named("default", "C"), named("tool_use", "T")]
IN_A_FOLDER = {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "T"}
#: Files of a model with chat templates, and what is written for a message, with tools too.
TEMPLATES: dict[str, tuple[dict[str, object], str, str]] = {
    "a processor's": (processed("N"), "N", "N"),
    "several of a processor": (processed([named("default", "N")]), "N", "N"),
    "of three files": ({"chat_template.jinja": "J"} | processed("N") | configured("C"), "J", "J"),
    "of two": (processed("N") | configured("C"), "C", "C"),
    "with one for tools": (configured(WITH_TOOLS), "C", "T"),
    "with one for tools in a folder": (dict[str, object](IN_A_FOLDER), "J", "T"),
    "for tools alone": (configured([named("tool_use", "T")]), "T", "T"),
    "empty, beside": (configured("") | processed("N"), "N", "N"),
}


def with_templates(folder: Path, files: dict[str, object]) -> Path:
    save(byte_level(), folder, template=None)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            change(folder, name, **content)
        else:
            (folder / name).write_text(str(content))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_is_found_in_any_of_its_files(tmp_path: Path, name: str) -> None:
    files, written, with_tools = TEMPLATES[name]
    renderer = LocalRenderer.load(with_templates(tmp_path, files))
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    said = [{"role": "user", "content": "x"}]
    assert renderer.render(said, [], {}, prompting=True) == written
    assert renderer.render(said, [tool], {}, prompting=True) == with_tools
    assert renderer.facts.renders
    assert {*renderer.facts.template.split()} == {written, with_tools}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"chat_template.json": "{"}, r"chat_template\.json is no JSON"),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config\.json is no JSON"),
        (processed(5), "the chat template is no text"),
        (configured([named("default", "C"), 3]), "cannot be read"),
        *(
            ({name: POINTER}, f"{name} is a pointer of Git LFS")
            for name in (*TOKENIZERS, "chat_template.jinja")
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, files: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        LocalRenderer.load(with_templates(tmp_path, files))


def test_a_template_that_is_no_jinja_is_the_models_fault(tmp_path: Path) -> None:
    text = Text(LocalRenderer.load(save(byte_level(), tmp_path, template="{% for %}")))
    with pytest.raises(
        RequestError, match="the template is not valid Jinja: Expected an expression"
    ) as caught:
        chat_ids(text, [{"role": "user", "content": "hello"}])
    assert (caught.value.code, caught.value.status) == (Code.MODEL_INVALID, 422)


@pytest.mark.slow
def test_the_http_side_computes_nothing_and_starts_quickly(loaded: dict[str, Loaded]) -> None:
    code = (
        "import sys; import mlxtp.text.renderer\n"
        "assert not {'asyncio', 'pydantic_core', 'psutil'} & set(sys.modules)\n"
        "import mlxtp.api.app, mlxtp.api.server\n"
        "assert 'transformers' not in sys.modules and 'tokenizers' not in sys.modules\n"
        "from pathlib import Path; from mlxtp.text.tokenizer import Text\n"
        "text = Text.load(Path(sys.argv[1]))\n"
        "ids = text.encoded('x', special=True)\n"
        "assert text.detokenizer().push(ids) == 'x' == text.name(ids[-1])[0]\n"
        "assert not {name.split('.')[0] for name in sys.modules} & {'mlx', 'mlx_lm', 'torch', 'tokenizers'}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(loaded[BYTE_LEVEL].folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_embedded_model_speaks() -> None:
    text = Text(LocalRenderer.load(TINY))
    ids = chat_ids(text, [{"role": "user", "content": "Hello 😀"}])
    assert "".join(push_all(text.detokenizer(), list(ids), [])).removeprefix(" ") == "Hello 😀"
