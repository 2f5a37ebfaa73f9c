"""A member that lies: what it says may cost its link, and ends no agent, now or after a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from mlxtp.admin.snapshot import gather, page, status
from mlxtp.cluster import state_file
from mlxtp.models.inspect import ModelSource
from mlxtp.wire.codecs import Message

from ..wire.members import Member
from . import mutated
from .one_node import A, B, FakeLink, Node, play


class Lied:
    """A node that leads or follows the liar, an honest member, and a liar that comes back after each cut."""

    def __init__(self, node: Node, weights: ModelSource, *, leads: bool) -> None:
        self.node, self.came = node, 1
        self.liar, self.honest = node.meet(A), node.meet(B)
        node.lead(weights)
        if not leads:
            node.follow(self.liar, 1000)

    def hears(self, messages: Iterable[Message]) -> None:
        for count, message in enumerate(messages):
            if not self.linked(self.liar):
                self.came += 1
                self.liar = self.node.meet(A, f"boot {self.came}")
            self.node.hear(self.liar, message)
            self.node.live_once(self.honest, *([self.liar] if self.linked(self.liar) else []))
            if count % 16 == 0:
                self.shows()

    def linked(self, link: FakeLink) -> bool:
        return link in self.node.parts.node.links.links()

    def shows(self) -> None:
        """What its user and its clients see; and the honest member is still there."""
        now = gather(self.node.parts)
        status(now), page(now, None)
        self.node.parts.gateway.health()
        assert self.linked(self.honest)


@pytest.mark.parametrize(("leads", "messages"), [
    pytest.param(True, lambda own: mutated.each_field(own), marks=pytest.mark.slow),
    pytest.param(False, lambda own: mutated.each_field(own), marks=pytest.mark.slow),
    (True, lambda own: mutated.at_random(1, 1000, own)),
    (False, lambda own: mutated.at_random(2, 1000, own)),
    *(pytest.param(bool(n % 2), lambda own, n=n: mutated.at_random(n, 10_000, own), marks=pytest.mark.chaos) for n in range(3, 23)),
])
def test_no_message_ends_an_agent_nor_an_honest_link(
    tmp_path: Path, member: Member, weights: ModelSource, leads: bool, messages, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def story(node: Node) -> None:
        lied = Lied(node, weights, leads=leads)
        lied.hears(messages(node.parts.node.node_id))
        lied.shows()
        kept = state_file.SavedState(node.parts.node.leadership.persistent_state(), {})
        assert state_file.from_text(state_file.to_text(kept)) == kept, "it can be read after a restart"

    play(tmp_path, member, story)
    assert [each.getMessage() for each in caplog.records if each.exc_info] == [], "no handler and no step failed"
