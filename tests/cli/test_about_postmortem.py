"""`mlxtp doctor --postmortem`, as a user types it, over files as agents write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlxtp.cli.main import app
from mlxtp.diagnostics.failure_store import FOLDER, FailedEpoch, RankEnd, keep
from mlxtp.errors import Code, GroupError, exit_status

from ..diagnostics.test_failure_store import memory

KEY = bytes(range(32))
HOST = FailedEpoch(7, "studio", GroupError("step 14: rank 1 [mini] differs", Code.DESYNC), ("studio", "mini"))
HOSTED = FailedEpoch(7, "mini", GroupError("its host knows why"))


def rank(number: int, digests: Sequence[int], key: bytes = KEY, **fields: Any) -> RankEnd:
    """A rank that finished a step with each of these digests and began another."""
    known = {"pid": 1, "status": exit_status(Code.DESYNC), "ended_at": monotonic(), "key": key}
    return RankEnd(number, memory=memory(*digests, rows=2, fed=5), **known | fields)


OURS, THEIRS = range(1, 31), [*range(1, 14), 99, *range(15, 31)]


def mlxtp(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, args)], env={"COLUMNS": "240"})


def shown(*args: str | Path) -> str:
    result = mlxtp("--postmortem", *args)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*args: str | Path) -> str:
    result = mlxtp(*args)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


def test_the_newest_failure_of_one_machine(tmp_path: Path) -> None:
    keep(tmp_path, replace(HOST, epoch=6), [rank(0, OURS), rank(1, OURS)])
    stood = 'Fatal\n  File "kv.py", line 1 in [view]\n'
    ours = rank(0, OURS)
    ends = [replace(ours, memory=ours.memory + stood.encode()), rank(1, THEIRS, status=-9)]
    keep(tmp_path, HOST, ends)
    text = shown("--home", tmp_path)
    first, cause, difference, *rest = text.splitlines()
    assert first.startswith("epoch 7 failed at 2")
    assert first.endswith("step 14: rank 1 [mini] differs")
    assert cause.startswith("likely cause: killed from outside. rank 1 was ended by signal 9")
    assert difference.startswith("ranks differ first at step 14, in digest: rank 0 ")
    ranks, steps = rest[0:3], [line for line in rest if "step ×2" in line]
    assert ranks[1].split()[:2] == ["0", "studio"]
    assert f"status {exit_status(Code.DESYNC)} (ranks_disagree)" in ranks[1]
    assert "by signal 9" in ranks[2]
    assert [int(line.split()[0]) for line in steps] == list(range(8, 20)), "those around the difference"
    assert "epoch 6" not in text
    assert "there is no file here" not in text
    assert f"rank 0 stood at\n{stood}" in text
    [found] = json.loads(shown("--home", tmp_path, "--json"))["failures"]
    assert (found["epoch"], found["cause"]["kind"], found["cause"]["rank"]) == (7, "killed from outside", 1)
    assert (found["difference"]["seq"], found["difference"]["what"]) == (14, "digest")
    assert [len(each["steps"]) for each in found["ranks"]] == [31, 31]


def test_without_a_difference_the_last_steps_are_shown(tmp_path: Path) -> None:
    keep(tmp_path, HOST, [rank(0, OURS), rank(1, OURS[:-1])])
    text = shown("--home", tmp_path)
    assert "ranks agree in every step" in text
    assert "rank 1 is behind" in text
    steps = [line for line in text.splitlines() if "step ×2" in line]
    assert [int(line.split()[0]) for line in steps] == list(range(20, 32))
    assert steps[-1].split()[1:] == ["step", "×2", "begun,", "not", "finished", "–"]


def test_files_of_two_macs_make_one_table(tmp_path: Path) -> None:
    here = keep(tmp_path / "a", HOST, [rank(0, OURS)])
    alone = shown(here)
    assert "of rank 1 there is no file here: look on mini" in alone
    there = keep(tmp_path / "b", HOSTED, [rank(1, THEIRS, status=143, asked_at=monotonic())])
    hosted = shown(there)
    assert "of rank 0 there is no file here: look on the Mac that ran it" in hosted
    assert "likely cause: peer lost" in hosted
    for folders in ([here, there], [there, here]):
        text = shown(*folders)
        assert text.count("epoch 7 failed") == 1
        assert "ranks differ first at step 14" in text
        assert "likely cause: desync" in text
        assert "no file here" not in text
    together = tmp_path / "together"
    for folder in (there, here):  # the epoch.json of the host stays
        shutil.copytree(folder, together, dirs_exist_ok=True)
    assert "likely cause: desync" in shown(together)
    another = keep(tmp_path / "c", HOSTED, [rank(1, THEIRS, key=b"another")])
    assert shown(here, another).count("epoch 7 failed") == 2, "epochs of one number are not mixed"


def test_a_rank_that_was_never_told_the_key_belongs_to_its_epoch(tmp_path: Path) -> None:
    one = keep(tmp_path / "a", HOST, [rank(0, OURS)])
    another = keep(tmp_path / "b", HOSTED, [RankEnd(1)])
    for folders in ([one, another], [another, one]):
        text = shown(*folders)
        assert text.count("epoch 7 failed") == 1
        assert "never started" in text


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "rank", "epoch": 7, "epoch_id": "x"}', "\xff", '{"epoch": "x"}']
)
def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(text.encode("latin-1"))
    assert str(path) in refusal("--postmortem", tmp_path)
    assert str(path) in refusal("--postmortem", path)
    assert "has no files of a failure" in refusal("--postmortem", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no files of a failure" in refusal("--postmortem", tmp_path / "empty")
    assert f"no failure is kept in {tmp_path / FOLDER}" in refusal("--postmortem", "--home", tmp_path)
    assert "mlxtp doctor --postmortem FOLDER" in refusal("--home", tmp_path, tmp_path)
