from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxtp.config import embedded_model_path
from mlxtp.errors import Code, ModelError, RequestError
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Detokenizer, Text

from ...reference import chat_ids
from ..conftest import BYTE_FALLBACK, BYTE_LEVEL, KINDS, METASPACE, Loaded, byte_level, save

HALF = "\ufffd"
TINY = embedded_model_path()
quick = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

words = st.sampled_from(
    [
        " ",
        "  ",
        "hello",
        " wide",
        "world",
        "\n",
        "日本語",
        "é",
        "e\u0301",
        "😀",
        "👩‍👩‍👧",
        "🇩🇪",
        "\u2028",
        "½",
        "x",
        ".",
    ]
)
texts = st.lists(words | st.text(max_size=3), max_size=12).map("".join).filter(lambda text: HALF not in text)
cuts = st.lists(st.integers(1, 5), max_size=60)


def push_all(detokenizer: Detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Return the result of each push, the ids given in pieces of `sizes` and then one by one."""
    said, at = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        said.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*said, detokenizer.finish()]


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


def test_tokens_made_of_bytes_take_the_exact_and_linear_way(loaded: dict[str, Loaded]) -> None:
    names = {kind: type(loaded[kind].text.detokenizer()).__name__ for kind in KINDS}
    assert names == {
        BYTE_LEVEL: "_ByteDetokenizer",
        BYTE_FALLBACK: "_ByteDetokenizer",
        METASPACE: "_LibraryDetokenizer",
    }


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
    with pytest.raises(RequestError, match="the first word is the user's") as caught:
        chat_ids(loaded[BYTE_LEVEL].text, [{"role": "assistant", "content": "I"}])
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
    with pytest.raises(ModelError):
        Text(LocalRenderer.load(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_the_http_side_computes_nothing_and_starts_quickly(loaded: dict[str, Loaded]) -> None:
    code = (
        "import sys; import mlxtp.text.renderer\n"
        "assert not {'asyncio', 'pydantic_core', 'psutil'} & set(sys.modules)\n"
        "import mlxtp.api.app, mlxtp.api.server\n"
        "assert 'transformers' not in sys.modules and 'tokenizers' not in sys.modules\n"
        "from pathlib import Path; from mlxtp.text.tokenizer import Text\n"
        "Text.load(Path(sys.argv[1])).encoded('x', special=True)\n"
        "assert not {name.split('.')[0] for name in sys.modules} & {'mlx', 'mlx_lm', 'torch'}\n"
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
