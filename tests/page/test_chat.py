"""The chat, in a real browser, against the real endpoint. The model's words are the test's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtp.errors import Code, GroupError, RequestError

from ..api.conftest import CONTEXT, SECOND
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
    prompt = len(site.backend.request.tokens)
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
        pytest.param(DESK, id="1280", marks=pytest.mark.chaos),
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
    labels = [
        each.get_attribute("aria-label") for each in touch.page.locator(f"{LAST} .end .icons button").all()
    ]
    assert labels == ["Copy the answer", "Regenerate the answer"]


def test_an_empty_conversation_names_the_model_and_has_examples(site: Site, visit: Visit) -> None:
    assert visit.text("#empty-model") == "tiny"
    visit.shows(f"{CONTEXT} tokens of context", "#empty-context")
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
    bubble = visit.page.locator("#turns > li.user > .said").bounding_box()
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


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        ({}, "Reading the prompt…"),
        ({"state": "loading 40 %"}, "The model: loading 40 %…"),
        (
            {"prompt_progress": {"total": 3892, "processed": 1536}},
            "Reading the prompt: 1,536 of 3,892 tokens…",
        ),
    ],
)
def test_a_wait_says_how_far_it_is(reading: Visit, chunk: dict[str, Any], words: str) -> None:
    said = reading.page.evaluate(
        """async chunk => {
            const [{ progressWords }, { waitWords }] =
                await Promise.all(['answer', 'turns'].map(name => import(`/page/${name}.js`)));
            return waitWords({ phase: 'first token', progress: progressWords(chunk) });
        }""",
        chunk,
    )
    assert said == words


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
    assert one.tokens == two.tokens


def test_an_answer_that_breaks_off_is_an_error_and_not_complete(site: Site, visit: Visit) -> None:
    site.says("It begins ", "and then", error=GroupError("rank 1 is gone for good", Code.RANK_LOST))
    site.go_on.set()
    visit.send("Go")
    visit.answered()
    assert visit.text(f"{LAST} > .said") == "It begins and then"
    problem = visit.page.locator(f"{LAST} .problem")
    assert problem.inner_text() == "The answer is incomplete: rank 1 is gone for good"
    visit.shows("rank 1 is gone for good", "#spoken")
    assert problem.get_attribute("role") is None, "else those of a stored conversation are announced, too"


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
    visit.page.click(f"{LAST} .retry")
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


def test_thoughts_and_calls_are_folded_away(site: Site, visit: Visit) -> None:
    def event(delta: dict[str, Any], reason: str | None = None) -> str:
        return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"

    body = (
        event({"role": "assistant"})
        + event({"reasoning_content": "Let me **think**."})
        + ": a comment\n\n"
        + event({"content": "Done."})
        + event({"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": '{"at":'}}]})
        + event({"tool_calls": [{"index": 0, "function": {"arguments": ' "it"}'}}]})
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
    assert not visit.page.is_visible(f"{LAST} .call code")
    assert visit.text(f"{LAST} .call summary") == "Call of look"
    visit.page.click(f"{LAST} .call summary")
    assert visit.text(f"{LAST} .call code") == '{"at": "it"}'
    assert not visit.page.is_visible(f"{LAST} .problem")


SHOWN = "#turns > li > .said"


def test_changed_messages_and_regenerated_answers_are_versions(site: Site, visit: Visit) -> None:
    page = visit.page

    def asks(text: str, answer: str, act: Any) -> None:
        site.says(answer)
        act()
        visit.shows(answer)
        visit.answered()
        assert page.locator(SHOWN).all_inner_texts()[-2:] == [text, answer]

    def edit(text: str) -> None:
        page.hover("#turns > li:nth-child(1)")
        page.click("#turns > li:nth-child(1) .edit")
        page.fill(".editing textarea", text)
        page.press(".editing textarea", "Enter")

    def sent() -> list[str]:
        return [said["content"] for said in bodies[-1]["messages"]]

    bodies: list[dict[str, Any]] = []
    visit.hear("request", lambda r: bodies.append(r.post_data_json) if r.method == "POST" else None)
    asks("One", "first", lambda: visit.send("One"))
    asks("One", "second", lambda: page.click(f"{LAST} .again"))
    asks("Two", "third", lambda: visit.send("Two"))
    assert sent() == ["One", "second", "Two"]
    answer = "#turns > li:nth-child(2) .versions"
    assert visit.text(answer).split() == ["‹", "2", "/", "2", "›"]
    assert page.get_attribute(answer, "aria-label") == "Version 2 of 2"
    page.click(f"{answer} button:first-child")
    assert page.locator(SHOWN).all_inner_texts() == ["One", "first"], "what followed the other version"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Earlier version"
    page.keyboard.press("Enter")  # there is none
    assert page.locator(SHOWN).all_inner_texts() == ["One", "first"]
    asks("One?", "fourth", lambda: edit("One?"))
    assert sent() == ["One?"]
    assert page.evaluate("document.activeElement.id") == "say", "the next key is for the next message"
    page.click("#turns > li:nth-child(1) .edit")
    page.press(".editing textarea", "Escape")
    assert page.locator(".editing").count() == 0
    page.reload()
    visit.state("Ready")
    assert page.locator(SHOWN).all_inner_texts() == ["One?", "fourth"]
    page.click("#turns > li:nth-child(1) .versions button:first-child")
    page.click(f"{answer} button:last-child")
    assert page.locator(SHOWN).all_inner_texts() == ["One", "second", "Two", "third"]
    assert "## You\n\nTwo\n" in export(visit, "markdown", "One.md")


def test_a_conversation_without_versions_is_read_and_an_exported_one_is_read_back(
    site: Site, visit: Visit
) -> None:
    page = visit.page
    turns = [{"role": "user", "content": "Old"}, {"role": "assistant", "content": "kept", "phase": "over"}]
    old = {"id": "x", "title": "Old one", "changed": 1, "turns": turns}
    page.evaluate("talk => localStorage.setItem('mlxtp.conversation.x', JSON.stringify(talk))", old)
    page.reload()
    visit.state("Ready")
    assert page.locator(SHOWN).all_inner_texts() == ["Old", "kept"]
    site.says("again")
    page.hover(LAST)
    page.click(f"{LAST} .again")
    visit.shows("again")
    visit.answered()
    exported = export(visit, "json", "Old-one.json")
    page.click("#delete")
    page.click("#asking-yes")
    assert page.locator("#conversations button").count() == 0

    def read(text: str) -> None:
        file = {"name": "talk.json", "mimeType": "application/json", "buffer": text.encode()}
        page.set_input_files("#import-file", file)  # type: ignore[arg-type]

    read(exported)
    visit.shows("again")
    assert page.locator("#conversations button").all_inner_texts() == ["Old one"]
    assert visit.text(f"{LAST} .versions").split() == ["‹", "2", "/", "2", "›"]
    for bad, why in (
        ("{", "it is not JSON."),
        ('{"turns": []}', "it is not an exported conversation."),
        (exported.replace('"user"', '"root"'), "it has no messages, or ones that cannot be read."),
    ):
        read(bad)
        visit.shows(f"“talk.json” is not imported: {why}", "#chat-problem")
    assert page.locator("#conversations button").count() == 1


def test_the_model_is_chosen_for_each_conversation(site: Site, visit: Visit) -> None:
    page = visit.page
    visit.open("chat")
    site.backend.second_text = site.backend.loaded_text
    third = {"name": "org/third", "model": "org/third@main", "state": "loading", "replicas": {}, "groups": []}
    both = [third | {"name": name, "model": name, "state": "ready"} for name in ("org/tiny", SECOND)]
    site.show(deployments=[*both, third])
    visit.shows("third · loading", "#chat-model")
    assert page.locator("#chat-model option").all_inner_texts() == ["tiny", "second", "third · loading"]
    assert page.input_value("#chat-model") == "org/tiny"
    bodies: list[dict[str, Any]] = []
    visit.hear("request", lambda r: bodies.append(r.post_data_json) if r.method == "POST" else None)
    site.says("I am the second.")
    page.select_option("#chat-model", SECOND)
    assert visit.text("#empty-model") == "second"
    page.select_option("#chat-model", "org/third")
    assert visit.text("#empty-context") == "loading"
    page.select_option("#chat-model", SECOND)
    visit.send("Who?")
    visit.answered()
    assert bodies[-1]["model"] == SECOND
    assert site.backend.whose[-1].model == SECOND
    page.click("#new-conversation")
    assert page.input_value("#chat-model") == SECOND, "a new conversation begins with the last choice"
    page.select_option("#chat-model", "org/tiny")
    page.click("#conversations button")
    assert page.input_value("#chat-model") == SECOND
    site.backend.second_text = None
    site.show(deployments=[])
    visit.shows("second · not served", "#chat-model")


def test_files_are_pasted_as_text_or_refused_in_words(site: Site, visit: Visit) -> None:
    def paste(name: str, kind: str, content: str, size: int = 1, how: str = "paste") -> None:
        visit.page.evaluate(
            """([name, type, content, size, how]) => {
                const data = new DataTransfer();
                data.items.add(new File([content.repeat(size)], name, { type }));
                const given = { bubbles: true, cancelable: true };
                const event = how === 'paste' ? new ClipboardEvent('paste', { clipboardData: data, ...given })
                    : new DragEvent('drop', { dataTransfer: data, ...given });
                document.getElementById('say').dispatchEvent(event);
            }""",
            [name, kind, content, size, how],
        )

    paste("photo.png", "image/png", "x")
    visit.shows("photo.png is not sent: the model takes text only.", "#chat-problem")
    paste("data.bin", "", "a\0b", how="drop")
    visit.shows("data.bin is not sent: the model takes text only.", "#chat-problem")
    paste("long.txt", "text/plain", "word ", 100_000)
    visit.shows("long.txt is not sent: it has 500 kB; a text file may have 100 kB.", "#chat-problem")
    assert visit.page.input_value("#say") == ""
    paste("a.py", "text/x-python", "x = '```'\n\n", how="drop")
    visit.page.wait_for_selector("#chat-problem", state="hidden")
    assert visit.page.input_value("#say") == "a.py:\n\n````py\nx = '```'\n````\n"


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


ELSEWHERE = """() => {
    const [key] = Object.keys(localStorage).filter(each => each.startsWith('mlxtp.conversation.'));
    const talk = JSON.parse(localStorage.getItem(key));
    talk.turns.push({ role: 'user', content: 'Two', parent: 1 });
    talk.turns.push({ role: 'assistant', content: 'two', parent: 2 });
    localStorage.setItem(key, JSON.stringify(talk));
}"""


def test_a_message_follows_what_another_tab_has_added(site: Site, visit: Visit) -> None:
    site.says("one")
    visit.send("One")
    visit.answered()
    other = visit.page.context.new_page()
    other.goto(f"{site.url}/health")
    other.evaluate(ELSEWHERE)
    other.close()
    visit.shows("two")
    site.says("three")
    visit.send("Three")
    visit.shows("three")
    visit.answered()
    visit.page.reload()
    visit.page.wait_for_selector("#turns > li")
    assert visit.page.locator(SHOWN).all_inner_texts() == ["One", "one", "Two", "two", "Three", "three"]


def test_a_conversation_that_cannot_be_read_costs_itself_alone(site: Site, visit: Visit) -> None:
    user = {"role": "user", "content": "Hi"}
    strange = {
        "role": "assistant",
        "content": "yes",
        "model": 5,
        "reasoning": 7,
        "calls": 5,
        "numbers": {"speed_of": []},
    }
    found = [
        *({"turns": turns} for turns in (5, [None], ["Hi"], [user, {"role": "assistant", "content": 5}])),
        {"turns": [user, strange], "title": 7, "model": 5, "changed": "late", "shown": "no"},
    ]
    for number, talk in enumerate(map(json.dumps, found)):
        visit.page.evaluate(
            "([key, talk]) => localStorage.setItem(key, talk)", [f"mlxtp.conversation.{number}", talk]
        )
    visit.page.evaluate("localStorage.setItem('mlxtp.layout', '[')")
    visit.page.reload()
    visit.state("Ready")
    assert visit.page.locator("#conversations button").all_text_contents() == ["Hi"]
    assert visit.text(f"{LAST} > .said") == "yes"


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
    exported = json.loads(export(visit, "json", "Another-b-name-b.json"))
    assert [turn["content"] for turn in exported["turns"]] == ["The first one", "an answer"]
    said = "# Another <b>name</b>\n\n## You\n\nThe first one\n\n## tiny\n\nan answer\n"
    assert export(visit, "markdown", "Another-b-name-b.md") == said
    page.click("#delete")
    page.click("#asking-no")
    assert listed.count() == 2
    page.click("#delete")
    page.click("#asking-yes")
    assert listed.all_inner_texts() == ["The second one"]
    page.reload()
    visit.state("Ready")
    assert listed.all_inner_texts() == ["The second one"]


def export(visit: Visit, kind: str, name: str) -> str:
    """The file that the browser stores."""
    visit.page.click("#export")
    with visit.page.expect_download() as downloading:
        visit.page.click(f"#export-{kind}")
    assert downloading.value.suggested_filename == name
    return downloading.value.path().read_text()


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


ANSWER = """\
The **root** of $b^2 - 4ac$:

