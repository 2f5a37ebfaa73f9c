"""Prompts that end inside an answer: exactly with the client's text, in each template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from mlxtp.errors import RequestError
from mlxtp.text.continuation import Render, continued_prompt
from mlxtp.text.conversation import ChatMessage, Conversation
from mlxtp.text.markups import Markup
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..api.conftest import byte_level, save
from .templates import TEMPLATES, text_of
from .test_chat_template import LOOK, look, result, said, system, user

ASKED = (system("S-ONE"), user("U-ONE"))
GIVEN = "  A-ONE </think> \u00e9\n"  # templates trim such a text, cut it, or escape it


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    return {name: text_of(name, tmp_path_factory.mktemp("model")) for name in TEMPLATES}


def prompt(text: Text, *turns: ChatMessage, **more: object) -> str:
    return text.rendered(Conversation((*ASKED, *turns), continues=True, **more))  # type: ignore[arg-type]


#: What goes before text, before text behind thoughts, and before thoughts: from the last answer's start on.
BEFORE: Mapping[str, tuple[str, str, str]] = {
    "qwen": ("assistant\n", "assistant\n<think>HM</think>", "assistant\n<think>\n"),
    "mistral": ("U-ONE[/INST]", "U-ONE[/INST]", ""),
    "gpt-oss": (
        "<|start|>assistant<|channel|>final<|message|>", "<|start|>assistant<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>",
    ),
    "r1": ("U-ONE<|Assistant|>", "U-ONE<|Assistant|>", "<think>\n"),
    "lfm2": ("<|im_start|>assistant\n", "<|im_start|>assistant\n", ""),
    "parts": ("ASSISTANT: ", "ASSISTANT: ", ""),
    "gemma": ("U-ONE<assistant>", "U-ONE<assistant>", ""),
    "kimi": ("<|im_assistant|>", "<|im_assistant|>", ""),
    "llama": ("U-ONE<assistant>", "U-ONE<assistant>", ""),
    "smol": ("<|im_start|>assistant\n", "<|im_start|>assistant\n", ""),
    "glm": ("<|assistant|></think>", "<|assistant|><think>HM</think>", "<|assistant|><think>"),
    "minimax": ("]~b]assistant\n", "]~b]assistant\n<think>HM</think>", "]~b]assistant\n<think>"),
    "gemma4": ("<|turn>model\n", "<|turn>model\n", "<|channel>thought"),
    "deepseek": ("<｜Assistant｜></think>", "<｜Assistant｜><think>HM</think>", "<｜Assistant｜><think>"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_ends_with_the_text_that_was_given(texts: dict[str, Text], name: str) -> None:
    text, (plain, behind, inside) = texts[name], BEFORE[name]
    for given, ending in (
        (said(GIVEN), plain + GIVEN),
        (said(GIVEN, thought="HM"), behind + GIVEN),
        (said("", thought=" HM "), f"{inside} HM " if inside else None),
    ):
        if ending is None:
            with pytest.raises(RequestError, match="begins with thoughts, but the model does not think"):
                prompt(text, given)
            continue
        written = prompt(text, given)
        assert written.endswith(ending)
        assert written.index("S-ONE") < written.index("U-ONE")
        assert "mlxtp" not in written


def test_earlier_turns_stay_and_tools_are_offered(texts: dict[str, Text]) -> None:
    turns = (said("", look("ZEBRA")), result("R-ONE"), said("A-ONE"))
    for name in ("qwen", "glm", "llama", "deepseek"):
        written = prompt(texts[name], *turns, tools=(LOOK,))
        assert written.endswith("A-ONE")
        for word in ("Looks a word up", "ZEBRA", "R-ONE"):
            assert word in written
    assert prompt(texts["gemma"], said("A-ONE"), said("A-TWO")).endswith("A-ONE\n\nA-TWO")


MARKUP = Markup(("<think>", "</think>"))


def continued(given: ChatMessage, render: Render) -> str:
    return continued_prompt(Conversation((user("U"), given), continues=True), MARKUP, render)


@pytest.mark.parametrize(
    ("opening", "begins"),
    [
        ("", "<think>\n"),
        ("<think>", "<think>"),
        ("<think>\n", "<think>\n"),
        ("</think>", "<think>\n"),
        ("<think></think>", "<think>"),
        ("<think>\n\n</think>\n\n", "<think>\n"),
    ],
)
def test_thoughts_begin_as_the_template_or_the_client_writes_them(opening: str, begins: str) -> None:
    def render(conversation: Conversation, prompting: bool) -> str:
        return "A\n" + opening if prompting else "A\n<think>\n" + conversation.messages[-1].text

    for given, ending in (
        (said("", thought="HM"), f"{begins}HM"),
        (said("<think>\nHM"), "<think>\nHM"),
        (said("A"), "A"),  # text is not thought
    ):
        assert continued(given, render) == f"A\n{ending}"


def test_thoughts_go_on_where_the_template_begins_them_and_drops_them_later() -> None:
    def render(conversation: Conversation, prompting: bool) -> str:
        turns = "".join([f"<{turn.role}>{turn.text}" for turn in conversation.messages])
        return turns + "<assistant><think>\n" * prompting

    for given, ending in ((said("", thought="HM"), "HM"), (said("A", thought="HM"), "HM\n</think>\n\nA")):
        assert continued(given, render) == f"<user>U<assistant><think>\n{ending}"


@pytest.mark.parametrize("given", [said("<think>HM"), said("", thought="HM")])
def test_no_thoughts_go_on_where_they_are_turned_off(texts: dict[str, Text], given: ChatMessage) -> None:
    with pytest.raises(RequestError, match="is not to think here; leave the thoughts out"):
        prompt(texts["qwen"], given, thinking=False)
    assert prompt(texts["qwen"], said("<think>HM</think>A"), thinking=False).endswith("\n<think>HM</think>A")


@pytest.mark.parametrize(
    "content", ["{{ m.content | upper }}", "{{ m.content[:9] }}", "{{ m.content }} {{ m.content }}"]
)
def test_a_text_that_is_not_to_be_found_is_refused(tmp_path: Path, content: str) -> None:
    template = "{% for m in messages %}<{{ m.role }}>" + content + "{% endfor %}"
    text = Text(LocalRenderer.load(save(byte_level(), tmp_path, template)))
    words = "cannot be continued: the model's chat template writes it in another form"
    with pytest.raises(RequestError, match=words) as caught:
        prompt(text, said("A-ONE"))
    assert caught.value.param == "messages"


def test_white_space_behind_a_marker_takes_no_quadratic_time() -> None:
    def render(conversation: Conversation, prompting: bool) -> str:
        return f"<think>{' ' * 300_000}x<assistant>"

    assert continued(said("<think>HM"), render).endswith("x<assistant><think>HM")
