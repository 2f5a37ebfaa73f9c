"""The table of faults: what one row of it reaches, and that every row can be seen and mended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mlxtp.diagnostics.rows import FAULTS, ROWS

from ..changed_package import run_changed

ROOT = Path(__file__).parents[2]
ADDED = (
    "placement/faults.py",
    "OF_PORTS: tuple",
    '    Fault("melting", "cables", WARNING, lambda at: at.port.hub, "{at.name} melts", "cool", "", True),',
)
SCRIPT = f"""
import sys
from pathlib import Path
sys.path.insert(2, {str(ROOT)!r})
from mlxtp.diagnostics.rows import examine
from mlxtp.placement.faults import notes_of, preflight
from mlxtp.placement.topology import Topology
from scripts.reference import doctor_page
from tests.diagnostics.recorded import Machine, facts
from tests.placement.made_up_macs import cabled, mac, node_id
from tests.placement.recorded_macs import MINI

macs = cabled([mac(0), mac(1)], [(0, 1)], hub=True)
print(preflight(0, macs[0].machine, (("", "rdma_en2"), ("rdma_en2", ""))))
print(*[each for each in notes_of(macs[0].machine) if "melts" in each])
print(Topology(macs).no_rdma(node_id(0), node_id(1)))
rows = examine(facts(Path("/nowhere"), Machine("mac_well", MINI)))
print(*[finding.what for each in rows for finding in each.findings if finding.id == "melting"])
print(*[line for line in doctor_page().splitlines() if "`melting`" in line])
"""


@pytest.mark.slow
def test_one_line_of_the_table_is_a_fault_everywhere(tmp_path: Path) -> None:
    preflight, note, plan, doctor, page = run_changed(tmp_path, SCRIPT, ADDED)
    assert preflight == note == "Thunderbolt 1 (en2) melts. To do: cool"
    assert plan == "a: Thunderbolt 1 (en2) melts"
    assert doctor == "Thunderbolt 2 (en3) melts"
    assert page == "- `melting`, warning **×**: ⟨name⟩ melts → cool"


def test_each_fault_has_an_id_of_its_own_a_remedy_and_a_row_that_is_there() -> None:
    assert [name for name, count in Counter(fault.id for fault in FAULTS).items() if count > 1] == []
    assert {fault.row for fault in FAULTS} - {row.id for row in ROWS} == {""}
    assert [fault.id for fault in FAULTS if not (fault.what and fault.fix)] == []
