"""Free memory of this machine. Agents plan with it; ranks measure it while they load."""

from __future__ import annotations

import re
import subprocess
import sys

_VM_STAT = "/usr/bin/vm_stat"
_VM_STAT_S = 5.0
_LONGEST = 20_000  #: Characters of `vm_stat` that are read; it prints about 1,000.
_PAGE_SIZE = re.compile(r"page size of (\d{1,9}) bytes", re.ASCII)
_PAGES = re.compile(r"^([A-Z][\w -]{1,40}):[ \t]{0,60}(\d{1,15})", re.ASCII | re.MULTILINE)


def parse_vm_stat(text: str) -> tuple[int, int] | None:
    """Return the free and the wired bytes in macOS's `vm_stat`; None if it lacks one of the counts.

    Free, file-backed (with read-ahead: XNU, `vm_page_speculate`) and purgeable pages are free. Inactive ones
    are not counted: after a download half of the file cache is active, and half of programs' memory inactive.
    """
    size = _PAGE_SIZE.search(text[:1000])
    pages = {name: int(count) for name, count in _PAGES.findall(text[:_LONGEST])}
    try:
        free = sum(pages[name] for name in ("Pages free", "File-backed pages", "Pages purgeable"))
        return (free * int(size[1]), pages["Pages wired down"] * int(size[1])) if size else None
    except KeyError:
        return None


def free_bytes(system: str = sys.platform) -> int:
    """Return the bytes that programs can get without swapping. Blocks for some milliseconds.

    On macOS psutil counts programs' inactive pages as free and files' active pages as used. So its count is
    used only on other systems, or if `vm_stat` fails.
    """
    import psutil

    if system == "darwin":
        try:
            # Without close_fds a large process starts another without copying itself.
            said = subprocess.run(
                (_VM_STAT,), check=True, stdout=subprocess.PIPE, timeout=_VM_STAT_S, close_fds=False
            ).stdout
            if (found := parse_vm_stat(said.decode(errors="replace"))) is not None:
                return found[0]
        except (OSError, subprocess.SubprocessError):
            pass
    return int(psutil.virtual_memory().available)
