"""The table by which agents decode, for every decoder that published models have, and for others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders

from mlxtp.errors import ModelError
from mlxtp.text.renderer import LocalRenderer, RendererFacts
from mlxtp.text.token_bytes import MOST_TOKENS, Detokenizer, TokenBytes, bytes_of
from mlxtp.text.tokenizer import Text

from ..api.conftest import byte_fallback, byte_level, save

VISIBLE, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
TEXT = "hello wide 日 本 😀,  world.\n"
DECODERS = {
    "Gemma": decoders.Sequence([VISIBLE, BYTES, FUSE]),
    "Llama 2": decoders.Sequence([VISIBLE, BYTES, FUSE, decoders.Strip(" ", 1, 0)]),
    "nested": decoders.Sequence([decoders.Sequence([VISIBLE, BYTES]), FUSE]),
    "its own space": decoders.Sequence([decoders.Replace("▁", "_"), BYTES, FUSE]),
    "a pattern for each token": decoders.Sequence([decoders.Replace(Regex("▁"), " "), BYTES, FUSE]),
    "T5": decoders.Metaspace(),
    "Metaspace without a first space": decoders.Metaspace(prepend_scheme="never"),
    "BERT": decoders.WordPiece(),
    "none": None,
}


def decoded(tokenizer: Tokenizer, text: str) -> tuple[str, str]:
    """The text of its tokens by the table, and by the library."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    found = Detokenizer(bytes_of(tokenizer, ids), special)
    return found.push(ids), tokenizer.decode(ids)


@pytest.mark.parametrize("name", DECODERS)
def test_a_published_decoder_is_a_table(name: str) -> None:
    tokenizer = byte_fallback()
    tokenizer.decoder = DECODERS[name]
    assert len({*decoded(tokenizer, TEXT)}) == 1


def test_bytes_in_a_sequence_are_bytes() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), FUSE])
    assert decoded(tokenizer, TEXT) == (TEXT, TEXT)


def test_a_text_that_depends_on_neighbours_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence([VISIBLE, BYTES, FUSE, decoders.Replace(Regex("[a-z]+"), "x")])
    renderer = LocalRenderer.load(save(tokenizer, tmp_path))
    with pytest.raises(
        ModelError, match=r"\(Replace, ByteFallback, Fuse, Replace\) writes a token in another"
    ):
        Text(renderer)


def test_a_decoder_that_takes_seconds_for_a_token_is_refused_at_once(tmp_path: Path) -> None:
    tokenizer = byte_level()
    long, slow = (
        decoders.Replace(Regex(r"[\s\S]+"), "a" * 250 + "xd"),
        decoders.Replace(Regex("a*a*a*d"), ""),
    )
    tokenizer.decoder = decoders.Sequence([long, slow])
    with pytest.raises(ModelError, match=r"decoder takes \d+\.\d s for one token; 0\.25 s are the most"):
        Text(LocalRenderer.load(save(tokenizer, tmp_path)))


def test_an_id_beyond_all_vocabularies_is_refused(tmp_path: Path) -> None:
    path = save(byte_level(), tmp_path) / "tokenizer.json"
    found = json.loads(path.read_text())
    found["model"]["vocab"]["zz"] = MOST_TOKENS
    path.write_text(json.dumps(found))
    with pytest.raises(ModelError, match=f"has a token {MOST_TOKENS}; the largest id"):
        Text(LocalRenderer.load(tmp_path))


def test_facts_come_whole_through_the_socket(tmp_path: Path) -> None:
    facts = LocalRenderer.load(save(byte_level(), tmp_path, "{{ '\\ud800' }}")).facts
    found = RendererFacts.unpacked(facts.packed())
    assert found.tokens == facts.tokens
    assert (found.template, found.markers, found.eos) == (facts.template, facts.markers, facts.eos)
    assert [*map(tuple, found.added)] == facts.added


def test_ids_out_of_the_table_have_no_text() -> None:
    table = bytes_of(byte_level(), ())
    assert table.joined((-1, len(table.starts) - 1, 1 << 40)) == b""
    assert table.joined((len(table.starts) - 2,))
    assert TokenBytes(table.starts, b"", strip=False).text(range(9)) == ""  # a damaged one
