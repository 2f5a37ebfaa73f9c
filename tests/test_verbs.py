"""Verbs of `/admin` as they travel: read from a body, written as one, their options parsed."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from mlxtp.client import AgentClient
from mlxtp.errors import ConfigError, RequestError, UserError
from mlxtp.verbs import VERBS, HandOver, LetIn, Serve, StartDrain, Status, Verb


@pytest.mark.parametrize(
    "verb", [Status(), LetIn("mini"), Serve("tiny", only=True, split="3,1"), HandOver("a", sure=True)]
)
def test_a_body_is_read_as_the_verb_that_wrote_it(verb: Verb) -> None:
    assert type(verb).read(verb.body()) == verb
    assert VERBS[verb.path] is type(verb)
    assert HandOver("mini", move=True).body() == {"node": "mini", "move": True}


def test_an_empty_text_is_left_out_unless_it_must_be_given() -> None:
    assert Serve.read({"model": "", "nodes": "", "only": "", "unknown": 1}) == Serve("")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "node: a string is expected"),
        ({"node": None}, "node: a string is expected"),
        ({"node": "a", "move": "maybe"}, "move: 'maybe' is neither true nor false"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        HandOver.read(body)
    assert (refused.value.detail, refused.value.param) == (words, words.partition(":")[0])


def test_options_are_parsed_that_are_given() -> None:
    assert Serve("tiny").parsed() == {}
    given = Serve("tiny", nodes="02", replicas="all", on="any", keep="10m").parsed()
    assert given == {"nodes": "2", "replicas": 0, "on": (), "keep": 600}
    with pytest.raises(ConfigError, match="--within: 'soon'"):
        StartDrain("soon").parsed()
    with pytest.raises(ConfigError, match="--split 3,1 is for 2 Macs, and 3 are to share the model"):
        Serve("tiny", nodes="3", split="3,1").parsed()


def test_a_command_waits_for_a_reply_as_its_verb_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def connect(_url: str, _certificate: str, timeout_s: float) -> None:
        waited.append(timeout_s)
        raise OSError

    monkeypatch.setattr("mlxtp.client.connection_to", connect)
    (tmp_path / "agent.json").write_text('{"url": "http://here", "key": "k", "certificate": ""}')
    for client, verb in product((AgentClient(tmp_path), AgentClient(tmp_path, 1.0)), (Status(), Serve("m"))):
        with pytest.raises(UserError, match="does not answer"):
            client.send(verb)
    assert waited == [15, 60, 1, 1]
