"""Places of connections: silent ones give way to newcomers, those of this Mac and of keys are kept."""

from __future__ import annotations

from itertools import count

import pytest

from mlxtp.api.guard import address_of, source_of
from mlxtp.api.server import RESERVED, Place, Places

MOST, OF_ONE = 2048, 1536


class Crowd:
    def __init__(self) -> None:
        self.places = Places(MOST, OF_ONE, MOST + 512, OF_ONE + 128)
        self.closed: list[Place] = []
        self._numbers = count()

    def come(self, address: str = "", *, known: bool = False) -> Place | None:
        number = next(self._numbers)
        made: list[Place] = []
        address = address or f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        place = self.places.enter(address, lambda: self.closed.append(made[0]))
        if place is not None:
            made.append(place)
            if known and not place.refusal:
                self.places.admit(place)
        return place


@pytest.mark.parametrize("addresses", [["192.168.1.5", "192.168.1.6"], ["2001:db8::1", "2001:db8:0:1::1"]])
def test_silent_connections_close_each_other_and_nobody_else(addresses: list[str]) -> None:
    crowd = Crowd()
    working = crowd.come("192.168.1.9", known=True)
    silent = [crowd.come(address) for address in addresses * 1700]
    assert crowd.closed == silent[: len(crowd.closed)]
    for address in ("127.0.0.1", "::1", "192.168.1.7"):
        place = crowd.come(address)
        assert place is not None
        assert place.refusal == ""
    assert working not in crowd.closed
    assert len(silent) - len(crowd.closed) <= MOST // 2


def test_of_full_places_some_are_for_this_mac_and_some_for_keys() -> None:
    crowd = Crowd()
    known = [crowd.come(known=True) for _ in range(MOST)]
    served = [each for each in known if each is not None and not each.refusal]
    assert len(served) == MOST - RESERVED
    here = [crowd.come("127.0.0.1", known=True) for _ in range(RESERVED)]
    assert all(each is not None and not each.refusal for each in here)
    assert not set(served) & set(crowd.closed)
    crowd.places.rest(served[0])  # between two requests it is given up for a newcomer
    crowd.come("127.0.0.1")
    assert crowd.closed[-1] is served[0]


def test_a_key_leaves_places_for_others_from_any_number_of_addresses() -> None:
    crowd = Crowd()

    def admitted(key: str, address: str = "") -> Place | None:
        place = crowd.come(address)
        assert place is not None
        if place.refusal or crowd.places.admit(place, key):
            crowd.places.release(place)
            return None
        assert crowd.places.admit(place, key) == ""  # its next request
        return place

    taken = [place for _ in range(MOST) if (place := admitted("one")) is not None]
    assert len(taken) == (MOST - RESERVED) * 7 // 8
    second = [place for _ in range(MOST) if (place := admitted("two")) is not None]
    assert 100 < len(second) < MOST - len(taken)
    assert admitted("three") is not None
    assert admitted("one", "127.0.0.1") is not None
    assert crowd.places.admit(second[0], "four") == ""  # a proxy's, for another client
    assert crowd.places._of_key["two"] == len(second) - 1
    assert not {*taken, *second} & {*crowd.closed}
    for place in (*taken, *second):
        crowd.places.release(place)
    assert dict(crowd.places._of_key) == {"three": 1}


def test_a_connection_from_elsewhere_closes_none_of_this_mac() -> None:
    crowd = Crowd()
    here = [crowd.come("127.0.0.1") for _ in range(MOST // 2)]
    for _ in range(MOST):
        crowd.come()
    assert not set(here) & set(crowd.closed)


def test_places_come_back_once() -> None:
    crowd = Crowd()
    places = [crowd.come(known=each % 2 == 0) for each in range(500)] + [crowd.come("127.0.0.1")]
    for each in places * 2:
        assert each is not None
        crowd.places.admit(each)
        crowd.places.rest(each)
        crowd.places.release(each)
    assert crowd.places._open.total == crowd.places._local == 0
    assert not any(crowd.places._weak.values())


def test_ipv6_counts_by_64() -> None:
    assert source_of("2001:db8::1")[0] == source_of("2001:db8::ffff:2")[0] != source_of("2001:db8:0:1::1")[0]
    assert source_of(address_of(("::ffff:127.0.0.9", 5))) == ("127.0.0.9", True)
