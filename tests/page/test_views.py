"""The views of the cluster and of models, and what holds for the whole page: widths, keys, colours, ears."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlxtp.api.api_keys import KeyFile
from mlxtp.api.guard import Access
from mlxtp.api.key_ring import KeyRing
from mlxtp.errors import Code, UserError

from ..api.test_admin import KEY
from .conftest import DESK, FORMING, MOMENT, NODE, PHONE, RANK, SMALL, FakeObserved, Running, Site, Visit

SIDEWAYS = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.id)"
VIEWS = ("chat", "desk", "models")
WIDE = """() => [...document.querySelectorAll('main *')]
    .filter(each => each.getBoundingClientRect().right > each.closest('.pane')?.getBoundingClientRect().right)
    .map(each => `${each.tagName} ${each.id} ${each.className}`)"""
"""Elements that reach beyond the window."""


def nodes(count: int) -> dict[str, Any]:
    """A cluster of so many Macs, in a ring."""
    ids = [f"{number:032x}" for number in range(count)]
    return {
        "self": ids[0],
        "nodes": [
            NODE | {"node_id": node, "name": f"a Mac with a long name {i}", "self": i == 0}
            for i, node in enumerate(ids)
        ],
        "ranks": [RANK | {"rank": i, "node": node} for i, node in enumerate(ids)],
        "group": MOMENT["group"]
        | {"world_size": count, "pairs": [[i, (i + 1) % count] for i in range(count)]},
        "links": [
            {"a": a, "b": b, "network": "ethernet", "rdma": False, "mbps": 10_000, "trip_us": None}
            for i, a in enumerate(ids)
            for b in ids[i + 1 :]
        ],
    }


# --- the cluster ------------------------------------------------------------------------------------------


def test_the_cluster_in_words(visit: Visit) -> None:
    visit.open("desk")
    facts = visit.text("#facts")
    assert "Ready" in facts
    assert "org/tiny" in facts
    assert "4,096 tokens" in facts
    assert "on 2 Macs" in facts
    assert "JACCL mesh" in facts
    assert "195 µs for each exchange (measured by mlxtp bench)" in facts
    first, second = visit.page.locator("#nodes li").all_inner_texts()
    assert "Apple M3 Ultra, 512 GB of memory" in first
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


def test_a_stage_of_a_pipeline_says_how_busy_it_is(site: Site, visit: Visit) -> None:
    stages = [(3_000_000, 1_000_000), (None, None)]
    ranks = [
        rank | {"stage_busy_us": busy, "stage_waiting_us": waiting}
        for rank, (busy, waiting) in zip(MOMENT["ranks"], stages, strict=True)
    ]
    visit.open("desk")
    assert "busy" not in visit.text("#nodes")
    site.show(ranks=ranks)
    visit.shows("idle, busy 75 % of the time", "#nodes")


KEPT = {
    "group": "org/tiny#0", "kept_bytes": 1_500_000_000, "evicted_bytes": 0, "spilled_bytes": 0, "reused": 12,
    "reused_tokens": 96_000, "fetched": 3, "fetched_tokens": 64_000, "disk_bytes": 12 * 10**9,
    "disk_room_bytes": 50 * 10**9,
}  # fmt: skip
NOT_USED = KEPT | {"group": "org/tiny#1", "reused": 0, "kept_bytes": 0, "disk_bytes": 0, "disk_room_bytes": 0}


def test_what_groups_keep_of_earlier_prompts(site: Site, visit: Visit) -> None:
    visit.open("desk")
    assert not visit.page.is_visible("#caches-card"), "no group of this Mac has a rank 0"
    site.show(caches=[KEPT, NOT_USED], deployments=DEPLOYMENTS)
    visit.page.wait_for_selector("#caches li")
    first, second = visit.page.locator("#caches li").all_inner_texts()
    assert first == (
        "tiny (replica 1) · 12 prompts began with them: "
        "96,000 tokens not read again, 64,000 of them from disk\n"
        "1.5 GB in memory, 12.0 GB of 50.0 GB on disk"
    )
    assert second == "tiny (replica 2) · not used yet\n0 bytes in memory, none on disk"
    meters = visit.page.locator("#caches meter")
    assert meters.count() == 1
    assert meters.evaluate("meter => meter.value / meter.max") == pytest.approx(0.24)
    shown = [KEPT | {"group": "org/other#0", "reused": 1, "reused_tokens": 1000, "fetched_tokens": 0}]
    shown[0]["disk_room_bytes"] = 0
    site.show(caches=shown, deployments=DEPLOYMENTS)
    visit.shows("1 prompt began with them: 1,000 tokens not read again", "#caches")
    assert visit.text("#caches b") == "org/other#0"
    assert visit.text("#caches .about") == "1.5 GB in memory, 12.0 GB on disk, to which none are added"


def test_memory_is_a_share_of_what_the_mac_has(visit: Visit) -> None:
    visit.open("desk")
    share = visit.page.locator("#nodes meter").evaluate("meter => meter.value / meter.max")
    assert share == pytest.approx(14_200_000 / (512 * 10**9))
    assert visit.page.locator("#nodes meter").count() == 1, "nothing is drawn of what is not known"


def test_one_mac_fills_its_column(site: Site, visiting: Any) -> None:
    site.show(**nodes(1), cluster=None)
    visit: Visit = visiting("#desk")
    visit.page.wait_for_selector("#picture .machine")
    column = visit.page.locator("#picture").bounding_box()
    case = visit.page.locator("#picture .case").bounding_box()
    assert case["width"] > column["width"] - 10  # type: ignore[index]
    assert not visit.page.is_visible("#links-card")


def test_the_last_starts_newest_first_with_their_reasons(visit: Visit) -> None:
    visit.open("desk")
    third, second, first = visit.page.locator("#history li").all_inner_texts()
    assert re.match(r"Start 3 · since .*, ready after 2.5 s", third)
    assert third.endswith("org/tiny · JACCL mesh · processes started 400 ms")
    assert re.match(r"Start 2 · .*, lasted 33.0 s, ready after 2.4 s", second)
    assert "rank 1 was ended by signal 9 (rank_lost)" in second
    assert "was never ready" in first
    assert "why it ended is not known" in first


def test_the_picture_shows_macs_ranks_and_what_joins_them(site: Site, visit: Visit) -> None:
    visit.open("desk")
    picture = visit.page.locator("#picture svg")
    assert picture.get_attribute("role") == "img"
    assert "2 Macs, 2 present. Ready" in (picture.get_attribute("aria-label") or "")
    assert picture.locator(".machine .name").all_text_contents() == ["studio", "mini"]
    assert picture.locator(".rank").count() == 2
    assert picture.locator(".cable.used[data-kind=rdma]").count() == 1
    assert picture.locator(".label").all_text_contents() == ["Thunderbolt, RDMA", "sync 195 µs"]
    lost = [NODE, MOMENT["nodes"][1] | {"state": "dead"}]
    site.show(**FORMING, nodes=lost, group=None, ranks=[], links=[])
    visit.page.wait_for_selector("#picture .machine[data-state=dead]")
    assert picture.locator(".rank").count() == 0
    assert picture.locator(".cable").count() == 0


@pytest.mark.parametrize("count", [4, 9, *(pytest.param(n, marks=pytest.mark.chaos) for n in (1, 2, 3, 6))])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_no_mac_lies_on_another_or_outside(
    site: Site, visiting: Any, count: int, size: dict[str, int]
) -> None:
    site.show(**nodes(count))
    visit: Visit = visiting("#desk", viewport=size)
    visit.page.wait_for_selector(f"#picture .machine >> nth={count - 1}")
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


def test_a_failure_is_announced_and_so_is_the_recovery(site: Site, visit: Visit) -> None:
    state = visit.page.locator("#state")
    assert state.get_attribute("role") == "status"
    visit.page.evaluate(
        """() => {
            window.heard = [];
            const state = document.getElementById('state');
            const watch = new MutationObserver(() => heard.push(state.textContent));
            watch.observe(state, { childList: true, subtree: true });
        }"""
    )
    site.show(tokens_per_second={"value": 12.5, "of": "group"})  # figures are no news
    visit.page.wait_for_selector("#figures:has-text('12.5 tokens/s')")
    site.show(**FORMING)
    visit.state("Starting again: epoch 3 lost mini")
    site.show(epoch=4)
    visit.state("Ready: tiny on 2 Macs")
    assert visit.page.evaluate("heard") == [
        "Starting again: epoch 3 lost mini",
        "Ready: tiny on 2 Macs",
    ]


def test_figures_of_one_mac_are_said_to_be_so(site: Site, visit: Visit) -> None:
    site.show(tokens_per_second={"value": 7.0, "of": "here"})
    visit.page.wait_for_selector("#figures:has-text('7 tokens/s asked here')")


# --- models -----------------------------------------------------------------------------------------------


def test_the_key_is_taken_from_the_address_and_leaves_it(site: Site, visiting: Any) -> None:
    visit: Visit = visiting("#key=" + KEY.replace(" ", "%20"))
    visit.page.wait_for_selector("#disk li")
    assert "key" not in visit.page.url
    assert visit.page.is_visible("#models")
    assert visit.page.locator("#disk b").all_inner_texts() == ["tiny", "org/big"]
    assert "40.0 GB, in the Hub's cache, not complete" in visit.text("#disk")
    visit.page.reload()
    visit.page.wait_for_selector("#disk li")
    assert KEY not in visit.page.evaluate("JSON.stringify(localStorage)")
    other: Visit = visiting("#models")
    assert other.page.is_visible("#admin-form")
    assert not other.page.is_visible("#manage")


def test_serving_and_unloading(site: Site, visiting: Any) -> None:
    visit: Visit = visiting("#models")
    visit.page.fill("#admin-key", KEY)
    visit.page.press("#admin-key", "Enter")
    visit.page.wait_for_selector("#disk li")
    visit.page.click("#disk button[aria-label='Serve org/big']")
    visit.page.wait_for_selector("#models-said:has-text('org/big is added.')")
    visit.page.fill("#model", "org/other")
    visit.page.fill("#spread", "2")
    visit.page.press("#model", "Enter")
    visit.page.wait_for_selector("#models-said:has-text('org/other is added.')")
    visit.page.click("#unload")
    visit.page.wait_for_selector("#models-said:has-text('The model is unloaded.')")
    asked = [each for each in site.admin.asked if each != ("models",)]
    assert asked == [("serve", "org/big", ""), ("serve", "org/other", "2"), ("unload", "", "")]


DEPLOYMENTS = [
    {"name": "org/tiny", "model": "org/tiny", "state": "ready", "replicas": {"ready": 1, "wanted": 2},
     "why": "mini: no room",
     "groups": [
         {"id": "org/tiny#0", "members": [{"node_id": "a" * 32, "name": "studio"}], "state": "ready",
          "kind": "", "requests": {"running": 3, "waiting": 1}, "tokens_per_second": 30,
          "cached_tokens": 4096},
         {"id": "org/tiny#1", "members": [], "state": "idle", "kind": "",
          "requests": {"running": 0, "waiting": 0}, "tokens_per_second": None, "cached_tokens": None},
     ]},
    {"name": "org/big", "model": "org/big", "state": "loading", "replicas": {"ready": 0, "wanted": 1},
     "why": "", "groups": []},
]  # fmt: skip


def test_several_deployments_with_their_macs_and_a_button_to_unload_each(site: Site, visiting: Any) -> None:
    works = [
        each | {"works_for": work} for each, work in zip(nodes(2)["nodes"], (["org/tiny#0"], []), strict=True)
    ]
    site.show(deployments=DEPLOYMENTS, nodes=works)
    visit: Visit = visiting("#key=" + KEY.replace(" ", "%20"))
    visit.page.wait_for_selector("#deployed li")
    shown = visit.text("#deployed")
    assert "1 of 2 replicas ready" in shown
    assert "studio: ready, 3 writing, 1 waiting, 30 tokens/s, 4,096 tokens cached" in shown
    assert "mini: no room" in shown
    assert not visit.page.is_visible("#unload")
    visit.page.click("#deployed button[aria-label='Unload org/big']")
    visit.page.wait_for_selector("#models-said:has-text('org/big is unloaded.')")
    assert site.admin.asked[-1] == ("unload", "org/big", "")
    visit.open("desk")
    assert "Works for tiny (replica 1)" in visit.text("#nodes")


def test_the_keys_button_stands_beside_its_field(visiting: Any) -> None:
    visit: Visit = visiting("#models")
    visit.state("Ready")
    field = visit.page.locator("#admin-key").bounding_box()
    button = visit.page.locator("#admin-form button").bounding_box()
    assert (field["y"], field["height"]) == (button["y"], button["height"])  # type: ignore[index]


def test_the_header_stays_on_a_phone_in_one_line(visiting: Any) -> None:
    visit: Visit = visiting("#desk", viewport=PHONE)
    visit.state("Ready")
    visit.page.wait_for_selector("#facts dd")
    visit.page.evaluate("document.getElementById('desk').scrollTop = 500")
    box = visit.page.locator("header").bounding_box()
    assert box["y"] == 0  # type: ignore[index]
    assert box["height"] < 60  # type: ignore[index]


def test_what_the_agent_refuses_is_said_in_its_words(site: Site, visiting: Any) -> None:
    visit: Visit = visiting("#key=" + KEY.replace(" ", "%20"))
    visit.page.wait_for_selector("#disk li")
    site.admin.error = UserError("this agent keeps to this Mac", Code.NOT_SUPPORTED)
    visit.page.click("#unload")
    visit.page.wait_for_selector("#models-problem:has-text('this agent keeps to this Mac')")


def test_a_wrong_key_is_asked_for_again(visiting: Any) -> None:
    visit: Visit = visiting("#key=wrong")
    visit.page.wait_for_selector("#admin-form:not([hidden])")
    assert "That key is not valid" in visit.text("#models-problem")


def test_loading_with_its_progress(site: Site, visiting: Any) -> None:
    loading = [RANK | {"rank": rank, "phase": "loading", "memory_bytes": 1_000_000} for rank in (0, 1)]
    story = MOMENT["history"][0] | {"ready_s": None, "stages": [["spawned", 0.4], ["formed", 1.25]]}
    site.show(state="loading", ready=False, model=None, ranks=loading, history=[story])
    visit: Visit = visiting("#models")
    visit.state("Loading tiny")
    bar = visit.page.locator("#loaded")
    assert bar.evaluate("bar => [bar.value, bar.max]") == [2_000_000, 8_000_000]
    assert visit.text("#loaded-label") == "2.0 MB of about 8.0 MB loaded"
    assert visit.page.locator("#stages li").all_inner_texts() == [
        "processes started after 400 ms",
        "connected after 1.3 s",
    ]
    little = [each | {"memory_bytes": 4} for each in loading]
    site.show(state="loading", ready=False, model=None, ranks=little, history=[story])
    visit.page.wait_for_selector("#loaded-label:has-text('So far: connected')")
    unknown = [each | {"memory_bytes": None, "phase": None} for each in loading]
    site.show(state="loading", ready=False, model=None, ranks=unknown, history=[story])
    visit.page.wait_for_selector("#loaded-label:has-text('not known')")
    assert bar.evaluate("bar => bar.position") == -1
    site.show()
    visit.page.wait_for_selector("#loading", state="hidden")


def test_each_reason_is_said_once(site: Site, visiting: Any) -> None:
    visit: Visit = visiting("#key=" + KEY.replace(" ", "%20"))
    visit.page.click("#disk button[aria-label='Serve org/big']")
    visit.page.wait_for_selector("#models-said:has-text('org/big is added.')")
    why, other = "the Hub knows no such model", "its disk is full"
    macs = [NODE | {"name": name, "model_problem": why} for name in ("studio", "mini")]
    full = [NODE | {"name": name, "model_problem": other} for name in ("book", "air")]
    site.show(state="failed", ready=False, model=None, reason=f"no group: {why}", nodes=[*macs, *full])
    visit.state(f"Failed: no group: {why}")
    visit.shows(f"book, air: {other}", "#served-notes")
    shown = visit.text("body")
    assert (shown.count(why), shown.count(other)) == (1, 1)
    assert "is added" not in shown


# --- for all readers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(PHONE, id="360"),
        pytest.param(SMALL, id="390", marks=pytest.mark.chaos),
        pytest.param(DESK, id="1280"),
    ],
)
def test_nothing_is_wider_than_the_window(site: Site, visiting: Any, size: dict[str, int]) -> None:
    caches = [KEPT | {"group": "g" * 300}]
    site.show(**nodes(4), reason="a_long_word_" * 20, problem="x" * 300, caches=caches)
    code, word = "```\n" + "wide " * 80 + "\n```", "w" * 300
    cells = "|".join(["cell" * 5] * 12)
    site.says(f"{code}\n\n{word}\n\n|{cells}|\n|{'-|' * 12}\n|{cells}|")
    visit: Visit = visiting("#key=" + KEY.replace(" ", "%20"), viewport=size)
    visit.page.wait_for_selector("#disk li")
    visit.open("chat")
    visit.send("q" * 400)
    visit.answered()
    visit.page.click("#parameters summary")
    for view in VIEWS:
        visit.open(view)
        scroll = visit.page.locator(".pane:visible").evaluate_all(SIDEWAYS)
        assert scroll == [], (view, visit.page.evaluate(WIDE))
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_by_keys_alone(site: Site, visit: Visit) -> None:
    """To the skip link, past it to the views, into the message, and to a parameter."""
    page = visit.page
    site.says("typed")

    def focus() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))

    page.keyboard.press("Tab")
    assert focus() == "skip"
    assert page.locator("#skip").bounding_box()["y"] >= 0  # type: ignore[index]
    page.keyboard.press("Enter")
    assert focus() == "main"
    page.keyboard.press("2")
    page.wait_for_selector("#desk", state="hidden")
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(focus())
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", seen[-1]
        if seen[-1] == "say":
            break
    assert seen[-1] == "say"
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    visit.answered()
    assert visit.text("#turns > li:last-child > .said") == "typed"
    assert focus() == "say"
    page.keyboard.press("Tab")
    assert focus() == "chat-model"
    page.keyboard.press("Tab")
    assert focus() == "send"
    page.keyboard.press("Tab")
    assert focus() == "Parameters"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert focus() == "temperature"
    page.focus("#rename")
    page.keyboard.press("Enter")
    assert focus() == "asking-value"
    page.keyboard.press("Escape")
    assert not page.is_visible("#asking")
    assert focus() == "rename"
    page.focus("header nav a[href='#desk']")
    page.keyboard.press("Enter")
    page.wait_for_selector("#desk:not([hidden])")
    assert page.get_attribute("header nav a[href='#desk']", "aria-current") == "page"


def test_the_chat_stands_beside_the_desk_and_both_are_remembered(visiting: Any) -> None:
    visit: Visit = visiting()
    page = visit.page
    shown = [each for each in VIEWS if page.is_visible(f"#{each}")]
    assert shown == ["chat", "desk"]
    width = page.locator("#chat").bounding_box()["width"]  # type: ignore[index]
    page.focus("#divider")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#chat").bounding_box()["width"] == width + 32  # type: ignore[index]
    page.reload()
    visit.state("Ready")
    assert page.locator("#chat").bounding_box()["width"] == width + 32  # type: ignore[index]
    page.click("#beside")
    assert not page.is_visible("#chat")
    visit.open("models")
    page.goto(visit.page.url.split("#")[0])
    visit.state("Ready")
    assert [each for each in VIEWS if page.is_visible(f"#{each}")] == ["models"]
    page.keyboard.press("b")
    assert page.is_visible("#chat")
    page.keyboard.press("2")
    page.wait_for_selector("#models", state="hidden")
    assert not page.is_visible("#beside")
    page.keyboard.press("?")
    assert "Write a message" in visit.text("#keys")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("1?")
    assert page.input_value("#say") == "1?"
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.uncheck("#keys-on")
    page.click("#keys-close")
    page.keyboard.press("1")
    assert not page.is_visible("#desk")


def test_one_view_at_a_time_on_a_narrow_screen(visiting: Any) -> None:
    visit: Visit = visiting("", viewport=PHONE)
    for view in VIEWS:
        visit.open(view)
        assert [each for each in VIEWS if visit.page.is_visible(f"#{each}")] == [view]
    bar = visit.page.locator("nav").bounding_box()
    assert bar["y"] + bar["height"] == PHONE["height"]  # type: ignore[index]
    assert not visit.page.is_visible("#divider")


def test_a_finished_answer_is_told_to_those_who_listen(site: Site, visit: Visit) -> None:
    site.says("Heard by ", "everybody")
    assert visit.page.get_attribute("#spoken", "aria-live") == "polite"
    visit.send("Go")
    visit.shows("Heard by")
    assert "Heard" not in visit.page.text_content("#spoken")  # type: ignore[operator]
    site.go_on.set()
    visit.answered()
    visit.shows("Heard by everybody", "#spoken")


@pytest.mark.parametrize("view", VIEWS)
def test_everything_has_a_name_and_a_place(site: Site, visiting: Any, view: str) -> None:
    """Landmarks, one first heading, and a label for every field and button that can be seen."""
    visit: Visit = visiting("#key=" + KEY.replace(" ", "%20"))
    visit.page.wait_for_selector("#disk li")
    visit.open(view)
    panes = visit.page.locator(".pane:visible")
    assert panes.count() == (1 if view == "chat" else 2), "the chat is beside the others on a wide screen"
    assert visit.page.locator(".pane h1:visible").count() == panes.count()
    assert visit.page.locator("main").count() == visit.page.locator("header").count() == 1
    nameless = visit.page.evaluate(
        """() => {
            const named = e => e.labels?.length || e.getAttribute('aria-label')
                || e.getAttribute('aria-labelledby') || (e.tagName === 'BUTTON' && e.textContent.trim());
            const all = 'input, textarea, select, button, progress, meter, svg[role=img], nav';
            return [...document.querySelectorAll(all)]
                .filter(e => e.getClientRects().length && !named(e)).map(e => e.outerHTML);
        }"""
    )
    assert nameless == []
    assert visit.page.get_attribute("html", "lang") == "en"


def luminance(colour: str) -> float:
    channels = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(site: Site, visiting: Any, scheme: str) -> None:
    """Each has its own ground, and text stands out from it by 4.5 to 1 at least."""
    site.show(problem="a problem")
    visit: Visit = visiting("#desk", color_scheme=scheme)
    visit.page.wait_for_selector("#facts dd")
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    card = visit.page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor")
    for selector, behind in (
        ("body", ground),
        ("#facts dt", ground),
        ("#state", card),
        ("#figures", card),
        ("#nodes .about", card),
        ("#nodes .trouble", card),
        ("header nav a[href='#chat']", card),
    ):
        colour = visit.page.evaluate(f'getComputedStyle(document.querySelector("{selector}")).color')
        assert contrast(colour, behind) >= 4.5, (selector, colour, behind)


def test_an_endpoint_with_keys_is_opened_by_one_and_by_the_agents_own(
    site: Site, visiting: Any, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path)
    key = file.create("page", 0, 1.0)[1]
    ring = KeyRing(file, "always", beyond=False)
    ring.own_key = KEY
    guarded = Running(site.backend, FakeObserved(), site.admin, access=Access(keys=ring))
    try:
        visit: Visit = visiting(url=guarded.url)
        visit.shows("`mlxtp key create NAME`", "#asking")
        visit.page.fill("#asking-value", "wrong")
        visit.page.press("#asking-value", "Enter")
        visit.shows("`mlxtp key create NAME`", "#asking[open]")
        visit.page.fill("#asking-value", key)
        visit.page.click("#asking-yes")
        visit.state("Ready")
        site.says("let in")
        visit.send("Hello")
        visit.answered()
        assert visit.text("#turns > li:last-child > .said") == "let in"
        own: Visit = visiting("#key=" + KEY.replace(" ", "%20"), url=guarded.url)
        own.state("Ready")
        assert not own.page.is_visible("#asking")
        for each in (visit, own):
            each.page.goto("about:blank")
    finally:
        guarded.close()


def test_an_agent_that_goes_is_missed_and_found_again(visiting: Any) -> None:
    first = Running(None, FakeObserved())
    visit: Visit = visiting(url=first.url)
    visit.state("Ready")
    first.close()
    visit.state("The agent does not answer; what is shown is old")
    assert visit.text("#figures") == ""
    second = Running(None, FakeObserved(), port=first.port)
    visit.state("Ready")
    visit.page.goto("about:blank")
    second.close()
    visit.trouble.clear()  # the browser complains of the requests that failed


def test_a_key_for_the_page_loads_models_and_shows_what_keys_have_used(
    site: Site, visiting: Any, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path)
    page = file.create("page", 0, 1.0, scopes=("chat", "load", "metrics"))[1]
    file.create("guest", 0, 1.0, tokens_per_day=2000, expires=2)
    chats = file.create("chats", 0, 1.0)[1]
    ring = KeyRing(file, "always", beyond=True)
    used, guest, _ = ring.reports()
    guest |= {"requests": 1, "prompt_tokens": 1100, "tokens_today": 500, "refused": 3}
    site.admin.used = [used, guest]
    guarded = Running(site.backend, FakeObserved(), site.admin, access=Access(keys=ring))
    try:
        visit: Visit = visiting(f"#key={page}", url=guarded.url)
        visit.page.click("#disk button[aria-label='Serve org/big']")
        visit.page.wait_for_selector("#models-said:has-text('org/big is added.')")
        visit.page.wait_for_selector("#usage li")
        first, second = visit.page.locator("#usage li").all_inner_texts()
        assert first.startswith("page")
        assert "500 of 2,000 tokens today, 1 request and 1,100 tokens in all, 3 refused" in second
        assert "It has expired." in second
        meter = visit.page.locator("#usage meter")
        assert meter.evaluate("meter => meter.value / meter.max") == 0.25
        assert ("token",) not in site.admin.asked
        other: Visit = visiting(f"#key={chats}", url=guarded.url)
        other.page.wait_for_selector("#admin-form:not([hidden])")
        assert "the key chats does not permit loading and unloading on the page" in other.text(
            "#models-problem"
        )
        assert not other.page.is_visible("#usage-card")
        other.state("Ready")
        for each in (visit, other):
            each.page.goto("about:blank")
    finally:
        guarded.close()
