"""The text of `/metrics` after requests whose course is known, before a rank 0 that is played by hand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from mlxtp.admin.metrics import OwnProcess, observed
from mlxtp.admin.parts import AgentParts
from mlxtp.api.api_keys import KeyFile, KeyRing
from mlxtp.api.app import create_app
from mlxtp.api.backend import ModelInfo, StreamEnd
from mlxtp.api.guard import Access
from mlxtp.api.request_metrics import MAX_GROUPS, MAX_MODELS, OTHER, RequestMetrics
from mlxtp.cluster.cluster_state import PINNED
from mlxtp.errors import Code, GroupError
from mlxtp.groups.health import ServingState
from mlxtp.groups.history import Recoveries
from mlxtp.groups.lifecycle import Supervisor
from mlxtp.groups.loading import LoadedModel
from mlxtp.logs import JsonLines
from mlxtp.models import self_test
from mlxtp.wire.messages import Accepted, Cancel, Delta, Error, Finished, Generate, Message, Pong
from mlxtp.wire.rank_stats import RankStats

from ..groups.one_node import GROUP, alone
from ..live_cluster import Cluster
from .conftest import BYTE_LEVEL, VOCABULARY, WAIT_S, Loaded, meanwhile, on_loopback
from .test_admin import FakeAdmin

pytestmark = pytest.mark.slow

MODEL = "org/tiny"
DEPLOYMENT = "tiny"
CHAT = "/v1/chat/completions"
DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "mlxtp.json"
PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SECRET = "hello wide world"
FAILED, REFUSED = "mlxtp_requests_failed_total", "mlxtp_requests_refused_total"


@dataclass
class Desk:
    """Rank 0: says `steps`, each the tokens of one Delta, and then `last`. `held` says nothing by itself."""

    emit: Callable[[Any], None] = lambda _: None
    steps: tuple[tuple[int, ...], ...] = ()
    last: Callable[[int], Message | None] = lambda uid: Finished(uid, "stop", 3, 3)
    held: bool = False
    asked: list[Generate] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def send(self, message: Message) -> None:
        if isinstance(message, Generate):
            self.asked.append(message)
            asyncio.get_running_loop().call_soon(self.play, message.uid)
        elif isinstance(message, Cancel):
            self.cancelled.append(message.uid)

    def play(self, uid: int) -> None:
        self.emit(Accepted(uid))
        if self.held:
            return
        index = 0
        for step in self.steps:
            self.emit(Delta((uid,) * len(step), tuple(range(index, index + len(step))), step))
            index += len(step)
        if (last := self.last(uid)) is not None:
            self.emit(last)


@dataclass
class Stage:
    """A server as an agent has it, but for its ranks."""

    parts: AgentParts
    desk: Desk
    loop: asyncio.AbstractEventLoop
    url: str
    ids: Callable[[str], list[int]]

    @property
    def supervisor(self) -> Supervisor:
        return self.parts.groups.shown.supervisor

    def says(self, text: str, last: Callable[[int], Message | None] | None = None) -> int:
        """From now on every answer is this, a token at a step. Returns how many tokens that is."""
        tokens = self.ids(text)
        self.desk.steps = tuple((token,) for token in tokens)
        self.desk.last = last or (lambda uid: Finished(uid, "stop", len(tokens), len(tokens)))
        return len(tokens)

    def ask(self, path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50} | fields
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=WAIT_S)

    def scrape(self, **headers: str) -> Scraped:
        answer = httpx.get(f"{self.url}/metrics", headers=headers, timeout=WAIT_S)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return Scraped(answer.text)

    def until(self, condition: Callable[[Scraped], bool], **headers: str) -> Scraped:
        """Scrape until that is so. A sequence is counted before its last byte, an HTTP request after it."""
        ends_at = time.monotonic() + WAIT_S
        while not condition(found := self.scrape(**headers)):
            assert time.monotonic() < ends_at, found.text
        return found

    def do(self, work: Callable[[], Any]) -> Any:
        """On the agent's loop."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_S)


class Scraped:
    """One answer of `/metrics`, read by Prometheus' own parser."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.samples, f"{key} stands there twice"
                self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of a sample over all groups, unless one is named; of what has a model, that of ours."""
        for given in ({"model_name": MODEL} | labels, labels):
            wanted = given.items()
            found = [
                value
                for (each, has), value in self.samples.items()
                if each == name
                and {pair for pair in has if pair[0] in given or pair[0] != "group"} == set(wanted)
            ]
            if found:
                return sum(found)
        return 0  # it is not there

    def finished(self, model: str = MODEL) -> dict[str, float]:
        """Answers by why they ended, where there are any."""
        reasons = ("stop", "length", "abort", "error")
        name = "vllm:request_success_total"
        counts = {why: self(name, model_name=model, finished_reason=why) for why in reasons}
        return {why: count for why, count in counts.items() if count}

    def labels(self, name: str, label: str) -> set[str]:
        return {dict(labels)[label] for found, labels in self.samples if found == name}


