"""The frame, the view of models, and what holds for the whole page: widths, keys, colours, ears."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlxtp.api.api_keys import KeyFile, KeyRing
from mlxtp.api.guard import Access
from mlxtp.errors import Code, UserError

from ..api.test_admin import KEY
from .conftest import DESK, FORMING, PHONE, SMALL, FakeObserved, Running, Site, Visit
from .scenes import ADMIN, KEPT, cluster_of

SIDEWAYS = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.id)"
VIEWS = ("chat", "desk", "models")
WIDE = """() => [...document.querySelectorAll('main *')]
    .filter(each => each.getBoundingClientRect().right > each.closest('.pane')?.getBoundingClientRect().right)
    .map(each => `${each.tagName} ${each.id} ${each.className}`)"""
"""Elements that reach beyond the window."""


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
    visit.open("chat")
    site.show(tokens_per_second={"value": 12.5, "of": "group"})  # figures are no news
    visit.page.wait_for_selector("#figures:has-text('12.5 tokens/s')")
    site.show(**FORMING)
    visit.state("Starting again: epoch 3 lost mini")
    site.show(epoch=4)
    visit.state("Ready: tiny on 2 Macs")
    assert visit.page.evaluate("heard") == ["Starting again: epoch 3 lost mini", "Ready: tiny on 2 Macs"]


def test_figures_of_one_mac_are_said_to_be_so(site: Site, visit: Visit) -> None:
    site.show(tokens_per_second={"value": 7.0, "of": "here"})
    visit.shows("asked here", "#headline")
    visit.open("chat")
    visit.page.wait_for_selector("#figures:has-text('7 tokens/s asked here')")


def test_the_key_is_taken_from_the_address_and_leaves_it(site: Site, visiting: Any) -> None:
    visit: Visit = visiting(ADMIN)
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


def test_a_model_is_loaded_from_the_disk_and_by_the_form_with_all_its_settings(
    site: Site, visiting: Any
) -> None:
    visit: Visit = visiting("#models")
    page = visit.page
    page.fill("#admin-key", KEY)
    page.press("#admin-key", "Enter")
    page.click("#disk button[aria-label='Load org/big']")
    page.wait_for_selector("#said:has-text('org/big is added.')")
    page.fill("#model", "org/other")
    page.fill("#serve-nodes", "2")
    page.fill("#serve-replicas", "3")
    page.click("#serve-more summary")
    page.select_option("#serve-parallel", "pipeline")
    page.fill("#serve-split", "20,12")
    page.fill("#serve-on", "studio,mini")
    page.fill("#serve-keep", "2h")
    page.check("#serve-only")
    page.press("#model", "Enter")
    page.wait_for_selector("#said:has-text('org/other is added.')")
    assert page.input_value("#model") == "", "the form is for the next one"
    asked = [each for each in site.admin.asked if each != ("models",)]
    settings = ("replicas=3", "on=studio,mini", "keep=2h", "parallel=pipeline", "split=20,12", "only=yes")
    assert asked == [("serve", "org/big", ""), ("serve", "org/other", "2", *settings)]
    page.click("#notices-close")
    assert not page.is_visible("#said")
    page.press("#model", "Enter")
    page.wait_for_selector("#problem:has-text('Name a model')")


def test_the_keys_button_stands_beside_its_field(visiting: Any) -> None:
    visit: Visit = visiting("#models")
    visit.state("Ready")
    field = visit.page.locator("#admin-key").bounding_box()
    button = visit.page.locator("#admin-form button").bounding_box()
    assert (field["y"], field["height"]) == (button["y"], button["height"])  # type: ignore[index]


def test_the_header_stays_on_a_phone_in_one_line(visiting: Any) -> None:
    visit: Visit = visiting("#desk", viewport=PHONE)
    visit.state("Ready")
    visit.page.wait_for_selector("#headline dd")
    visit.page.evaluate("document.getElementById('desk').scrollTop = 500")
    box = visit.page.locator("header").bounding_box()
    assert box["y"] == 0  # type: ignore[index]
    assert box["height"] < 60  # type: ignore[index]


def test_what_the_agent_refuses_is_said_in_its_words(site: Site, visiting: Any) -> None:
    visit: Visit = visiting(ADMIN)
    visit.page.wait_for_selector("#disk li")
    site.admin.error = UserError("org/big needs 40 GB, and 30 GB are free", Code.NOT_SUPPORTED)
    visit.page.click("#disk button[aria-label='Load org/big']")
    visit.page.wait_for_selector("#problem:has-text('org/big needs 40 GB, and 30 GB are free')")
    assert visit.page.get_attribute("#problem", "role") == "alert"


def test_a_wrong_key_is_asked_for_again(visiting: Any) -> None:
    visit: Visit = visiting("#key=wrong")
    visit.page.wait_for_selector("#admin-form:not([hidden])")
    visit.shows("That key is not valid", "#problem")


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(PHONE, id="360"),
        pytest.param(SMALL, id="390", marks=pytest.mark.chaos),
        pytest.param(DESK, id="1280", marks=pytest.mark.chaos),
    ],
)
def test_nothing_is_wider_than_the_window(site: Site, visiting: Any, size: dict[str, int]) -> None:
    caches = [KEPT | {"group": "g" * 300}]
    site.show(**cluster_of(4), reason="a_long_word_" * 20, problem="x" * 300, caches=caches)
    code, word = "```\n" + "wide " * 80 + "\n```", "w" * 300
    cells = "|".join(["cell" * 5] * 12)
    site.says(f"{code}\n\n{word}\n\n|{cells}|\n|{'-|' * 12}\n|{cells}|")
    visit: Visit = visiting(ADMIN, viewport=size)
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
    assert page.is_disabled("#beside")
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
    visit.page.set_viewport_size({"width": 320, "height": 256})  # a zoom of 400 %
    assert visit.page.is_visible("nav")
    visit.page.focus("#admin-key")  # as where a keyboard takes the screen
    assert not visit.page.is_visible("nav")
    visit.page.set_viewport_size(PHONE)  # type: ignore[arg-type]


def test_colours_of_the_system_leave_the_picture_legible(visiting: Any) -> None:
    visit: Visit = visiting(forced_colors="active")
    texts = visit.page.locator(".picture text:not(.label)")
    texts.first.wait_for()
    strokes = texts.evaluate_all("all => all.map(each => getComputedStyle(each).stroke)")
    assert set(strokes) == {"none"}, "a stroke lies over its text"


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
    visit: Visit = visiting(ADMIN)
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


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.chaos), "dark"])
def test_light_and_dark(site: Site, visiting: Any, scheme: str) -> None:
    """Each has its own ground, and text stands out from it by 4.5 to 1 at least."""
    site.show(problem="a problem")
    visit: Visit = visiting("#desk", color_scheme=scheme)
    visit.page.click("#words summary")
    visit.page.wait_for_selector("#facts dd")
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    for selector in (
        "body",
        "#facts dt",
        "#state",
        "#headline dt",
        "#nodes .about",
        "#troubles li",
        "header nav a[href='#chat']",
        "#load-link",
    ):
        colour = visit.page.evaluate(f'getComputedStyle(document.querySelector("{selector}")).color')
        assert contrast(colour, ground) >= 4.5, (selector, colour, ground)
    for number in range(1, 7):
        style = f"getComputedStyle(document.documentElement).getPropertyValue('--mark-{number}')"
        found = [str(int(each, 16)) for each in re.findall("[0-9a-f]{2}", visit.page.evaluate(style))]
        assert contrast(",".join(found), ground) >= 4.5, "the letters of groups"


def test_an_endpoint_with_keys_is_opened_by_one_and_by_the_agents_own(
    site: Site, visiting: Any, tmp_path: Path
) -> None:
    file = KeyFile(tmp_path)
    key = file.create("page", 0, 1.0)[1]
    ring = KeyRing(file, "always", beyond=False)
    ring.own_key = KEY
    with Running(site.backend, FakeObserved(), site.admin, access=Access(keys=ring)) as guarded:
        visit: Visit = visiting(url=guarded.url)
        visit.shows("`mlxtp key create NAME`", "#asking")
        visit.state("The agent takes an API key")
        visit.page.click("#asking-no")
        visit.page.click("#unlock")
        visit.page.fill("#asking-value", "wrong")
        visit.page.press("#asking-value", "Enter")
        visit.shows("`mlxtp key create NAME`", "#asking[open]")
        visit.page.fill("#asking-value", key)
        visit.page.click("#asking-yes")
        visit.state("Ready")
        assert not visit.page.is_visible("#unlock")
        site.says("let in")
        visit.send("Hello")
        visit.answered()
        assert visit.text("#turns > li:last-child > .said") == "let in"
        own: Visit = visiting(ADMIN, url=guarded.url)
        own.state("Ready")
        assert not own.page.is_visible("#asking")
        for each in (visit, own):
            each.page.goto("about:blank")


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
    with Running(site.backend, FakeObserved(), site.admin, access=Access(keys=ring)) as guarded:
        visit: Visit = visiting(f"#key={page}", url=guarded.url)
        visit.page.click("#disk button[aria-label='Load org/big']")
        visit.page.wait_for_selector("#said:has-text('org/big is added.')")
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
        other.shows("the key chats does not permit loading and unloading on the page", "#problem")
        assert not other.page.is_visible("#usage-card")
        other.state("Ready")
        for each in (visit, other):
            each.page.goto("about:blank")
