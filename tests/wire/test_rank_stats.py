"""A figure of a rank is told once: heartbeats, status and metrics read it off that."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..changed_package import run_changed

LAST = "weight_bytes: int = _figure("
SHOWN = """
from mlxtp.admin.metrics import _ranks
from mlxtp.wire.frames import MAX_FRAME, Decoder, encode
from mlxtp.wire.messages import Pong
from mlxtp.wire.rank_stats import RankStats, shown

decoder = Decoder()
decoder.limit = MAX_FRAME
decoder.feed(encode(Pong("idle", 0.0, 0, 0, "", RankStats(warmth_us=2_500_000)), 1, 1))
pong = decoder.next_frame().message
print(shown(pong.stats)["warmth_us"])
print([repr(each) for each in _ranks({0: pong}) if "warmth" in repr(each)])
"""


@pytest.mark.slow
def test_a_new_figure_is_one_field_up_to_status_and_metrics(tmp_path: Path) -> None:
    field = '    warmth_us: int = _figure("warmth_seconds", "Warmth of a rank.")'
    shown, metric = run_changed(tmp_path, SHOWN, ("wire/rank_stats.py", LAST, field))
    assert shown == "2500000"
    assert "mlxtp_rank_warmth_seconds" in metric
    assert "2.5" in metric
