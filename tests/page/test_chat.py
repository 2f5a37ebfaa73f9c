"""The chat, in a real browser, against the real endpoint. The model's words are the test's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtp.errors import Code, GroupError, RequestError

from .conftest import DESK, FORMING, MOMENT, PHONE, SMALL, Site, Visit

LAST = "#turns > li:last-child"
COLOURS = "all => all.map(each => getComputedStyle(each).color)"
BAD = """() => {
    const probe = document.createElement('p');
    probe.className = 'trouble';
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
}"""  # the colour of trouble
HOSTILE = """<script>window.owned = 1</script>
<img src=x onerror="window.owned = 2">

[a link](javascript:window.owned=3) and [data](data:text/html,<script>1</script>) and
[with tabs](java\tscript:window.owned=4) ![picture](https://example.com/track.png)

<https://example.com/"onmouseover="window.owned=5>

| <b>cell</b> | [x](vbscript:x) |
|---|---|
| `</code><script>window.owned = 6</script>` | <svg onload=window.owned=7> |

```html
<script>window.owned = 8</script>
```
"""


def test_an_answer_is_shown_while_it_comes_and_with_its_numbers(site: Site, visit: Visit) -> None:
    site.says("Half of it, ", "and the rest.")
    visit.send("Say something")
    visit.shows("Half of it,")
    assert visit.text(f"{LAST} > .said") == "Half of it,"
    assert visit.page.is_visible("#stop")
    assert not visit.page.is_visible("#send")
    visit.page.wait_for_timeout(150)  # of less no speed is told
    site.go_on.set()
    visit.answered()
    assert visit.text(f"{LAST} > .said") == "Half of it, and the rest."
    numbers = visit.text(f"{LAST} .numbers")
    assert " to first token" in numbers
    count = len(site.ids("Half of it, ")) + len(site.ids("and the rest."))
    prompt = len(site.backend.request.prompt)
    assert f" tokens/s · {count} tokens · " in numbers
    assert f" · prompt {prompt} (3 cached)" in numbers
    assert "not known" not in numbers
    assert not visit.page.is_visible(f"{LAST} .problem")


def test_what_is_asked_has_the_parameters_that_were_given_and_no_others(site: Site, visit: Visit) -> None:
    site.says("yes")
    bodies: list[dict[str, Any]] = []
    visit.hear("request", lambda r: bodies.append(r.post_data_json) if r.method == "POST" else None)
    visit.send("One")
    visit.answered()
    visit.page.click("#parameters summary")
    for field, value in (("temperature", "0.7"), ("top_p", "0.9"), ("max_tokens", "40"), ("seed", "11")):
        visit.page.fill(f"#{field}", value)
    visit.page.fill("#system", "Be brief.")
    visit.send("Two")
    visit.answered()
    first, second = bodies
    common = {"model": "default", "stream": True, "stream_options": {"include_usage": True}}
    assert first == common | {"messages": [{"role": "user", "content": "One"}]}
    assert second == common | {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 40,
        "seed": 11,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "Two"},
        ],
    }
    sampling = site.backend.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.7, 0.9, 11)
    assert site.backend.requests[-1].max_tokens == 40


@pytest.mark.parametrize("by_key", [False, True])
def test_stopping_cancels_the_request_and_keeps_what_came(site: Site, visit: Visit, by_key: bool) -> None:
    site.says("Only this, ", "and never that.")
    visit.send("Go")
    visit.shows("Only this")
    if by_key:
        visit.page.keyboard.press("Escape")
    else:
        visit.page.click("#stop")
    visit.answered()
    assert visit.text(f"{LAST} > .said") == "Only this,"
    assert not visit.page.is_visible(f"{LAST} .problem"), "a stop is no alarm"
    assert site.backend.all_closed()
    assert not site.backend.finished
    numbers = visit.text(f"{LAST} .numbers")
    assert numbers.startswith("stopped · about ")
    assert "prompt" not in numbers, "a stopped answer has no usage"
    shown = visit.page.locator(f"{LAST} :visible").evaluate_all(COLOURS)
    assert visit.page.evaluate(BAD) not in shown


def test_speed_stands_under_every_answer_the_first_and_shortest_included(site: Site, visit: Visit) -> None:
    site.says("All of it at once.", step=1000)
    for _ in range(2):
        visit.send("Go")
        visit.answered()
        assert " tokens/s overall · " in visit.text(f"{LAST} .numbers")


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(DESK, id="1280"),
        pytest.param(SMALL, id="390", marks=pytest.mark.chaos),
        pytest.param(PHONE, id="360"),
    ],
)
def test_the_end_of_an_answer_is_never_under_the_composer(
    site: Site, visiting: Any, size: dict[str, int]
) -> None:
    visit: Visit = visiting("#chat", viewport=size, has_touch=size is not DESK)
    paragraphs = "\n\n".join(f"Paragraph {number} of a long answer." for number in range(30))
    site.says(paragraphs, "\n\nThe last line.", step=64)
    visit.send("Go")
    visit.shows("Paragraph 29")
    assert above_the_composer(visit, "> .said > :last-child")
    site.go_on.set()
    visit.answered()
    for part in ("> .said > :last-child", ".numbers", ".icons"):
        assert above_the_composer(visit, part), part
    visit.page.click("#parameters summary")  # the composer grows
    visit.page.wait_for_selector("#parameters[open] .fields")
    visit.page.evaluate(TWO_FRAMES)
    assert above_the_composer(visit, ".end")
    visit.page.evaluate("document.getElementById('chat').scrollTop = 0")
    visit.page.evaluate(TWO_FRAMES)
    visit.page.click("#parameters summary")
    visit.page.wait_for_selector("#parameters:not([open])")
    visit.page.evaluate(TWO_FRAMES)
    top = visit.page.evaluate("document.getElementById('chat').scrollTop")
    assert top == 0, "a reader further up stays there"


#: Resolves once the page has laid out and drawn what changed, and its observers have run.
TWO_FRAMES = "() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))"


def above_the_composer(visit: Visit, part: str) -> bool:
    box = visit.page.locator(f"{LAST} {part}").bounding_box()
    composer = visit.page.locator("#composer").bounding_box()
    assert box is not None
    assert composer is not None
    return box["y"] + box["height"] <= composer["y"] + 0.5


def test_the_buttons_of_an_answer_appear_with_pointer_and_focus_and_stay_on_touch(
    site: Site, visit: Visit, visiting: Any
) -> None:
    site.says("An answer.")
    visit.send("Go")
    visit.answered()
    opacity = f"Number(getComputedStyle(document.querySelector('{LAST} .again')).opacity)"
    visit.page.mouse.move(5, 5)
    assert visit.page.evaluate(opacity) == 0
    visit.page.hover(LAST)
    assert visit.page.evaluate(opacity) == 1
    visit.page.mouse.move(5, 5)
    visit.page.focus(f"{LAST} .again")
    assert visit.page.evaluate(opacity) == 1
    touch: Visit = visiting("#chat", viewport=PHONE, has_touch=True, is_mobile=True)
    touch.send("Go")
    touch.answered()
    assert touch.page.evaluate(opacity) == 1
    labels = [each.get_attribute("aria-label") for each in touch.page.locator(f"{LAST} .end button").all()]
    assert labels == ["Copy the answer", "Regenerate the answer"]


def test_an_empty_conversation_names_the_model_and_has_examples(site: Site, visit: Visit) -> None:
    assert visit.text("#empty-model") == "tiny"
    assert visit.text("#empty-context") == "4,096 tokens of context"
    assert visit.page.locator("#examples button").count() == 3
    assert not visit.page.is_visible("#rename")
    site.says("An answer.")
    example = visit.text("#examples li:nth-child(2)")
    visit.page.click("#examples li:nth-child(2) button")
    visit.answered()
    assert visit.text("#turns > li.user > .said") == example
    assert visit.text(f"{LAST} .who") == "tiny"
    assert not visit.page.is_visible("#empty")
    assert visit.page.is_visible("#rename")


def test_bubbles_hug_their_text(site: Site, visit: Visit) -> None:
    site.says("An answer.")
    visit.send("Go")
    visit.answered()
    bubble = visit.page.locator("#turns > li.user").bounding_box()
    composer = visit.page.locator("#composer").bounding_box()
    assert bubble is not None
    assert composer is not None
    assert bubble["width"] < 100
    assert bubble["x"] + bubble["width"] == pytest.approx(composer["x"] + composer["width"], abs=1)


def test_a_phone_is_told_of_no_keys(site: Site, visiting: Any, visit: Visit) -> None:
    assert visit.page.is_visible("#say-hint")
    phone: Visit = visiting("#chat", viewport=PHONE, has_touch=True, is_mobile=True)
    phone.state("Ready")
    assert not phone.page.is_visible("#say-hint")


def test_regenerating_asks_the_same_again(site: Site, visit: Visit) -> None:
    site.says("first")
    visit.send("Go")
    visit.answered()
    site.says("second")
    visit.page.click(f"{LAST} .again")
    visit.shows("second")
    visit.answered()
    assert visit.page.locator("#turns > li").count() == 2
    one, two = site.backend.requests
    assert one.prompt == two.prompt


def test_an_answer_that_breaks_off_is_an_error_and_not_complete(site: Site, visit: Visit) -> None:
    site.says("It begins ", "and then", error=GroupError("rank 1 is gone for good", Code.RANK_LOST))
    site.go_on.set()
    visit.send("Go")
    visit.answered()
    assert visit.text(f"{LAST} > .said") == "It begins and then"
    problem = visit.page.locator(f"{LAST} .problem")
    assert problem.inner_text() == "The answer is incomplete: rank 1 is gone for good"
    assert problem.get_attribute("role") == "alert"


def test_a_stream_that_ends_without_its_last_word_is_not_complete(site: Site, visit: Visit) -> None:
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]})
    visit.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=f"data: {chunk}\n\n"),
    )
    visit.send("Go")
    visit.answered()
    assert "The answer is incomplete: " in visit.text(f"{LAST} .problem")


def test_a_refusal_is_shown_in_the_words_of_the_endpoint(site: Site, visiting: Any) -> None:
    visit: Visit = visiting()
    site.backend.refusal = RequestError("too much is open already", Code.OVERLOADED, status=429)
    visit.send("Go")
    visit.answered()
    assert visit.text(f"{LAST} .problem") == "There is no answer: too much is open already"
    assert not visit.page.is_visible(f"{LAST} .numbers")
    site.backend.refusal = None
    site.says("now it works")
    visit.page.click(f"{LAST} .again")
    visit.shows("now it works")


def test_a_question_while_the_model_loads_waits_for_it(site: Site, visiting: Any) -> None:
    visit: Visit = visiting()
    site.says("Here I am.")
    site.go_on.set()
    site.backend.ready, site.backend.starting = False, "tiny is loading (40 %)"
    site.show(state="loading", ready=False, starting="tiny is loading (40 %)")
    visit.state("Starting: tiny is loading (40 %)")
    visit.send("Go")
    for _ in range(2):  # it asks again
        visit.page.wait_for_event("response", lambda response: response.url.endswith("/v1/chat/completions"))
    assert not visit.page.is_visible(f"{LAST} .problem")
    site.backend.ready = True
    site.show(state="ready", ready=True, starting="")
    visit.answered()
    assert visit.text(f"{LAST} > .said") == "Here I am."


def test_a_pause_for_recovery_says_what_it_waits_for(site: Site, visit: Visit) -> None:
    """Nothing of the answer comes meanwhile; the cluster's own events say why."""
    site.says("Before the pause, ", "and after it.")
    visit.send("Go")
    visit.shows("Before")
    site.show(**FORMING)
    visit.page.wait_for_selector(f"{LAST} .waits:has-text('Waiting for the model to start again')")
    site.show(epoch=4)
    visit.state("Ready")
    visit.page.wait_for_selector(f"{LAST} .waits", state="hidden")
    site.go_on.set()
    visit.answered()
    assert visit.text(f"{LAST} > .said") == "Before the pause, and after it."
    assert "for a restart" in visit.text(f"{LAST} .numbers")


def test_thoughts_are_folded_away(site: Site, visit: Visit) -> None:
    def event(delta: dict[str, str], reason: str | None = None) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"

    body = (
        event({"role": "assistant"})
        + event({"reasoning_content": "Let me **think**."})
        + ": a comment\n\n"
        + event({"content": "Done."})
        + event({}, "stop")
        + "data: [DONE]\n\n"
    )
    visit.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    visit.send("Go")
    visit.answered()
    assert visit.text(f"{LAST} > .said") == "Done."
    assert not visit.page.is_visible(f"{LAST} .thinking .said")
    visit.page.click(f"{LAST} .thinking summary")
    assert visit.page.locator(f"{LAST} .thinking strong").inner_text() == "think"
    assert not visit.page.is_visible(f"{LAST} .problem")


# --- Markdown ---------------------------------------------------------------------------------------------


def rendered(visit: Visit, text: str) -> str:
    """The HTML that the renderer makes of it, as elements say it."""
    html: str = visit.page.evaluate(
        """async text => {
            const { render } = await import('/page/markdown.js');
            const box = document.createElement('div');
            render(box, text);
            for (const figure of box.querySelectorAll('figcaption')) figure.remove();
            const left = ['tabindex', 'aria-label', 'role', 'rel', 'target'];
            for (const each of box.querySelectorAll('*')) left.forEach(name => each.removeAttribute(name));
            return new XMLSerializer().serializeToString(box).replaceAll(/ xmlns="[^"]*"/g, '');
        }""",
        text,
    )
    return html.removeprefix("<div>").removesuffix("</div>")


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("one\n\ntwo", "<p>one</p><p>two</p>"),
        ("*a* **b** ***c***", "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong></p>"),
        ("_d_ __e__ ~~f~~", "<p><em>d</em> <strong>e</strong> <del>f</del></p>"),
        ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
        ("**bold with *both* in it**", "<p><strong>bold with <em>both</em> in it</strong></p>"),
        ("**not closed and *neither this", "<p>**not closed and *neither this</p>"),
        ("`a * b` and ``c ` d``", "<p><code>a * b</code> and <code>c ` d</code></p>"),
        (r"\*no\* \`code\`", "<p>*no* `code`</p>"),
        ("# One\n### Three", "<h3>One</h3><h5>Three</h5>"),
        ("a\n***\nb", "<p>a</p><hr /><p>b</p>"),
        ("> quoted\n> **more**", "<blockquote><p>quoted\n<strong>more</strong></p></blockquote>"),
        ("- a\n- b\n  - c\n  - d\n- e",
         "<ul><li>a</li><li>b<ul><li>c</li><li>d</li></ul></li><li>e</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n\n   more\n2. b", "<ol><li>a<p>more</p></li><li>b</li></ol>"),
        ("- [ ] a\n- [x] b", "<ul><li>☐ a</li><li>☑ b</li></ul>"),
        ("```py\nx = '<b>'\n\ny\n```\nafter",
         '<figure class="code"><pre><code>x = \'&lt;b&gt;\'\n\ny</code></pre></figure><p>after</p>'),
        ("```\nnot closed", '<figure class="code"><pre><code>not closed</code></pre></figure>'),
        ("| a | b |\n|:-:|--:|\n| 1 | `x\\|y` |",
         '<div class="table"><table><thead><tr><th class="centre">a</th><th class="right">b</th></tr></thead>'
         '<tbody><tr><td class="centre">1</td><td class="right"><code>x|y</code></td></tr></tbody>'
         '</table></div>'),
        ("[t](https://a.example/b_c_d?e=*f*)", '<p><a href="https://a.example/b_c_d?e=*f*">t</a></p>'),
        ("see https://a.example/x_y.", '<p>see <a href="https://a.example/x_y">https://a.example/x_y</a>.</p>'),
        ("<b>x</b> &amp;", "<p>&lt;b&gt;x&lt;/b&gt; &amp;amp;</p>"),
        ("[t](javascript:alert(1))", "<p>[t](javascript:alert(1))</p>"),
        ("[t](/admin)", "<p>[t](/admin)</p>"),
        ("two  \nlines", "<p>two<br />lines</p>"),
    ],
)  # fmt: skip
def test_markdown(reading: Visit, text: str, html: str) -> None:
    assert rendered(reading, text) == html