def counted(*metrics: Collector) -> Scraped:
    """Return the samples of metrics as `/metrics` would show them."""
    registry = CollectorRegistry()
    for each in metrics:
        registry.register(each)
    return Scraped(generate_latest(registry).decode())


@contextlib.contextmanager
def serving(loaded: Loaded, home: Path, access: Access | None = None) -> Iterator[Stage]:
    loop = asyncio.new_event_loop()
    parts = loop.run_until_complete(deployed(home))
    gateway = parts.gateway
    desk = Desk(gateway.on_event)
    model = ModelInfo(MODEL, ("tiny", "default"), home, 200, 1234, (1,), VOCABULARY)
    gateway.serve(GROUP, DEPLOYMENT, desk, model, loaded.text)
    parts.groups.shown.supervisor.status.state = ServingState.READY
    keys = cast(KeyRing, access.keys) if access is not None else None
    admin = FakeAdmin() if keys is not None else None
    app = observed(create_app(gateway, access=access, admin=cast(Any, admin)), parts, keys)

    def ids(words: str) -> list[int]:
        return list(loaded.tokenizer.encode(words, add_special_tokens=False).ids)

    with on_loopback(app, loop=loop) as port:
        yield Stage(parts, desk, loop, f"http://127.0.0.1:{port}", ids)
    loop.run_until_complete(parts.close())
    loop.close()


async def deployed(home: Path) -> AgentParts:
    """Return the parts of an agent that has one deployment, whose model it does not look for."""
    parts = alone(home)
    parts.node.desired.on_change.remove(parts.models.resolve)
    parts.node.desired.serve(DEPLOYMENT, keep_s=PINNED)
    assert parts.groups.shown.scope.group == GROUP
    return parts


@pytest.fixture
def stage(loaded: dict[str, Loaded], tmp_path: Path) -> Iterator[Stage]:
    with serving(loaded[BYTE_LEVEL], tmp_path) as stage:
        yield stage


def test_before_the_first_request_all_counters_stand_at_nothing(stage: Stage) -> None:
    found = stage.scrape()
    assert found.finished() == {}
    for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
        assert (name, frozenset({("model_name", MODEL), ("group", GROUP)})) in found.samples
    assert ("vllm:num_requests_running", frozenset({("model_name", MODEL)})) in found.samples
    assert found("vllm:time_to_first_token_seconds_count") == 0
    assert found("vllm:time_to_first_token_seconds_bucket", le="+Inf") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_is_counted_once_everywhere(stage: Stage, stream: bool) -> None:
    count = stage.says(SECRET, lambda uid: Finished(uid, "length", 4, 4, cached=2, drafted=6, accepted=5))
    assert stage.ask(stream=stream).status_code == 200
    found = stage.until(lambda found: bool(found("mlxtp_http_requests_total", **chat(200))))
    prompt = len(stage.desk.asked[0].tokens)
    assert found.finished() == {"length": 1}
    assert found("vllm:prompt_tokens_total") == found("vllm:prefix_cache_queries_total") == prompt
    assert found("vllm:prefix_cache_hits_total") == 2
    assert found("vllm:generation_tokens_total") == found("vllm:request_generation_tokens_sum") == count
    assert found("vllm:spec_decode_num_draft_tokens_total") == 6
    assert found("vllm:spec_decode_num_accepted_tokens_total") == 5
    assert found("vllm:request_prompt_tokens_sum") == prompt
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
        assert found(f"vllm:{name}_count") == 1
    assert found("vllm:inter_token_latency_seconds_count") == count - 1
    assert found("mlxtp_request_accept_seconds_count") == 1
    assert found("vllm:num_requests_running") == found("vllm:num_requests_waiting") == 0
    assert found("mlxtp_http_requests_total", **chat(200)) == 1


def chat(status: int) -> dict[str, str]:
    return {"method": "POST", "path": CHAT, "status": str(status)}


def test_tokens_of_one_step_are_one_interval(stage: Stage) -> None:
    tokens = stage.ids("hello wide world")[:1] * 6
    stage.desk.steps = (tuple(tokens[:1]), tuple(tokens[1:4]), tuple(tokens[4:]))
    stage.ask()
    found = stage.until(lambda found: bool(found.finished()))
    assert found("vllm:generation_tokens_total") == 6
    assert found("vllm:inter_token_latency_seconds_count") == 2


