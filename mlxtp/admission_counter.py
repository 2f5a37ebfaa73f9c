"""Counter of what is open at one time, in all and of each source. Pure: its callers accept and refuse."""

from __future__ import annotations

from collections import Counter


class AdmissionCounter:
    """Admits at most `most` at one time, and of these at most `most_of_one` of one source."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._open: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Number of those that are open, of all sources."""
        return self._open.total()

    def of(self, source: str) -> int:
        """Return the number of those that are open of one source."""
        return self._open[source]

    def admit(self, source: str, *, exempt: bool = False) -> str:
        """Count one more, or return why it is refused; an empty text admits it.

        `exempt`: only the bound of all sources applies.
        """
        if not exempt and self._open[source] >= self._most_of_one:
            return "too many from one address"
        if self.total >= self._most:
            return "too many"
        self._open[source] += 1
        return ""

    def release(self, source: str) -> None:
        """Count one less of a source. Call it once for each that was admitted."""
        self._open[source] -= 1
        if not self._open[source]:
            del self._open[source]  # a source that is gone takes no memory