def test_hostile_words_stay_words(site: Site, visit: Visit) -> None:
    site.says(HOSTILE, step=7)
    visit.send("Attack")
    visit.answered()
    said = visit.page.locator(f"{LAST} > .said")
    assert visit.page.evaluate("window.owned") is None
    assert said.locator("script, img, svg:not(.icon), iframe, object, style, b").count() == 0
    links = said.locator("a")
    addresses = [links.nth(i).get_attribute("href") or "" for i in range(links.count())]
    assert addresses
    assert all(address.startswith("https://example.com/") for address in addresses)
    assert {links.nth(i).get_attribute("rel") for i in range(links.count())} == {"noopener noreferrer"}
    handlers = said.evaluate(
        """box => [...box.querySelectorAll('*')].flatMap(each => each.getAttributeNames())
            .filter(name => name.startsWith('on'))"""
    )
    assert handlers == []
    assert "<script>window.owned = 1</script>" in said.inner_text()


def test_the_browser_itself_would_refuse_what_slipped_through(visit: Visit) -> None:
    """Trusted types: even our own script cannot make HTML of text."""
    refused = visit.page.evaluate(
        "() => { try { document.body.innerHTML = '<p>x</p>'; return false; } catch { return true; } }"
    )
    assert refused
    visit.trouble.clear()  # the browser says that it refused