def test_times_are_those_that_passed(stage: Stage) -> None:
    stage.desk.held = True
    token = stage.ids("hello")[0]
    began = time.monotonic()
    with meanwhile(stage.ask):
        stage.until(lambda found: found("vllm:num_requests_waiting") == 1)
        time.sleep(0.3)
        stage.do(lambda: stage.desk.emit(Delta((1,), (0,), (token,))))
        time.sleep(0.2)
        stage.do(lambda: stage.desk.emit(Delta((1,), (1,), (token,))))
        stage.do(lambda: stage.desk.emit(Finished(1, "stop", 2, 2)))
    took_s = time.monotonic() - began
    found = stage.until(lambda found: bool(found.finished()))
    first_s = found("vllm:time_to_first_token_seconds_sum")
    between_s = found("vllm:inter_token_latency_seconds_sum")
    whole_s = found("vllm:e2e_request_latency_seconds_sum")
    assert first_s >= 0.3
    assert between_s >= 0.2
    assert first_s + between_s <= whole_s <= took_s
    assert found("vllm:inter_token_latency_seconds_bucket", le="0.15") == 0
    assert found("vllm:inter_token_latency_seconds_bucket", le="60.0") == 1


def test_how_long_a_body_takes_is_no_time_of_ours(stage: Stage) -> None:
    stage.says("hello")
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()

    def slowly() -> Iterator[bytes]:
        yield body[:10]
        time.sleep(1.0)
        yield body[10:]

    assert httpx.post(f"{stage.url}{CHAT}", content=slowly(), timeout=WAIT_S).status_code == 200
    found = stage.until(lambda found: bool(found.finished()))
    assert (
        0 < found("vllm:time_to_first_token_seconds_sum") < found("vllm:e2e_request_latency_seconds_sum") < 1
    )


def test_what_runs_and_what_waits_can_be_seen_meanwhile(stage: Stage) -> None:
    stage.desk.held = True
    (model,) = stage.supervisor.gateway.models()
    stage.supervisor.kv.loaded = LoadedModel(model, kv_room=100, load_s=1.0)
    with meanwhile(stage.ask), meanwhile(stage.ask), meanwhile(stage.ask):
        found = stage.until(lambda found: found("vllm:num_requests_waiting") == 3)
        assert found("vllm:num_requests_running") == found("vllm:kv_cache_usage_perc") == 0
        token = stage.ids("hello")[0]
        stage.do(lambda: stage.desk.emit(Delta((1, 2), (0, 0), (token, token))))
        found = stage.scrape()
        assert (found("vllm:num_requests_running"), found("vllm:num_requests_waiting")) == (2, 1)
        assert found("vllm:generation_tokens_total") == 2
        assert found("mlxtp_open_requests") == 3
        held = 2 * (len(stage.desk.asked[0].tokens) + 1)
        assert found("vllm:kv_cache_usage_perc") == held / 100
        assert found("mlxtp_kv_cache_room_tokens") == 100
        for uid in (1, 2, 3):
            stage.do(lambda uid=uid: stage.desk.emit(Finished(uid, "stop", 1, 1)))
    found = stage.until(lambda found: sum(found.finished().values()) == 3)
    assert (found("vllm:num_requests_running"), found("vllm:num_requests_waiting")) == (0, 0)


def test_a_client_that_leaves_is_an_abort(stage: Stage) -> None:
    stage.desk.held = True
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50, "stream": True}
    with httpx.stream("POST", f"{stage.url}{CHAT}", json=body, timeout=WAIT_S) as answer:
        parts = answer.iter_raw()  # which closes the connection when it is dropped
        next(parts)
        stage.do(lambda: stage.desk.emit(Delta((1,), (0,), (stage.ids("hello")[0],))))
        stage.until(lambda found: found("vllm:num_requests_running") == 1)
    found = stage.until(lambda found: bool(found.finished()))
    assert found.finished() == {"abort": 1}
    assert stage.desk.cancelled == [1]
    assert found("vllm:num_requests_running") == 0
    assert found("vllm:e2e_request_latency_seconds_count") == 0
    assert found("vllm:generation_tokens_total") == 1
    assert found("mlxtp_requests_failed_total", path=CHAT, code="internal") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_like_an_end_token(stage: Stage, stream: bool) -> None:
    stage.says(SECRET, lambda _uid: None)
    answer = stage.ask(stream=stream, stop=["wide"])
    assert "stop" in answer.text
    found = stage.until(lambda found: bool(found.finished()))
    assert found.finished() == {"stop": 1}
    assert stage.desk.cancelled == [1]
    assert found("vllm:e2e_request_latency_seconds_count") == 1


