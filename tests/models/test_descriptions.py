"""Descriptions that are made once, by a process with limits."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from mlxtp.description import to_text
from mlxtp.errors import Code, ModelError
from mlxtp.models import descriptions
from mlxtp.models.descriptions import description_of, folder

from ..engine.small_models import CONFIG
from ..placement.made_up_models import llama

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlxtp" / "descriptions"


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.json"))


def test_a_model_is_described_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = description_of(CONFIG)
    assert (first.family, len(first.layers)) == (CONFIG["model_type"], CONFIG["num_hidden_layers"])
    assert len(files(cache)) == 1
    monkeypatch.setattr(descriptions, "_said_of", lambda _text: pytest.fail("again"))
    assert description_of(dict(reversed(CONFIG.items()))) == first


def test_a_description_is_the_same_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(CONFIG)
    said = descriptions._said_of(text)
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")
    assert descriptions._said_of(text) == said


def test_what_changes_a_description_makes_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def said(text: str) -> str:
        asked.append(json.loads(text))
        return to_text(llama())

    monkeypatch.setattr(descriptions, "_said_of", said)
    description_of(CONFIG)
    description_of({**CONFIG, "num_hidden_layers": 1})
    monkeypatch.setattr(descriptions, "_made_by", lambda: "other code")
    description_of(CONFIG)
    assert len(asked) == len(files(cache)) == 3
    for garbage in ("", "{", '{"format": 0}'):
        for file in files(cache):
            file.write_text(garbage)
        assert description_of(CONFIG) == llama()
    assert len(asked) == 6
    monkeypatch.setattr(descriptions, "MOST_KEPT", 3)
    description_of({**CONFIG, "num_hidden_layers": 7})
    assert len(files(cache)) == 3, "the oldest are dropped"


def test_without_room_it_is_made_each_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("no folder")
    monkeypatch.setattr(descriptions, "_said_of", lambda _text: to_text(llama()))
    with caplog.at_level(logging.WARNING):
        assert description_of(CONFIG) == llama()
    assert "the description of a model is not kept" in caplog.text


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"hidden_size": None}, Code.MODEL_INVALID, "config.json lacks hidden_size"),
        ({"model_type": "no_such"}, Code.MODEL_UNSUPPORTED, "mlx-lm has no model family 'no_such'"),
        ({"text_config": 3}, Code.MODEL_INVALID, "text_config is 3, not an object"),
        ({"quantization": {"mode": "turbo"}}, Code.MODEL_UNSUPPORTED, "the mode 'turbo'"),
    ],
)
def test_a_refusal_is_in_the_engines_words(
    cache: Path, changes: dict[str, Any], code: Code, says: str
) -> None:
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    with pytest.raises(ModelError, match=says) as refused:
        description_of(config)
    assert refused.value.code is code
    assert not files(cache)


@pytest.mark.parametrize(
    ("limit", "most", "says"),
    [
        ("MOST_CPU_S", 0.1, r"takes more than 0\.1 s"),
        ("MOST_S", 0.1, r"takes more than 0\.1 s"),
        ("MOST_BYTES", 1 << 20, "GiB of memory"),
    ],
)
def test_a_model_that_takes_too_much_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: float, says: str
) -> None:
    monkeypatch.setattr(descriptions, limit, most)
    monkeypatch.setattr(descriptions, "TICK_S", 0.05)
    with pytest.raises(ModelError, match=says):
        description_of(CONFIG)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("kill -9 $$", "ended with status -9"),
        ("echo nonsense", "the process that describes the model failed"),
        ("echo Traceback >&2; exit 1", "ended with status 1"),
        ('[ -z "$HF_TOKEN" ] && [ -n "$PATH" ] && echo "mlxtp: no secrets" >&2; exit 1', "no secrets"),
    ],
)
def test_a_process_that_fails_is_no_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(descriptions.sys, "executable", str(program))
    with pytest.raises(ModelError, match=says):
        description_of(CONFIG)


def test_a_process_that_never_ends_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, began = tmp_path / "python", time.monotonic()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(descriptions.sys, "executable", str(program))
    monkeypatch.setattr(descriptions, "MOST_S", 0.3)
    with pytest.raises(ModelError, match=r"takes more than 0\.3 s"):
        description_of(CONFIG)
    assert time.monotonic() - began < 300, "its end was waited for"


def test_the_cache_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(descriptions.sys, "platform", "darwin")
    assert folder() == Path.home() / "Library/Caches/mlxtp/descriptions"
    monkeypatch.setattr(descriptions.sys, "platform", "linux")
    assert folder() == Path.home() / ".cache/mlxtp/descriptions"
