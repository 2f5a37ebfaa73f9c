"""Three Macs and a model that two can share: any Mac's endpoint, who waits, and who comes and goes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from ..hosts import Hosts, requires_namespaces
from ..live_cluster import SLOWNESS
from .agents import Agent, on_hosts, serving, wait

pytestmark = [requires_namespaces, pytest.mark.chaos]

#: A chunk for each token: how many come together would depend on times.
ONE_EACH = ("--speculation", "off")
ENDLESS = {"ignore_eos": True, "max_tokens": 3800}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Agent, Agent, Agent]]:
    """The embedded model has 4 KV heads: of three Macs two serve. The coordinator is the first."""
    folder = tmp_path_factory.mktemp("three")
    with Hosts(3) as net:
        a, b, c = on_hosts(folder, net, "anna", "ben", "cleo")
        a.start(*ONE_EACH)
        b.start("--join", a.first_token(), *ONE_EACH)
        serving(a, b)
        c.start("--join", b.token(), *ONE_EACH)  # which asks Anna for it
        serving(a, b, c, ranks=2)
        yield a, b, c


#: The event of a stream that has nothing else to send, and the fields of its progress in the first chunk.
IDLE = rb'data: [^\n]*"delta":{},"logprobs":null,"finish_reason":null}\][^\n]*\n\n'
PROGRESS = rb',"state":"[^"]*"|,"prompt_progress":{[^}]*}'


def same(answer: bytes) -> bytes:
    """A streamed answer without its id and times, and without the progress that a slow machine adds."""
    return re.sub(rb'"id":"[^"]*"|"created":\d+|%b' % PROGRESS, b"", re.sub(IDLE, b"", answer))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"temperature": 1.0, "seed": 7, "max_tokens": 40, "ignore_eos": True},
        {"logprobs": True, "top_logprobs": 3},
        {"stop": ["-77"]},
        pytest.param({"response_format": {"type": "json_object"}, "max_tokens": 40}, marks=pytest.mark.chaos),
    ],
    ids=["greedy", "usage", "sampled", "logprobs", "stop", "grammar"],
)
def test_any_endpoint_gives_the_coordinators_answer(
    three: tuple[Agent, Agent, Agent], fields: dict[str, object]
) -> None:
    """Byte for byte, but for id, time and progress."""
    a, *others = three
    expected = same(a.stream(**fields))
    assert expected.rstrip().endswith(b"data: [DONE]")
    assert expected.count(b"data: ") > 8
    for agent in others:
        assert same(agent.stream(**fields)) == expected


def test_a_client_that_leaves_a_member_stops_the_ranks(three: tuple[Agent, Agent, Agent]) -> None:
    a, _, c = three

    before = a.health()["ranks"][0]["emitted"]

    def emitted() -> int:
        """Return the tokens of a report made after the request, with every rank idle; else 0."""
        ranks = a.health()["ranks"]
        return ranks[0]["emitted"] - before if {rank["phase"] for rank in ranks} == {"idle"} else 0

    with c.open_stream("Repeat exactly: " + "ABC " * 20, **ENDLESS) as response:
        response.read(2000)
        wait(lambda: a.health()["open_requests"] == 1, "rank 0 works on it", a, c)
    wait(lambda: a.health()["open_requests"] == 0, "no client waits for it", a, c, within_s=10 * SLOWNESS)
    wait(lambda: 0 < emitted() < 3800, "ranks are idle before the end of the reply", a)
    assert c.health()["open_requests"] == 0
