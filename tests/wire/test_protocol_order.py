"""The table itself: what it says of each link, and that messages that cross do not part the two ends."""

from __future__ import annotations

import pytest

from mlxtp.wire.messages import (
    Accepted,
    Ack,
    Cancel,
    Delta,
    Finished,
    Generate,
    Message,
    Prefilled,
    ScoredDelta,
)
from mlxtp.wire.protocol import TERMINAL, LinkKind, LinkState, RequestFailed, Side, table

from .walk import path_to

VOICE: set[type[Message]] = {Accepted, Prefilled, Delta, ScoredDelta, Finished, RequestFailed}
EVERYWHERE = [(link, state) for link in LinkKind for state in LinkState if state in table(link)]


def senders(link: LinkKind, message: type[Message]) -> set[Side]:
    return {side for moves in table(link).values() for side in Side if message in moves[side]}


def test_only_rank_0_has_a_voice() -> None:
    for message in VOICE:
        assert senders(LinkKind.PIPE_LEADER, message) == {Side.LOWER}
        assert not senders(LinkKind.PIPE, message)
        assert not senders(LinkKind.DECODE, message)
    for message in (Generate, Cancel):
        assert senders(LinkKind.PIPE_LEADER, message) == {Side.UPPER}
        assert not senders(LinkKind.PIPE, message)
        assert not senders(LinkKind.DECODE, message)


@pytest.mark.parametrize(("link", "state"), EVERYWHERE)
def test_every_state_is_reached_and_can_end(link: LinkKind, state: LinkState) -> None:
    path_to(link, state)
    assert state in TERMINAL or any(table(link)[state].values())


@pytest.mark.parametrize(("link", "state"), EVERYWHERE)
def test_messages_that_cross_lead_both_ends_to_the_same_state(link: LinkKind, state: LinkState) -> None:
    moves = table(link)
    for command, commanded in moves[state][Side.UPPER].items():
        for answer, answered in moves[state][Side.LOWER].items():
            if link is LinkKind.DECODE and answer is Ack and commanded is not state:
                continue  # the ledger forbids a command while an Ack may be on its way
            # An end that has spoken its last word discards what was on its way; the other one hears it.
            if answered not in TERMINAL:
                assert command in moves[answered][Side.UPPER], (command, answer)
            if commanded not in TERMINAL:
                assert answer in moves[commanded][Side.LOWER], (command, answer)
            if not {answered, commanded} & TERMINAL:
                assert moves[answered][Side.UPPER][command] is moves[commanded][Side.LOWER][answer]
