"""The desk: its picture, what is served, the open requests, what happened, and all of it in words."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from mlxtp.errors import Code, UserError

from .conftest import DESK, FORMING, GROUP, MOMENT, NODE, PHONE, Site, Visit
from .scenes import ADMIN, KEPT, cluster_of, deployment, group, request

TABLET = {"width": 820, "height": 1100}
FEW = [(4, PHONE), (9, DESK)]
SIZES = (PHONE, TABLET, DESK)
MORE = [each for each in product((1, 2, 3, 4, 6, 8, 9, 12, 13, 64), SIZES) if each not in FEW]


def test_the_picture_shows_macs_their_group_and_what_joins_them(site: Site, visit: Visit) -> None:
    picture = visit.page.locator("#picture svg")
    assert picture.get_attribute("role") == "img"
    told = picture.get_attribute("aria-label") or ""
    assert "2 Macs, 2 present. Ready: tiny on 2 Macs. Group A, tiny, on studio and mini: ready." in told
    assert picture.locator(".mac .name").all_text_contents() == ["studio", "mini"]
    assert picture.locator(".mac .told").all_text_contents() == ["idle", "idle"]
    studio, mini = picture.locator(".mac").all_text_contents()
    assert "300 of 512 GB free" in studio
    assert "memory not known" in mini
    assert picture.locator(".band .name").text_content() == "tinytensor parallel"
    assert picture.locator(".band .rail").count() == 2, "of parts of the same layers"
    assert picture.locator(".cable.used[data-kind=rdma]").count() == 1
    assert picture.locator(".label").all_text_contents() == ["Thunderbolt, RDMA", "195 µs a sum"]
    lost = [NODE, MOMENT["nodes"][1] | {"state": "dead"}]
    idle = deployment("org/tiny", group("org/tiny#0", [], state="idle", owner=None))
    site.show(**FORMING, nodes=lost, group=None, ranks=[], links=[], deployments=[idle])
    visit.page.wait_for_selector("#picture .mac[data-state=dead]:has-text('lost')")
    assert picture.locator(":is(.band, .cable)").count() == 0


def test_stages_of_a_pipeline_are_drawn_in_their_order(site: Site, visiting: Any) -> None:
    """Rank 0 has the last layers, so tokens go from the second Mac to the first."""
    scene = cluster_of(2)
    scene["deployments"] = [deployment("org/tiny", group("org/tiny#0", [0, 1], split=[30, 18]))]
    site.show(**scene, shown="")
    visit: Visit = visiting("#desk", viewport=TABLET)
    visit.shows("idle, layers 1–18", "#picture")
    stages = visit.page.locator("#picture .mac .told").all_text_contents()
    assert stages == ["idle, layers 19–48", "idle, layers 1–18"]
    rails = [each.get_attribute("d") for each in visit.page.locator("#picture .rail").all()]
    assert len(rails) == 2, "one for each stage"
    for path in rails:
        begin, tip = re.findall(r"M([\d.]+) .*?L([\d.]+) ", path or "")[0]
        assert float(begin) > float(tip), "they point to where tokens go"
    assert visit.page.text_content("#picture .band tspan") == "pipeline"


def test_each_group_keeps_its_letter_and_has_a_lane_of_its_own(site: Site, visiting: Any) -> None:
    scene = cluster_of(4)
    big, small, other = group("big#0", [0, 1, 2, 3]), group("small#0", [1]), group("other#0", [1, 2])
    scene["deployments"] = [deployment(each["id"][:-2], each) for each in (big, small, other)]
    site.show(**scene)
    visit: Visit = visiting("#desk", viewport={"width": 1100, "height": 800})
    visit.page.wait_for_selector("#picture .band >> nth=2")
    bands = [each.bounding_box() for each in visit.page.locator("#picture .tint").all()]
    assert len({box["y"] for box in bands if box}) == 3
    letters = visit.page.locator("#deployments .mark").all_inner_texts()
    assert letters == ["A", "B", "C"]
    marks = visit.page.locator("#deployments .mark")
    assert len(set(marks.evaluate_all("all => all.map(each => getComputedStyle(each).backgroundColor)"))) == 3
    scene["deployments"] = scene["deployments"][1:]
    site.show(**scene)
    visit.page.wait_for_selector("#deployments li >> nth=2", state="detached")
    assert visit.page.locator("#deployments .mark").all_inner_texts() == ["B", "C"]


def test_tensors_in_the_clear_are_told_of_in_words(site: Site, visiting: Any) -> None:
    scene, why = (
        cluster_of(2),
        "tensors cross shared Ethernet in the clear: other machines can compute prompts",
    )
    exposed = group("org/tiny#0", [0, 1], kind="ring over Ethernet", exposed=why)
    site.show(**(scene | {"deployments": [deployment("org/tiny", exposed)]}))
    visit: Visit = visiting("#desk")
    visit.shows("in the clear", "#picture .cable .clear")
    assert why in visit.text("#deployments")


@pytest.mark.parametrize(
    ("count", "size"),
    [*FEW, *(pytest.param(*each, marks=pytest.mark.chaos) for each in MORE)],
    ids=lambda each: str(each["width"] if isinstance(each, dict) else each),
)
def test_no_mac_lies_on_another_or_outside(
    site: Site, visiting: Any, count: int, size: dict[str, int]
) -> None:
    site.show(**cluster_of(count))
    visit: Visit = visiting("#desk", viewport=size)
    visit.page.wait_for_selector(f"#picture .mac >> nth={count - 1}")
    boxes = [box.bounding_box() for box in visit.page.locator("#picture .case").all()]
    frame = visit.page.locator("#picture svg").bounding_box()
    assert len(boxes) == count
    for i, box in enumerate(boxes):
        assert box["x"] >= frame["x"]
        assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 0.5
        assert box["y"] >= frame["y"]
        assert box["y"] + box["height"] <= frame["y"] + frame["height"] + 0.5
        for other in boxes[:i]:
            apart_x = abs(box["x"] - other["x"]) >= box["width"]
            apart_y = abs(box["y"] - other["y"]) >= box["height"]
            assert apart_x or apart_y


def test_macs_stay_in_their_places_unless_a_group_needs_them_together(reading: Visit) -> None:
    arranged = reading.page.evaluate(
        """async () => {
            const { arrange } = await import("/page/picture.js");
            const of = (...macs) => ({ macs });
            return [
                arrange(["a", "b", "c"], [], ["c", "a"]),
                arrange(["a", "b", "c"], [of("a", "c")], ["c", "a", "b"]),
                arrange(["a", "b", "c"], [of("a", "c")], ["a", "b", "c"]),
                arrange(["a", "b", "c", "d"], [of("a", "d"), of("a", "c", "d")], []),
            ];
        }"""
    )
    assert arranged == [["c", "a", "b"], ["c", "a", "b"], ["a", "c", "b"], ["a", "c", "d", "b"]]


def test_dots_are_the_tokens_that_are_written_and_nothing_moves_when_idle(site: Site, visit: Visit) -> None:
    running = "document.getAnimations().length"
    assert visit.page.evaluate(running) == 0
    site.show(running=[request(1, "writing")])
    visit.page.wait_for_selector("#requests li")
    site.show(running=[request(1, "writing", tokens=4)])
    visit.page.wait_for_selector("#picture .token", state="attached")
    assert visit.page.locator("#picture .token").count() == 4
    site.show()
    visit.page.wait_for_selector("#picture .token", state="detached")
    assert visit.page.evaluate(running) == 0


def test_nothing_moves_for_those_who_want_it_still(site: Site, visiting: Any) -> None:
    site.show(running=[request(1, "writing", tokens=10)])
    visit: Visit = visiting("#desk", reduced_motion="reduce")
    visit.shows("10 tokens", "#requests")
    site.show(running=[request(1, "writing", tokens=400)])
    visit.shows("400 tokens", "#requests")
    assert visit.page.locator("#picture .token").count() == 0
    assert visit.page.evaluate("document.getAnimations().length") == 0


def test_tokens_of_requests_elsewhere_are_known_by_the_groups_speed(reading: Visit) -> None:
    told = {"deployments": [deployment("m", group("m#0", [0], tokens_per_second=30))], "running": []}
    told["deployments"][0]["groups"][0]["requests"] = {"running": 1, "waiting": 0}
    idle = {**told, "deployments": [deployment("m", group("m#0", [0], tokens_per_second=30))]}
    counts = reading.page.evaluate(
        """async ([told, idle]) => {
            const { written } = await import("/page/flow.js");
            written(told, 1000);
            return [told, idle].map((each, i) => written(each, 1500 + 500 * i).get("m#0") ?? 0);
        }""",
        [told, idle],
    )
    assert counts == [15, 0], "the speed of the last seconds is none of a group that has nothing to do"


BUSY = {"running": 3, "waiting": 1}
DEPLOYMENTS = [
    deployment(
        "org/tiny",
        GROUP | {"requests": BUSY, "tokens_per_second": 30, "cached_tokens": 4096},
        GROUP | {"id": "org/tiny#1", "members": [], "state": "idle", "owner": None},
        why="mini: no room",
    ),
    deployment("org/big", state="loading", replicas={"ready": 0, "wanted": 1}),
]


def test_deployments_in_words_and_no_buttons_without_a_key(site: Site, visit: Visit) -> None:
    site.show(deployments=DEPLOYMENTS)
    visit.shows("1 of 2 replicas ready", "#deployments")
    tiny, big = visit.page.locator("#deployments li").all_inner_texts()
    assert "Ready · 1 of 2 replicas ready · 30 tokens/s" in tiny
    assert "On studio and mini · JACCL mesh · 3 writing, 1 waiting · 4,096 tokens cached" in tiny
    assert "mini: no room" in tiny
    assert "Loading" in big
    assert visit.page.locator("#deployments button").count() == 0
    assert visit.text("#load-link") == "Use a key to load models"


def test_replicas_and_the_end_of_a_deployment(site: Site, visiting: Any) -> None:
    """Unloading asks first; buttons keep the focus while figures change."""
    site.show(deployments=DEPLOYMENTS)
    visit: Visit = visiting(ADMIN)
    visit.page.wait_for_selector("#disk li")
    visit.open("desk")
    page = visit.page
    page.click("#deployments button[aria-label='One more replica of tiny']")
    page.wait_for_selector("#said:has-text('org/tiny is added.')")
    assert site.admin.asked[-1] == ("serve", "org/tiny", "", "replicas=3")
    site.show(deployments=[DEPLOYMENTS[0] | {"why": "other words"}, DEPLOYMENTS[1]])
    visit.shows("other words", "#deployments")
    assert page.evaluate("document.activeElement.ariaLabel") == "One more replica of tiny"
    page.click("#deployments button[aria-label='One replica of tiny less']")
    page.wait_for_selector("#said:has-text('org/tiny is added.')")
    assert site.admin.asked[-1] == ("serve", "org/tiny", "", "replicas=1")
    assert page.is_disabled("#deployments button[aria-label='One replica of big less']")
    page.click("#deployments button[aria-label='Unload tiny']")
    visit.shows("4 open requests will end with an error. Its files stay on the disk.", "#asking")
    page.keyboard.press("Escape")
    assert ("unload", "org/tiny", "") not in site.admin.asked
    page.click("#deployments button[aria-label='Unload big']")
    page.click("#asking-yes")
    page.wait_for_selector("#said:has-text('org/big is unloaded.')")
    assert ("unload", "org/big", "") in site.admin.asked
    site.admin.error = UserError("no second Mac has room for org/tiny", Code.NOT_SUPPORTED)
    page.click("#deployments button[aria-label='One more replica of tiny']")
    page.wait_for_selector("#problem:has-text('no second Mac has room for org/tiny')")


COMING = {
    "model": "org/tiny@abc", "node_id": "b" * 32, "self": False, "name": "mini", "lender": "studio",
    "held_bytes": 12 * 10**9, "total_bytes": 40 * 10**9, "bytes_per_s": 410 * 10**6, "left_s": 68,
    "problem": "", "complete": False, "waits": False,
}  # fmt: skip


def test_copies_downloads_and_loads_with_bars_and_the_time_that_is_left(site: Site, visit: Visit) -> None:
    download = COMING | {"model": "org/next", "lender": "", "name": "studio", "left_s": 1300}
    loading = GROUP | {"state": "loading", "loaded_percent": 40}
    told = deployment("org/tiny", loading, state="loading")
    site.show(transfers=[COMING, download], deployments=[told], state="loading", ready=False)
    visit.shows("40 % loaded on studio and mini", "#deployments")
    tiny, coming = visit.page.locator("#deployments > li").all_inner_texts()
    assert "12.0 of 40.0 GB copied from studio to mini, 410 MB/s, about 1 min left" in tiny
    assert coming.startswith("next")
    assert "12.0 of 40.0 GB downloaded to studio, 410 MB/s, about 22 min left" in coming
    bars = visit.page.locator("#deployments progress")
    assert bars.evaluate_all("all => all.map(each => each.position)") == [0.3, 0.4, 0.3]
    visit.page.wait_for_timeout(1100)  # shorter times tell no speed
    loading |= {"loaded_percent": 70}
    site.show(deployments=[deployment("org/tiny", loading, state="loading")], state="loading", ready=False)
    visit.shows("70 % loaded on studio and mini, about 5 s left", "#deployments")
    story = MOMENT["history"][0] | {"ready_s": None, "stages": [["spawned", 0.4], ["formed", 1.25]]}
    unknown = deployment("org/tiny", loading | {"loaded_percent": None}, state="loading")
    site.show(deployments=[unknown], history=[story], state="loading", ready=False)
    visit.shows("So far: connected after 1.3 s", "#deployments")
    assert bars.evaluate_all("all => all.map(each => each.position)") == [-1]


def test_open_requests_with_their_speed_and_cached_share(site: Site, visit: Visit) -> None:
    open_ = [
        request(1, "writing", tokens=1200),
        request(2, "reading", read=3000, cached=0),
        request(3, "waiting", cached=None, group="", prompt=1),
        request(4, "writing", here=False, cached=None),
    ]
    site.show(running=open_, requests=MOMENT["requests"] | {"open": 4, "generating": 2, "first_token": 2})
    visit.page.wait_for_selector("#requests li >> nth=3")
    writing, reading, waiting, other = visit.page.locator("#requests li").all_inner_texts()
    assert "1,200 tokens" in writing
    assert "prompt of 8,000 tokens, 75 % of it cached" in writing
    assert "3,000 of 8,000 tokens" in reading
    assert "none of it cached" in reading
    assert waiting.startswith("Waiting")
    assert waiting.endswith("prompt of 1 token")
    assert "from another Mac" in other
    widths = visit.page.locator("#requests .bar-of rect").evaluate_all(
        "all => all.map(each => each.ariaLabel)"
    )
    assert len(widths) == 8
    assert visit.text("#requests-more") == ""
    visit.page.wait_for_timeout(500)
    site.show(running=[request(1, "writing", tokens=1240)])
    visit.shows("tokens/s", "#requests .figures")
    site.show()
    visit.shows("None is open.", "#requests-more")
    site.show(deployments=[deployment("org/tiny", GROUP | {"requests": {"running": 2, "waiting": 1}})])
    visit.shows("3 at other Macs", "#requests-more")
    visit.shows("2 writing, 1 waiting", "#headline")


def test_senders_are_shown_to_those_alone_who_may_see_the_use_of_keys(site: Site, visiting: Any) -> None:
    """They are shown as soon as they are read, although nothing else changes then."""
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    without: Visit = visiting("#desk")
    visit: Visit = visiting(ADMIN)
    visit.open("desk")
    site.admin.senders = [{"number": 7, "key": "guest", "app": "claude-cli"}]
    site.show(running=[request(7, "writing")])
    visit.page.route("**/admin/keys", hold)
    with visit.page.expect_request("**/admin/keys"):
        visit.page.reload()
    visit.shows("Writing", "#requests")
    held.pop().continue_()
    visit.shows("guest, claude-cli", "#requests")
    without.shows("Writing", "#requests")
    assert "guest" not in without.text("#requests")


def test_failures_in_words_with_what_was_done_and_how_long_it_took(site: Site, visit: Visit) -> None:
    again, ended, first = visit.page.locator("#history li").all_inner_texts()[:3]
    assert "tiny failed" in again
    assert "rank 1 was ended by signal 9rank_lost" in again
    assert "Served again after 69.5 s; it had run for 33.0 s." in again
    assert visit.page.locator("#history li").first.get_attribute("data-kind") == "failed"
    assert "tiny ended" in ended
    assert "why is not known here" in ended
    assert "tiny was started" in first
    moved = MOMENT["history"][1] | {"code": "group_replanned", "reason": "mini came back"}
    before = MOMENT["history"][0] | {"ready_s": None, "world_size": 1}
    other = MOMENT["history"][0] | {"group": "org/gone#0", "model": "org/gone", "began": 1_780_000_200.0}
    site.show(history=[other, before, moved])
    visit.shows("tiny was moved", "#history")
    gone, now, _ = visit.page.locator("#history li").all_inner_texts()
    assert "gone was loaded in 2 parts (JACCL mesh)" in gone
    assert "Ready after 2.5 s: processes started 400 ms." in gone
    assert "It starts again, in one part" in now
    wished = moved | {"reason": "org/tiny was unloaded"}
    site.show(history=[before, wished])
    visit.shows("tiny ended", "#history")
    assert "It had run for" in visit.text("#history li:nth-child(2)"), "what came next is no answer to that"
    assert visit.text("#history li:first-child b") == "tiny is starting"


def test_what_is_to_be_mended_stands_below_the_picture(site: Site, visit: Visit) -> None:
    assert visit.text("#troubles") == "mini: RDMA is disabled"
    why, other = "the Hub knows no such model", "its disk is full"
    macs = [NODE | {"name": name, "model_problem": why} for name in ("studio", "mini")]
    full = [NODE | {"name": name, "model_problem": other} for name in ("book", "air")]
    lines = ["org/next is served as soon as it is here"]
    site.show(
        state="failed", ready=False, model=None, reason=f"no group: {why}", nodes=[*macs, *full], coming=lines
    )
    visit.state(f"Failed: no group: {why}")
    visit.shows(f"book, air: {other}", "#troubles")
    shown = visit.text("body")
    assert (shown.count(why), shown.count(other)) == (1, 1), "each reason once"
    assert lines[0] in visit.text("#troubles")


def words(visit: Visit) -> None:
    visit.page.click("#words summary")


def test_the_cluster_in_words(site: Site, visit: Visit) -> None:
    words(visit)
    facts = visit.text("#facts")
    assert "Ready" in facts
    assert "org/tiny" in facts
    assert "4,096 tokens" in facts
    assert "on 2 Macs" in facts
    assert "JACCL mesh" in facts
    assert "195 µs for each exchange (measured by mlxtp bench)" in facts
    first, second = visit.page.locator("#nodes li").all_inner_texts()
    assert "Apple M3 Ultra, 512 GB of memory, 300 GB free" in first
    assert "Model: 14.2 MB (weights 4.0 MB, conversations 100 kB)" in first
    assert "chip not known, memory not known" in second
    assert "use of memory not known here" in second
    assert "RDMA is disabled" in second
    assert visit.text("#links li") == (
        "studio – mini · Thunderbolt, RDMA\n195 µs for each exchange, 412 µs round trip between the agents"
    )
    shown = visit.text("#desk")
    ours = ("Epoch", "Rank", "rank 0", "collective", "backend", "proof")
    assert [word for word in ours if word in shown] == []
    work = [each | {"works_for": of} for each, of in zip(MOMENT["nodes"], (["org/tiny#0"], []), strict=True)]
    site.show(deployments=DEPLOYMENTS, nodes=work)
    visit.shows("Works for tiny (replica 1)", "#nodes")


def test_connections_that_are_alike_are_one_line(site: Site, visit: Visit) -> None:
    words(visit)
    site.show(**cluster_of(5))
    visit.shows("10 pairs of Macs · Ethernet, 10 Gbit/s", "#links")
    assert visit.page.locator("#links li").count() == 1
    site.show(**cluster_of(1), cluster=None)
    visit.page.wait_for_selector("#links-part", state="hidden")


def test_a_stage_of_a_pipeline_says_how_busy_it_is(site: Site, visit: Visit) -> None:
    stages = [(3_000_000, 1_000_000), (None, None)]
    ranks = [
        rank | {"stage_busy_us": busy, "stage_waiting_us": waiting}
        for rank, (busy, waiting) in zip(MOMENT["ranks"], stages, strict=True)
    ]
    words(visit)
    assert "busy" not in visit.text("#nodes")
    site.show(ranks=ranks)
    visit.shows("idle, busy 75 % of the time", "#nodes")


NOT_USED = KEPT | {"group": "org/tiny#1", "reused": 0, "kept_bytes": 0, "disk_bytes": 0, "disk_room_bytes": 0}


def test_what_groups_keep_of_earlier_prompts(site: Site, visit: Visit) -> None:
    words(visit)
    assert not visit.page.is_visible("#caches-part"), "no group of this Mac has a rank 0"
    site.show(caches=[KEPT, NOT_USED], deployments=DEPLOYMENTS)
    visit.page.wait_for_selector("#caches li")
    first, second = visit.page.locator("#caches li").all_inner_texts()
    assert first == (
        "Atiny (replica 1) · 12 prompts began with them: "
        "96,000 tokens not read again, 64,000 of them from disk\n"
        "1.5 GB in memory, 12.0 GB of 50.0 GB on disk"
    )
    assert second == "tiny (replica 2) · not used yet\n0 bytes in memory, none on disk"
    shown = [KEPT | {"group": "org/other#0", "reused": 1, "reused_tokens": 1000, "fetched_tokens": 0}]
    shown[0]["disk_room_bytes"] = 0
    site.show(caches=shown, deployments=DEPLOYMENTS)
    visit.shows("1 prompt began with them: 1,000 tokens not read again", "#caches")
    assert visit.text("#caches b") == "org/other#0"
    assert visit.text("#caches .about") == "1.5 GB in memory, 12.0 GB on disk, to which none are added"


SHIFTS = """() => new Promise(done => {
    let sum = 0;
    new PerformanceObserver(list => list.getEntries().forEach(each => (sum += each.value)))
        .observe({ type: "layout-shift", buffered: true });
    setTimeout(() => done(sum), 300);
})"""


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_nothing_shifts_while_the_page_opens(site: Site, visiting: Any, size: dict[str, int]) -> None:
    visit: Visit = visiting("#desk", viewport=size)
    visit.page.wait_for_selector("#picture .mac")
    assert visit.page.evaluate(SHIFTS) < 0.02
