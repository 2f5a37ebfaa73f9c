"""The codes and exit statuses in `docs/doctor.md` are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxtp.errors import TERMINATED_STATUS, WEDGED_STATUS, Code, code_of_exit, exit_status

PAGE = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text()
TEXT = PAGE.partition("\n## Errors\n")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("|")
]


def test_every_code_is_explained_in_the_order_of_its_status() -> None:
    entries = re.findall(r"^- ((?:`\w+`, )*`\w+`): \S", TEXT, re.MULTILINE)
    assert ", ".join(entries) == ", ".join(f"`{code}`" for code in Code)


def test_no_status_means_two_things() -> None:
    statuses = [0, TERMINATED_STATUS, WEDGED_STATUS, *map(exit_status, Code)]
    assert len(set(statuses)) == len(statuses)
    assert max(statuses) < 256
    assert {str(WEDGED_STATUS), str(TERMINATED_STATUS)} <= {row[0] for row in ROWS}
    assert [code_of_exit(status) for status in (TERMINATED_STATUS, WEDGED_STATUS)] == [None, None]


@pytest.mark.parametrize(
    ("statuses", "codes"),
    [
        ("64 – 68, 81", [Code.CONFIG, Code.MODEL_UNSUPPORTED, Code.MISMATCH]),
        ("82 – 89", [Code.FRAME_OVERSIZE, Code.NOT_AUTHENTIC]),
        ("94", [Code.FORWARD_FAILED]),
        ("96", [Code.DESYNC]),
        ("90, 97", [Code.LINK_LOST, Code.RANK_LOST]),
        ("99", [Code.OUT_OF_MEMORY]),
    ],
)
def test_the_statuses_by_their_meaning(statuses: str, codes: list[Code]) -> None:
    (row,) = [row for row in ROWS if row[0] == statuses]
    assert [int(number) for number in re.findall(r"\d+", row[0])] == [exit_status(code) for code in codes]