@pytest.mark.parametrize(
    "text",
    ["*" * 20_000, "[" * 20_000, "`" * 9_999 + "a", "_a " * 9_000, "> " * 3_000, "- " * 3_000,
     "**a *b " * 5_000, "|" * 5_000 + "\n" + "|-" * 5_000, "![](" * 6_000, "<http://" * 4_000],
    ids=lambda text: text[:6].strip() or "x",
)  # fmt: skip
def test_no_text_takes_long(reading: Visit, text: str) -> None:
    took = reading.page.evaluate(
        """async text => {
            const { render } = await import('/page/markdown.js');
            const began = performance.now();
            render(document.createElement('div'), text);
            return performance.now() - began;
        }""",
        text,
    )
    assert took < 2000


def test_code_can_be_copied(site: Site, visiting: Any) -> None:
    visit: Visit = visiting(permissions=["clipboard-read", "clipboard-write"])
    site.says("```py\nprint('<b>')\n```")
    visit.send("Code")
    visit.answered()
    visit.page.click(f"{LAST} figure button")
    visit.page.wait_for_selector(f"{LAST} figure button:has-text('Copied')")
    assert visit.page.evaluate("navigator.clipboard.readText()") == "print('<b>')"


# --- what is kept -----------------------------------------------------------------------------------------


