"""What may go wrong in a benchmark without ending the others."""

from __future__ import annotations


class Unmeasured(Exception):
    """A case could not be measured; the message says why, and the other cases go on."""
