"""`python -m benchmarks.one_lane_worker <arguments of mlxtp.engine.worker>`: a rank without lanes.

All rows of its pipeline step together, so that each stage waits while the others compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxtp.engine import scheduler, worker
from mlxtp.engine.sequence import Lanes, SequenceState


class OneLane(Lanes):
    """Lanes that are one, of any number of stages."""

    def __init__(self, running: Sequence[SequenceState], count: int) -> None:
        del count
        super().__init__(running, 1)


def main() -> None:
    assert scheduler.Lanes is Lanes
    vars(scheduler)["Lanes"] = OneLane
    worker.main()


if __name__ == "__main__":
    main()
