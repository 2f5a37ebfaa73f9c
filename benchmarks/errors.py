"""The error that ends one benchmark, and not the others."""

from __future__ import annotations


class Unmeasured(Exception):
    """A case could not be measured; the message says why, and the other cases go on."""