@pytest.mark.parametrize(
    ("stream", "counted_as", "not_as"), [(True, FAILED, REFUSED), (False, REFUSED, FAILED)]
)
def test_what_fails_is_an_error_with_its_code_and_counts_as_refused_before_its_answer(
    stage: Stage, stream: bool, counted_as: str, not_as: str
) -> None:
    stage.says("hello", lambda uid: Error(Code.OUT_OF_MEMORY, "no memory", uid))
    answer = stage.ask(stream=stream)
    status = answer.status_code
    assert Code.OUT_OF_MEMORY in answer.text
    assert (status == 200) if stream else (status >= 500)
    found = stage.until(lambda found: bool(found("mlxtp_http_requests_total", **chat(status))))
    assert found.finished() == {"error": 1}
    assert found(counted_as, path=CHAT, code="out_of_memory") == 1
    assert found.labels(not_as, "code") == set()
    assert found("mlxtp_http_requests_total", **chat(status)) == 1


def test_several_answers_are_several_sequences_of_one_request(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    count = stage.says("hello wide")
    with caplog.at_level(logging.INFO, "mlxtp"):
        stage.ask(n=3)
        found = stage.until(lambda found: bool(found("mlxtp_http_requests_total", **chat(200))))
    assert found.finished() == {"stop": 3}
    assert found("mlxtp_http_requests_total", **chat(200)) == 1
    prompt = len(stage.desk.asked[0].tokens)
    assert found("vllm:prompt_tokens_total") == 3 * prompt
    [fields] = lines(caplog)
    assert (fields["prompt_tokens"], fields["generated_tokens"]) == (prompt, 3 * count)
    assert fields["reason"] == "stop"


def test_a_request_that_changes_its_group_is_counted_once(stage: Stage) -> None:
    stage.desk.held = True
    gateway, token = stage.supervisor.gateway, stage.ids("hello")[0]
    model, text = gateway.models()[0], gateway.text()
    assert text is not None
    with meanwhile(stage.ask) as answers:
        stage.until(lambda found: found("vllm:num_requests_waiting") == 1)
        stage.do(lambda: stage.desk.emit(Delta((1,), (0,), (token,))))
        stage.do(lambda: gateway.park(GROUP, GroupError("its link is gone", Code.LINK_LOST)))
        found = stage.scrape()
        assert (found("vllm:num_requests_running"), found("vllm:num_requests_waiting")) == (0, 1)
        stage.do(lambda: gateway.serve("second#1", DEPLOYMENT, stage.desk, model, text))
        stage.do(lambda: stage.desk.emit(Delta((2,), (1,), (token,))))
        stage.do(lambda: stage.desk.emit(Finished(2, "stop", 2, 2)))
    assert answers[0].json()["usage"]["completion_tokens"] == 2
    assert answers[0].headers["x-mlxtp-group"] == GROUP
    found = stage.until(lambda found: bool(found.finished()))
    assert found.finished() == {"stop": 1}
    for group, ends in ((GROUP, 0), ("second#1", 1)):
        assert found("vllm:generation_tokens_total", group=group) == 1
        assert found("vllm:request_success_total", group=group, finished_reason="stop") == ends
    assert found("vllm:time_to_first_token_seconds_count") == 1
    assert found("vllm:inter_token_latency_seconds_count") == 1
    assert found("vllm:prompt_tokens_total") == len(stage.desk.asked[0].tokens)


def test_what_an_agent_asks_itself_or_passes_on_is_not_counted(stage: Stage) -> None:
    gateway = stage.supervisor.gateway
    self_test_ = gateway.self_test(DEPLOYMENT, stage.desk)
    stage.desk.held = True
    warming = stage.do(lambda: asyncio.ensure_future(self_test_.warm_up(self_test.prompts(VOCABULARY))))
    stage.do(lambda: gateway.relay(Generate(7, (1, 2), 9), lambda _: None))
    found = stage.until(lambda found: found("mlxtp_open_requests") == 2)
    assert found("vllm:num_requests_running") == found("vllm:num_requests_waiting") == 0
    for uid in (1, 2):
        stage.do(lambda uid=uid: stage.desk.emit(Delta((uid,), (0,), (5,))))
    found = stage.scrape()
    assert found("vllm:generation_tokens_total") == found("vllm:num_requests_running") == 0
    stage.do(warming.cancel)


def test_refusals_are_counted_by_path_and_code(stage: Stage) -> None:
    assert stage.ask(model="nobody").status_code == 404
    assert stage.ask(temperature=99).status_code == 400
    assert stage.ask(temperature=98).status_code == 400
    found = stage.until(lambda found: found("mlxtp_http_requests_total", **chat(400)) == 2)
    assert found("mlxtp_http_requests_total", **chat(404)) == 1
    refused = [value for (name, _), value in found.samples.items() if name == REFUSED]
    assert sorted(refused) == [1, 2], "one for each code"
    assert found.finished() == {}


def test_unknown_paths_and_methods_share_one_label(stage: Stage) -> None:
    with httpx.Client(base_url=stage.url, trust_env=False) as client:
        for number in range(40):
            assert client.get(f"/wp-admin/{number}").status_code == 404
            client.request(f"BREW{number}", "/health")
            client.get(f"/v1/models/nobody/{number}")
    assert httpx.get(f"{stage.url}{CHAT}").status_code == 405
    wanted = {
        ("GET", OTHER, "404"): 40,
        (OTHER, "/health", "405"): 40,
        ("GET", CHAT, "405"): 1,
        ("GET", "/v1/models/{id:path}", "404"): 40,
    }

    def counts(found: Scraped) -> dict[tuple[str, ...], float]:
        rows = [(dict(key), value) for (name, key), value in found.samples.items() if "http_requests" in name]
        told = {tuple(key[label] for label in ("method", "path", "status")): value for key, value in rows}
        return {key: value for key, value in told.items() if key[1] != "/metrics"}

    found = stage.until(lambda found: sum(counts(found).values()) == sum(wanted.values()))
    assert counts(found) == wanted


def test_metrics_are_for_those_who_may_ask_this_host(stage: Stage) -> None:
    assert httpx.get(f"{stage.url}/metrics", headers={"host": "evil.example"}).status_code == 421
    assert httpx.get(f"{stage.url}/metrics", headers={"origin": "http://evil.example"}).status_code == 403
    assert httpx.post(f"{stage.url}/metrics").status_code == 405


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of each finished request but probes, once there is one."""
    ends_at = time.monotonic() + WAIT_S
    while time.monotonic() < ends_at:
        found = [record for record in caplog.records if record.name == "mlxtp.api.access_log"]
        if found := [record for record in found if record.levelno == logging.INFO]:
            return [cast(Any, record).fields | {"epoch": cast(Any, record).epoch} for record in found]
        time.sleep(0.01)
    pytest.fail("no request was logged")


def test_every_answer_has_an_id_of_its_own(stage: Stage) -> None:
    stage.says("hello")
    asked = [
        stage.ask(),
        stage.ask(stream=True),
        stage.ask(model="nobody"),
        httpx.get(f"{stage.url}/nothing"),
    ]
    asked += [httpx.get(f"{stage.url}/health", headers={"host": "evil.example"}) for _ in range(20)]
    ids = [answer.headers["x-request-id"] for answer in asked]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        *(([each], True) for each in (b"x", b"a" * 128, b"req_01:{abc}/~!")),
        *(([each], False) for each in (b"", b"a" * 129, b"two words", b"caf\xe9", b"tab\there")),
        ([b"a", b"b"], False),
    ],
)
def test_a_clients_own_id_comes_back_and_one_that_is_none_is_replaced(
    stage: Stage, given: list[bytes], taken: bool
) -> None:
    answer = httpx.get(f"{stage.url}/health", headers=[(b"x-request-id", each) for each in given])
    found = answer.headers["x-request-id"]
    assert found == given[0].decode() if taken else re.fullmatch("[0-9a-f]{32}", found)


def test_a_finished_request_has_one_line_without_its_words(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.supervisor.status.epoch = 7
    count = stage.says(SECRET, lambda uid: Finished(uid, "stop", 4, 4, cached=2))
    with caplog.at_level(logging.DEBUG, "mlxtp"):
        stage.ask(messages=[{"role": "user", "content": "the end"}], headers={"x-request-id": "mine"})
        stage.scrape()
        [fields] = lines(caplog)
    assert fields.pop("duration_s") >= fields.pop("first_token_s") > 0
    prompt = len(stage.desk.asked[0].tokens)
    assert fields == {
        "method": "POST", "path": CHAT, "status": 200, "reason": "stop", "epoch": 7,
        "prompt_tokens": prompt, "cached_tokens": 2, "generated_tokens": count,
    }  # fmt: skip
    said = " ".join(record.getMessage() for record in caplog.records)
    assert f"POST {CHAT} 200 in " in said
    assert f"{prompt} prompt tokens, 2 cached; {count} generated, the first after " in said
    assert "the end" not in said
    assert SECRET not in said


def test_a_path_cannot_break_a_line(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mlxtp"):
        httpx.get(f"{stage.url}/a%0Ab%1B[31m{'x' * 5000}?secret=1")
        [fields] = lines(caplog)
    assert fields["path"].startswith("/a%0Ab%1B")
    assert len(fields["path"]) < 700
    assert "secret" not in json.dumps(fields)


def test_whose_key_it_was_and_which_was_none_is_known(
    loaded: dict[str, Loaded],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caplog.handler, "formatter", JsonLines())
    _, key = KeyFile(tmp_path).create("laptop", 0, 1.0)
    access = Access(keys=KeyRing(KeyFile(tmp_path), "always", beyond=False))
    with serving(loaded[BYTE_LEVEL], tmp_path, access) as stage, caplog.at_level(logging.INFO, "mlxtp"):
        stage.says("hello")
        good = {"authorization": f"Bearer {key}"}
        assert stage.ask(headers=good).status_code == 200
        assert stage.ask(headers={"authorization": "Bearer mlxtp-nobody"}).status_code == 401
        assert httpx.get(f"{stage.url}/metrics").status_code == 401
        found = stage.until(lambda found: bool(found("mlxtp_http_requests_total", **chat(401))), **good)
    assert found(REFUSED, path=CHAT, code="invalid_api_key") == 1
    assert found("mlxtp_http_requests_total", **chat(401)) == 1
    assert key not in found.text
    first, second = [json.loads(line) for line in caplog.text.splitlines() if "api.access_log" in line]
    assert (first["key"], first["status"], "code" in first) == ("laptop", 200, False)
    assert ("key" in second, second["status"], second["code"]) == (False, 401, "invalid_api_key")
    assert "prompt_tokens" in first
    assert "prompt_tokens" not in second
    assert key not in caplog.text


def pong(**fields: Any) -> Pong:
    return Pong("decode", 0.0, 0, 0, "", RankStats(**fields))


OF_RANK_1: dict[str, tuple[int, str]] = {
    "memory_bytes": (22, "rank_memory_bytes"),
    "peak_memory_bytes": (33, "rank_peak_memory_bytes"),
    "weight_bytes": (4, "rank_weight_bytes"),
    "forwards": (6, "rank_forwards_total"),
    "kv_bytes": (5, "rank_kv_cache_bytes"),
    "kept_bytes": (3, "rank_kept_cache_bytes"),
    "evicted_bytes": (7, "rank_evicted_cache_bytes_total"),
    "reused": (8, "rank_reused_caches_total"),
    "reused_tokens": (900, "rank_reused_tokens_total"),
    "fetched": (2, "rank_fetched_caches_total"),
    "fetched_tokens": (300, "rank_fetched_tokens_total"),
    "spilled_bytes": (17, "rank_spilled_cache_bytes_total"),
    "disk_bytes": (19, "rank_disk_cache_bytes"),
    "disk_room_bytes": (23, "rank_disk_cache_room_bytes"),
}
OF_RANK_0: dict[str, tuple[int, str, float]] = {
    "memory_bytes": (11, "rank_memory_bytes", 11),
    "step_us": (1500, "rank_step_seconds", 0.0015),
    "wait_us": (500, "rank_wait_seconds", 0.0005),
    "collective_us": (40, "rank_collective_seconds", 0.00004),
    "stage_busy_us": (3_000_000, "rank_stage_busy_seconds_total", 3),
    "stage_waiting_us": (1_500_000, "rank_stage_waiting_seconds_total", 1.5),
}
DRAFTS: dict[str, Any] = {
    "drafted": (10, 0, 30), "accepted": (8, 0, 12), "right_at": (9, 7, 4), "decode_steps": 50,
    "decode_widths": 110, "draft_gain": 1.25,
}  # fmt: skip


def test_each_rank_has_its_figures(stage: Stage) -> None:
    zero = {name: each[0] for name, each in OF_RANK_0.items()}
    one = {name: each[0] for name, each in OF_RANK_1.items()}
    watch = SimpleNamespace(pongs={1: pong(**one), 0: pong(**zero, **DRAFTS)})
    stage.supervisor.status.ranks = cast(Any, SimpleNamespace(watch=watch, processes=[]))
    found = stage.scrape()
    assert found("mlxtp_ranks_alive") == 2
    for value, metric in OF_RANK_1.values():
        assert found(f"mlxtp_{metric}", rank="1") == value, metric
    for _, metric, shown in OF_RANK_0.values():
        assert found(f"mlxtp_{metric}", rank="0") == shown, metric
    health = httpx.get(f"{stage.url}/health").json()["ranks"]
    caches = [
        name for name in one if name not in ("memory_bytes", "peak_memory_bytes", "weight_bytes", "forwards")
    ]
    assert {name: health[1][name] for name in caches} == {name: one[name] for name in caches}
    shares = ("stage_busy_us", "stage_waiting_us")
    assert [health[0][name] for name in shares] == [zero[name] for name in shares]
    assert found("mlxtp_drafted_tokens_total", proposer="draft") == 30
    assert found("mlxtp_accepted_drafts_total", proposer="lookup") == 8
    assert found("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 7
    assert found("mlxtp_decode_steps_total") == 50
    assert found("mlxtp_decode_step_tokens_total") == 110
    assert found("mlxtp_draft_gain") == 1.25
    stage.supervisor.status.ranks = None
    found = stage.scrape()
    assert not [key for key in found.samples if key[0].startswith("mlxtp_rank")]


def test_one_state_is_true(stage: Stage) -> None:
    for state in (ServingState.READY, ServingState.RESTARTING, ServingState.FAILED):
        stage.supervisor.status.state = state
        found = stage.scrape()
        assert {s: found("mlxtp_state", state=s) for s in ServingState} == {
            s: float(s is state) for s in ServingState
        }
        assert found("mlxtp_ready") == float(state is ServingState.READY)


def test_epochs_and_recoveries_are_told(stage: Stage) -> None:
    stage.supervisor.status.epoch = 3
    stage.supervisor.status.recoveries.serving(1.0)
    stage.supervisor.status.recoveries.over(Code.RANK_LOST, 2.0)
    stage.supervisor.status.recoveries.serving(4.5)
    found = stage.scrape()
    assert found("mlxtp_epoch") == 3
    assert found("mlxtp_epochs_ended_total", code="rank_lost") == 1
    assert found("mlxtp_recovery_seconds_sum") == 2.5
    assert found("mlxtp_recovery_seconds_count") == found("mlxtp_recovery_seconds_bucket", le="3.0") == 1
    assert found("mlxtp_recovery_seconds_bucket", le="2.0") == 0


def test_a_recovery_is_from_the_first_failure_to_the_next_that_serves() -> None:
    story = Recoveries()

    def told() -> tuple[float, float]:
        found = counted(story.metrics.seconds)
        return found("mlxtp_recovery_seconds_count"), found("mlxtp_recovery_seconds_sum")

    story.over(Code.FORM_FAILED, 1.0)  # nothing was served yet
    story.serving(5.0)
    assert told() == (0, 0)
    story.over(Code.RANK_LOST, 10.0)
    story.over(Code.FORM_FAILED, 12.0)
    story.over(Code.REPLANNED, 13.0)
    story.serving(17.0)
    assert told() == (1, 7.0)
    story.over(Code.REPLANNED, 20.0)  # another Mac joined
    story.serving(25.0)
    story.over(Code.RANK_LOST, 30.0)
    story.rested()  # and then no model was desired
    story.serving(99.0)
    assert told() == (1, 7.0)
    ended = counted(story.metrics.ended)
    for code in (Code.FORM_FAILED, Code.RANK_LOST, Code.REPLANNED):
        assert ended("mlxtp_epochs_ended_total", code=code) == 2


def test_a_live_agent_tells_of_its_rank(one_rank: Cluster) -> None:
    def scrape() -> Scraped:
        return Scraped(httpx.get(f"{one_rank.url}/metrics", timeout=WAIT_S).text)

    def total(found: Scraped, name: str) -> float:
        return sum(value for (each, _), value in found.samples.items() if each == name)

    before = scrape()
    body = {"messages": [{"role": "user", "content": "Count from 1 to 60."}], "max_tokens": 20}
    answer = httpx.post(f"{one_rank.url}{CHAT}", json=body, timeout=WAIT_S).json()
    after = scrape()
    for name, count in (
        ("vllm:prompt_tokens_total", answer["usage"]["prompt_tokens"]),
        ("vllm:generation_tokens_total", 20),
        ("vllm:e2e_request_latency_seconds_count", 1),
        ("mlxtp_request_accept_seconds_count", 1),
    ):
        assert total(after, name) - total(before, name) == count, name
    assert 0 < total(after, "vllm:inter_token_latency_seconds_count") <= 19, (
        "drafts that were right come together"
    )
    assert after("mlxtp_ranks_alive") == after("mlxtp_world_size") == after("mlxtp_ready") == 1
    assert after("mlxtp_state", state="ready") == 1
    assert after("mlxtp_epoch") >= 1
    assert after("mlxtp_rank_memory_bytes", rank="0") >= after("mlxtp_rank_weight_bytes", rank="0") > 1e5
    assert after("mlxtp_rank_forwards_total", rank="0") > 0
    assert total(after, "mlxtp_kv_cache_room_tokens") > 1000


def test_every_metric_says_what_it_is_and_of_what_kind(stage: Stage) -> None:
    text = stage.scrape().text
    families = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    helped = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    assert len({name for name, _ in families}) == len(families) == len(helped)
    assert all(helped[name] for name, _ in families)
    assert all(name.startswith(("vllm:", "mlxtp_", "process_")) for name, _ in families)
    assert {kind for _, kind in families} == {"gauge", "counter", "histogram"}
    assert "untyped" not in text


def test_the_alerts_of_the_page_are_about_metrics_that_there_are(stage: Stage) -> None:
    section = PAGE.read_text().partition("\n### Alerts\n")[2].partition("\n### ")[0]
    named = set(re.findall(r"`((?:vllm:|mlxtp_)\w+)`", section))
    assert len(named) >= 6
    assert named <= set(re.findall(r"^# TYPE (\S+) ", stage.scrape().text, re.MULTILINE))


def test_metrics_that_the_page_says_are_missing_are(stage: Stage) -> None:
    missing = re.findall(r"There is no `(vllm:\w+)` and no `(vllm:\w+)`", PAGE.read_text())
    assert missing
    assert not {name for pair in missing for name in pair} & {name for name, _ in stage.scrape().samples}


def test_the_agents_own_memory_and_descriptors_are_told(stage: Stage) -> None:
    found = stage.scrape()
    assert found("process_resident_memory_bytes") > 1e6
    assert 0 < found("process_open_fds") < found("process_max_fds")


def test_a_mac_tells_the_same_of_its_process_as_linux() -> None:
    if not Path("/proc/self/stat").exists():
        pytest.skip("there is no /proc to compare with")
    linux = {metric.name: metric for metric in ProcessCollector(registry=None).collect()}
    ours = {metric.name: metric for metric in OwnProcess().collect()}
    assert {name: metric.type for name, metric in ours.items()} == {n: m.type for n, m in linux.items()}
    for name in ("process_start_time_seconds", "process_max_fds"):
        assert ours[name].samples[0].value == pytest.approx(linux[name].samples[0].value, abs=2)
    for name in ("process_resident_memory_bytes", "process_virtual_memory_bytes"):
        assert ours[name].samples[0].value == pytest.approx(linux[name].samples[0].value, rel=0.2)


def test_models_have_names_up_to_a_bound() -> None:
    clock = itertools.count()
    metrics = RequestMetrics(lambda: next(clock))
    for number in range(100):
        metrics.begin(f"model-{number}", "g", (1,)).end(StreamEnd("stop", 1))
    found = counted(metrics.registry)
    assert len(found.labels("vllm:generation_tokens_total", "model_name")) == MAX_MODELS + 1
    assert found.finished(OTHER) == {"stop": 100 - MAX_MODELS}
    metrics.begin("model-3", "g", (1,)).end(StreamEnd("stop", 1))
    assert counted(metrics.registry).finished("model-3") == {"stop": 2}


def test_groups_have_names_up_to_a_bound() -> None:
    metrics = RequestMetrics(lambda: 1.0)
    for number in range(3 * MAX_GROUPS):
        metrics.begin(f"model-{number % 2}", f"{number}", (1,)).end(StreamEnd("stop", 1))
    found = counted(metrics.registry)
    assert len(found.labels("vllm:generation_tokens_total", "group")) == MAX_GROUPS + 1
    name = "vllm:request_success_total"
    for model in ("model-0", "model-1"):
        assert found(name, model_name=model, group=OTHER, finished_reason="stop") == MAX_GROUPS
        assert found.finished(model) == {"stop": 3 * MAX_GROUPS // 2}


def test_the_first_end_is_the_one_that_counts() -> None:
    metrics = RequestMetrics(lambda: 5.0)
    watch = metrics.begin("m", "g", (1, 2))
    watch.end(StreamEnd("stop", 1, 1))
    watch.end(StreamEnd("length", 1, 1))
    watch.fail(GroupError("late"))
    watch.leave()
    found = counted(metrics.registry)
    assert found.finished("m") == {"stop": 1}
    assert found("vllm:prefix_cache_hits_total", model_name="m") == 1
    left = metrics.begin("m", "g", (1, 2))
    left.leave()
    left.end(StreamEnd("stop", 1))
    assert counted(metrics.registry).finished("m") == {"stop": 1, "abort": 1}


def queries() -> list[str]:
    def expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
        for panel in panels:
            yield from expressions(panel.get("panels", []))
            yield from (target["expr"] for target in panel.get("targets", []))

    board = json.loads(DASHBOARD.read_text())
    variables = [str(each["query"]) for each in board["templating"]["list"] if each["type"] == "query"]
    return [*expressions(board["panels"]), *variables]


NAME = re.compile(r"\b(?:vllm:|mlxtp_|process_)[a-z0-9_]+")


def test_the_dashboard_asks_for_what_there_is(stage: Stage) -> None:
    found = stage.scrape()
    there = {name for name, _ in found.samples}
    for family in found.families.values():  # what has no samples yet
        ends = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",))
        there |= {f"{family.name.removesuffix('_total')}{end}" for end in ends}
    asked = {name for query in queries() for name in NAME.findall(query)}
    assert len(asked) > 10
    assert asked - there == set()


def test_the_dashboards_panels_do_not_lie_on_each_other() -> None:
    board = json.loads(DASHBOARD.read_text())
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        mine = {*itertools.product(columns, range(place["y"], place["y"] + place["h"]))}
        assert not mine & cells
        cells |= mine
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
