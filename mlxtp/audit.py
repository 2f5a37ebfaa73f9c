"""Audit events: who was let in or out, and what was loaded, by whom.

Each is a record of one logger, so the ordinary log has it too. `logs.AuditLog` writes the file. Keys, tokens
and clients' text never belong in an event.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)


def record(
    event: str, words: str, about: Mapping[str, object], *, foreign: bool = False, logged: bool = False
) -> None:
    """Record an event, in words and as the fields `about`; its field `by` is the author.

    `foreign`: strangers can cause any number of these, so the file gets only some per minute. `logged`: the
    ordinary log has a line about it already.
    """
    extra = {"foreign": foreign, "fields": {"event": event, **about}}
    if not logged:
        log.info("%s", words, extra=extra)
        return
    line = log.makeRecord(log.name, logging.INFO, "", 0, "%s", (words,), None, extra=extra)
    for handler in log.handlers:
        handler.handle(line)
