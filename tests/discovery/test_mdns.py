"""Discovery in a network that is made up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from mlxtp.discovery import addresses as peer_cache
from mlxtp.discovery import mdns
from mlxtp.discovery.addresses import SERVICE, Advert, DiscoveredPeer
from mlxtp.discovery.mdns import Discovery

from ..live_cluster import WAIT_S

ADVERT = Advert("a" * 32, "", "Anna's Mac", 52414, False, 1)
OTHER = Advert("b" * 32, "", "Ben's Mac", 52415, False, 1)
HERE = {"10.0.0.1": 2}


@dataclasses.dataclass
class Info:
    """Records of a service."""

    service: str
    properties: Mapping[bytes, bytes | None] = dataclasses.field(default_factory=dict)
    addresses: list[bytes] = dataclasses.field(default_factory=list)
    port: int = 0


class World:
    """All that a discovery touches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: Mapping[str, int] = HERE
        self.sending_fails: OSError | None = None
        self.networks: list[Network] = []
        self.records: dict[str, Info] = {}
        self.name_is_settled = asyncio.Event()
        self.name_is_settled.set()
        self.asked: list[str] = []
        self.answers: dict[str, asyncio.Event] = {}
        self.changes: list[tuple[DiscoveredPeer, ...]] = []
        self.said: list[str] = []
        monkeypatch.setattr(mdns, "Network", self.network)
        monkeypatch.setattr(mdns, "info_of", Info)
        monkeypatch.setattr(mdns, "send_something", self.send)
        for name, value in {"REFRESH_S": 0.01, "RETRY_LOOK_S": 0.01, "FIRST_REST_S": 0.01}.items():
            monkeypatch.setattr(mdns, name, value)
        self.discovery = Discovery(
            self.changes.append, self.said.append, read_addresses=lambda: self.addresses
        )

    def network(
        self, addresses: Mapping[str, int], wanted: Sequence[str], heard: Callable[[str, bool], None]
    ) -> Network:
        self.networks.append(Network(self, addresses, wanted, heard))
        return self.networks[-1]

    def send(self, addresses: Mapping[str, int]) -> None:
        if self.sending_fails is not None:
            raise self.sending_fails

    def publish(self, advert: Advert, address: bytes = b"\x0a\x00\x00\x02", service: str = "") -> str:
        """Has its records on the network, and its name heard."""
        service = service or advert.service()
        properties = {key.encode(): value.encode() for key, value in advert.properties().items()}
        self.records[service] = Info(service, properties, [address], advert.port)
        self.hear(service)
        return service

    def hear(self, service: str) -> None:
        self.networks[-1].names += 1
        self.networks[-1].heard(service, True)


class Network:
    """In place of `mdns.Network`."""

    def __init__(
        self,
        world: World,
        addresses: Mapping[str, int],
        wanted: Sequence[str],
        heard: Callable[[str, bool], None],
    ) -> None:
        self.world, self.addresses, self.wanted, self.heard = world, addresses, wanted, heard
        self.advert: Advert | None = None
        self.service = ""
        self.names = 0
        self.asked_at = 0.0
        self.times_asked = 0
        self.closed = ""

    async def ask(self) -> None:
        self.times_asked += 1
        self.asked_at = asyncio.get_running_loop().time()

    async def announce(self, advert: Advert) -> None:
        await self.world.name_is_settled.wait()
        self.advert, self.service = advert, advert.service()

    async def move(self, addresses: Mapping[str, int], wanted: Sequence[str]) -> None:
        self.addresses, self.wanted = addresses, wanted

    async def close(self, *, goodbye: bool) -> None:
        self.closed = "with goodbye" if goodbye else "without a word"

    def knows(self, info: Info) -> bool:
        if info.service not in self.world.records:
            return False
        found = self.world.records[info.service]
        info.properties, info.addresses, info.port = found.properties, found.addresses, found.port
        return True

    async def resolve(self, info: Info) -> bool:
        self.world.asked.append(info.service)
        await self.world.answers.setdefault(info.service, asyncio.Event()).wait()
        return self.knows(info)