def test_a_conversation_survives_a_reload(site: Site, visit: Visit) -> None:
    site.says("I am **kept**")
    visit.send("Remember this")
    visit.answered()
    visit.page.reload()
    visit.state("Ready")
    assert visit.text("#chat-title") == "Remember this"
    assert visit.text(f"{LAST} > .said") == "I am kept"
    assert " to first token" in visit.text(f"{LAST} .numbers")
    assert visit.page.locator(f"{LAST} strong").count() == 1


def test_an_answer_that_a_reload_cut_off_says_so(site: Site, visit: Visit) -> None:
    site.says("Only half ", "of it")
    visit.send("Go")
    visit.shows("Only half")
    visit.page.reload()
    visit.state("Ready")
    assert visit.text(f"{LAST} > .said") == "Only half"
    whys = ("the page was closed.", "the connection to the agent broke.")  # whichever came first
    assert visit.text(f"{LAST} .problem") in [f"The answer is incomplete: {why}" for why in whys]
    assert site.backend.all_closed()


def test_conversations_are_listed_renamed_exported_and_deleted(site: Site, visit: Visit) -> None:
    visit.open("chat")
    page = visit.page
    site.says("an answer")
    visit.send("The first one")
    visit.answered()
    page.click("#new-conversation")
    visit.send("The second one")
    visit.answered()
    listed = page.locator("#conversations button")
    assert listed.all_inner_texts() == ["The second one", "The first one"]
    listed.nth(1).click()
    assert visit.text("#chat-title") == "The first one"
    page.click("#rename")
    page.fill("#asking-value", "Another <b>name</b>")
    page.press("#asking-value", "Enter")
    assert visit.text("#chat-title") == "Another <b>name</b>"
    with page.expect_download() as downloading:
        page.click("#export")
    exported = json.loads(downloading.value.path().read_text())
    assert downloading.value.suggested_filename == "Another-b-name-b.json"
    assert [turn["content"] for turn in exported["turns"]] == ["The first one", "an answer"]
    page.click("#delete")
    page.click("#asking-no")
    assert listed.count() == 2
    page.click("#delete")
    page.click("#asking-yes")
    assert listed.all_inner_texts() == ["The second one"]
    page.reload()
    visit.state("Ready")
    assert listed.all_inner_texts() == ["The second one"]


def test_the_endpoints_key_is_asked_for_and_sent(site: Site, visit: Visit) -> None:
    given: list[str | None] = []

    def guarded(route: Any) -> None:
        given.append(route.request.headers.get("authorization"))
        if given[-1] != "Bearer secret":
            body = json.dumps({"error": {"message": "a key is needed", "code": "unauthorized"}})
            route.fulfill(status=401, content_type="application/json", body=body)
        else:
            route.continue_()

    visit.page.route("**/v1/chat/completions", guarded)
    site.says("let in")
    visit.send("Open")
    visit.page.wait_for_selector("#asking[open]")
    assert visit.page.get_attribute("#asking-value", "type") == "password"
    visit.page.fill("#asking-value", "secret")
    visit.page.click("#asking-yes")
    visit.answered()
    assert visit.text(f"{LAST} > .said") == "let in"
    assert given == [None, "Bearer secret"]
    assert "secret" not in visit.page.evaluate("JSON.stringify(localStorage)")
    assert MOMENT["ready"]
