"""Free memory of this machine, which agents plan with and ranks measure at a load."""

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
    """Return the free and the wired bytes by macOS's `vm_stat`; None if it lacks one of the counts.

    Free is what holds nothing, what holds files (with read-ahead pages: XNU, `vm_page_speculate`), and what
    programs may lose. Inactive pages are not: after a download half of the file cache is active, and half of
    what programs hold is inactive.
    """
    size = _PAGE_SIZE.search(text[:1000])
    pages = {name: int(count) for name, count in _PAGES.findall(text[:_LONGEST])}
    try:
        free = sum(pages[name] for name in ("Pages free", "File-backed pages", "Pages purgeable"))
        return (free * int(size[1]), pages["Pages wired down"] * int(size[1])) if size else None
    except KeyError:
        return None


def free_bytes(system: str = sys.platform) -> int:
    """Return the bytes that programs can get now without swapping. Blocks for some milliseconds.

    As psutil counts it, except on macOS, where psutil takes inactive pages of programs for free, and active
    ones of files for used. There it does so only if `vm_stat` cannot run.
    """
    import psutil

    if system == "darwin":
        try:
            # Without close_fds a process of any size starts another one without a copy of itself.
            said = subprocess.run(
                (_VM_STAT,), check=True, stdout=subprocess.PIPE, timeout=_VM_STAT_S, close_fds=False
            ).stdout
            if (found := parse_vm_stat(said.decode(errors="replace"))) is not None:
                return found[0]
        except (OSError, subprocess.SubprocessError):
            pass
    return int(psutil.virtual_memory().available)