| kind | roots |
|---|--:|
| real | 2 |

```py
def root(a: float, b: float) -> float:
    return a ** 2 - b  # it may be negative
```

1. one
2. two, with `code` and a long paragraph of plain words that goes on for a while and a [link](https://a.example)
"""


def long_conversation(visit: Visit, messages: int) -> None:
    turns = [
        {"role": "assistant", "content": f"{ANSWER}\nAnswer {number}", "phase": "over"}
        if number % 2
        else {"role": "user", "content": f"Question {number}"}
        for number in range(messages)
    ]
    talk = {"id": "long", "title": "Long", "changed": 1, "turns": turns}
    visit.page.evaluate("talk => localStorage.setItem('mlxtp.conversation.long', JSON.stringify(talk))", talk)
    visit.open("chat")
    visit.page.reload()
    visit.page.wait_for_selector("#turns > li:first-child > .said")
    visit.page.wait_for_selector("#turns > li:nth-child(2) .hljs-keyword", state="attached")
    visit.page.wait_for_selector("#turns > li:nth-child(2) math", state="attached")


def test_a_long_conversation_is_drawn_from_its_end_and_shows_it(visit: Visit) -> None:
    long_conversation(visit, 40)
    assert visit.page.locator("#turns > li > .said").count() == 40
    assert above_the_composer(visit, ".end")
    lengths = "[document.documentElement.scrollHeight, document.getElementById('chat').scrollHeight]"
    page, chat = visit.page.evaluate(lengths)
    assert page == DESK["height"], "only the pane scrolls"
    assert chat > 3 * DESK["height"]
    visit.page.evaluate("document.getElementById('chat').scrollTop = 0")
    visit.page.evaluate(TWO_FRAMES)
    assert visit.page.evaluate("document.getElementById('chat').scrollTop") == 0
    assert "Question 0" in visit.text("#turns > li:first-child")


@pytest.mark.chaos
def test_two_hundred_messages_scroll_smoothly(visit: Visit) -> None:
    """In time of the processor, which other work of the machine does not change: 16 ms are one frame."""
    long_conversation(visit, 200)
    cdp = visit.page.context.new_cdp_session(visit.page)
    cdp.send("Performance.enable", {"timeDomain": "threadTicks"})

    def used() -> float:
        found = {each["name"]: each["value"] for each in cdp.send("Performance.getMetrics")["metrics"]}
        return float(found["TaskDuration"]) * 1000

    for step in (-120, 120):  # pixels a frame: twenty lines of text in four frames
        before = used()
        frames = visit.page.evaluate(
            """async step => {
                const pane = document.getElementById('chat');
                for (let frames = 1; ; frames += 1) {
                    pane.scrollTop += step;
                    await new Promise(requestAnimationFrame);
                    const end = pane.scrollTop + pane.clientHeight >= pane.scrollHeight - 1;
                    if (step < 0 ? pane.scrollTop <= 0 : end) return frames;
                }
            }""",
            step,
        )
        assert frames > 200
        assert (used() - before) / frames < 8