async def eventually(condition: Callable[[], Any], what: str) -> None:
    """Fails with TimeoutError, saying `what` in its traceback, if that never is so."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - many things are waited for
            await asyncio.sleep(0.002)


Story = Callable[[World], Awaitable[None]]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[[Story], World]:
    """Runs a story with a discovery that was started, closes it, and gives what came of it."""

    def run(story: Story) -> World:
        async def main() -> World:
            world = World(monkeypatch)
            await world.discovery.start(ADVERT)
            await eventually(lambda: world.networks or world.said, "it begins")
            await story(world)
            await world.discovery.close()
            return world

        return asyncio.run(main())

    return run


Tell = Callable[[Story], World]


def test_it_listens_announces_and_says_goodbye(tell: Tell) -> None:
    async def story(world: World) -> None:
        await eventually(lambda: world.networks[0].advert == ADVERT, "announced")
        joined = dataclasses.replace(ADVERT, cluster_id="c" * 16)
        world.discovery.update(joined)
        await eventually(lambda: world.networks[0].advert == joined, "announced again")
        world.publish(OTHER)
        await eventually(lambda: world.changes, "told")
        world.networks[0].heard(OTHER.service(), False)
        await eventually(lambda: len(world.changes) == 2, "told")

    world = tell(story)
    assert [[each.addresses for each in change] for change in world.changes] == [[("10.0.0.2:52415",)], []]
    [network] = world.networks
    assert network.closed == "with goodbye"
    assert world.said == []


def test_where_the_network_is_out_of_reach_it_says_why_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> World:
        world = World(monkeypatch)
        world.sending_fails = OSError(65, "No route to host")
        await world.discovery.start(ADVERT)
        await eventually(lambda: world.said, "said")
        assert world.networks == []
        assert "Local Network Privacy" in world.discovery.problem
        world.sending_fails = None
        await eventually(lambda: world.networks, "open")
        await eventually(lambda: not world.discovery.problem, "well")
        await world.discovery.close()
        return world

    world = asyncio.run(main())
    assert len(world.said) == 2
    assert "Local Network Privacy" in world.said[0]
    assert "again" in world.said[1]


def test_a_network_that_breaks_is_left_and_found_again(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        monkeypatch.setattr(mdns, "ASK_AGAIN_S", 0.0)
        world.sending_fails = OSError(101, "Network is unreachable")
        await eventually(lambda: world.said, "said")
        world.sending_fails = None
        await eventually(lambda: len(world.networks) == 2, "open again")

    world = tell(story)
    assert "Network is unreachable" in world.said[0]
    assert world.networks[0].closed == "with goodbye"


def test_other_addresses_put_everything_in_doubt(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_cache, "CONFIRM_S", 1e6)

    async def story(world: World) -> None:
        await eventually(lambda: world.networks[0].service, "announced")
        service = world.publish(OTHER)
        await eventually(lambda: world.changes, "told")
        world.networks[0].advert = None
        del world.records[service]
        world.addresses = {**HERE, "10.0.1.1": 3}
        world.discovery.refresh()
        await eventually(lambda: world.asked, "asked")
        await eventually(lambda: world.networks[0].advert, "announced once more")

    world = tell(story)
    assert world.networks[0].addresses == {**HERE, "10.0.1.1": 3}
    assert world.networks[0].times_asked == 2
    assert world.asked == [OTHER.service()]
    assert len(world.networks) == 1


def test_another_default_route_moves_it(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "announcing_addresses", lambda usable: wanted)
    wanted = ["10.0.0.1"]

    async def story(world: World) -> None:
        nonlocal wanted
        await eventually(lambda: world.networks[0].advert, "announced")
        wanted = ["10.0.1.1"]
        await eventually(lambda: world.networks[0].times_asked == 2, "asked")

    assert tell(story).networks[0].wanted == ["10.0.1.1"]


@pytest.mark.parametrize(
    ("only", "there", "used"),
    [
        ((), {"10.0.0.1": 2, "127.0.0.1": 1, "127.0.0.2": 1}, ["10.0.0.1"]),
        (("127.0.0.1",), {"10.0.0.1": 2, "127.0.0.1": 1}, ["127.0.0.1"]),
        (("10.0.0.9", "10.0.0.1"), {"10.0.0.1": 2, "10.0.0.3": 2}, ["10.0.0.1"]),
        (("10.0.0.9",), {"10.0.0.1": 2}, None),
        ((), {"127.0.0.1": 1}, None),
    ],
)
def test_which_addresses_are_used(
    monkeypatch: pytest.MonkeyPatch, only: tuple[str, ...], there: dict[str, int], used: list[str] | None
) -> None:
    async def main() -> World:
        world = World(monkeypatch)
        world.addresses = there
        await world.discovery.start(ADVERT, only)
        await eventually(lambda: world.networks or world.said, "it begins")
        await world.discovery.close()
        return world

    world = asyncio.run(main())
    if used is None:
        assert world.networks == []
        assert f"that is up has {'10.0.0.9' if only else 'an IPv4 address'}" in world.said[0]
    else:
        assert list(world.networks[0].addresses) == used


def test_a_flood_is_left_alone_for_ever_longer(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "MAX_REST_S", 0.03)

    async def story(world: World) -> None:
        world.publish(OTHER)
        await eventually(lambda: world.changes, "told")
        for flood in range(1, 4):
            # It leaves even while its own name is not settled yet.
            world.name_is_settled.clear()
            await eventually(lambda flood=flood: len(world.networks) == flood, "open")  # type: ignore[misc]
            for number in range(2000):
                world.hear(f"false {number}.{SERVICE}")
            # Until it has left, more of the kind may come.
            while not world.networks[-1].closed:
                world.hear(f"false.{SERVICE}")
                await asyncio.sleep(0)
            world.name_is_settled.set()
        await eventually(lambda: len(world.networks) == 4, "open")
        await eventually(lambda: world.said[-1].endswith("again"), "well")
        # After some peace the next flood is the first.
        monkeypatch.setattr(mdns, "ASK_AGAIN_S", 0.0)
        await eventually(lambda: world.networks[-1].times_asked > 1, "asked")
        for number in range(mdns.MAX_NAMES):
            world.hear(f"false {number}.{SERVICE}")
        await eventually(lambda: world.networks[-1].closed, "left")

    world = tell(story)
    floods = [sentence for sentence in world.said if "floods this network" in sentence]
    rests = [sentence.split("paused for ")[1].split(" s.")[0] for sentence in floods]
    assert rests == ["0.01", "0.02", "0.03", "0.01"]
    assert [network.closed for network in world.networks[:3]] == ["without a word"] * 3
    # What was believed before still is.
    assert OTHER.node_id in {sighting.node_id for sighting in world.changes[-1]}


def test_changes_are_told_at_most_every_so_often(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "CHANGE_S", 0.05)
    begun = []

    async def story(world: World) -> None:
        begun.append(asyncio.get_running_loop().time())
        for port in range(1, 200):
            world.publish(dataclasses.replace(OTHER, port=port))
            await asyncio.sleep(0)
        await eventually(lambda: world.changes and "10.0.0.2:199" in world.changes[-1][0].addresses, "told")
        begun.append(asyncio.get_running_loop().time())

    world = tell(story)
    assert len(world.changes) <= (begun[1] - begun[0]) / 0.05 + 1


def test_so_many_are_asked_at_once_and_the_silent_again(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"node {number}.{SERVICE}" for number in range(12)]

    async def story(world: World) -> None:
        await eventually(lambda: world.networks[0].service, "announced")
        monkeypatch.setattr(mdns, "RETRY_LOOK_S", 1e6)
        for name in names:
            world.hear(name)
        await eventually(lambda: len(world.asked) == mdns.RESOLVE_AT_ONCE, "asked")
        world.answers[world.asked[0]].set()
        await eventually(lambda: len(world.asked) == mdns.RESOLVE_AT_ONCE + 1, "asked")
        assert len(set(world.asked)) == len(world.asked), "who did not answer has to wait"
        monkeypatch.setattr(mdns, "RETRY_LOOK_S", 0.01)
        for name in names:
            world.answers.setdefault(name, asyncio.Event()).set()
        await eventually(lambda: set(world.asked) == set(names), "asked")
        await eventually(lambda: len(world.asked) > len(names), "asked again")

    assert tell(story).changes == []


def test_a_copy_is_told_once_when_our_own_name_is_known(tell: Tell) -> None:
    async def story(world: World) -> None:
        await eventually(lambda: world.networks[0].service, "announced")
        # This is our own announcement, which comes back to us.
        world.publish(ADVERT, b"\x0a\x00\x00\x01")
        copy = f"Anna's Mac [aaaaaaaa]-2.{SERVICE}"
        world.networks[0].service = ""
        world.publish(ADVERT, service=copy)
        world.publish(OTHER)
        await eventually(lambda: world.changes, "told")
        assert world.said == []
        world.networks[0].service = ADVERT.service()
        await eventually(lambda: world.said, "said")
        world.publish(ADVERT, service=copy)
        world.publish(dataclasses.replace(OTHER, port=1))
        await eventually(lambda: len(world.changes) == 2, "told")

    world = tell(story)
    assert len(world.said) == 1
    assert "at 10.0.0.2:52414 announces the id of this node" in world.said[0]
    assert all(sighting.node_id == OTHER.node_id for change in world.changes for sighting in change)


def test_a_bug_of_ours_is_not_hidden(tell: Tell, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        def fail() -> Mapping[str, int]:
            raise ZeroDivisionError

        world.discovery._read_addresses = fail
        world.discovery.refresh()
        await eventually(lambda: caplog.records, "logged")

    tell(story)
    assert "discovery failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
