"""Text and token ids: chat template, tokenizer, and a detokenizer that shows no half characters."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from ..errors import Code, RequestError
from .call_style import CallStyle, answer_prefix, call_style
from .chat_template import (
    REFUSED,
    TemplateTraits,
    left_out,
    plainer,
    template_messages,
    template_options,
    traits_of,
)
from .continuation import continued_prompt
from .conversation import ChatMessage, Conversation, tool_json
from .markups import JSON_CALLS, call_format, thought_markup
from .renderer import Renderer, SandboxedRenderer
from .token_bytes import Detokenizer

_LONGEST_MARKER = 16  # tokens of a marker and the white space after it

#: A token's text shown alone, and its bytes in the answer; None for special tokens.
Name = tuple[str, tuple[int, ...] | None]


class Text:
    """Tokenizer and chat template of one model, for any thread. Methods that render or encode block."""

    def __init__(self, writer: Renderer) -> None:
        self._writer = writer
        self.relaxed, self.encoded = writer.relaxed, writer.encode
        self.line, self.close = writer.line, writer.close
        self._styles: dict[tuple[int, ...], CallStyle | None] = {}
        facts = writer.facts
        self.has_chat_template = facts.renders
        self.eos = (facts.eos,) if facts.eos >= 0 else ()  #: the tokenizer's own end token, if it has one
        self.decoded = facts.tokens.text  #: text of a client's tokens, including special ones
        #: text of special tokens, which answers do not show
        self.specials: dict[int, str] = {id_: text for id_, text, special in facts.added if special}
        #: In characters: `n` tokens make at most `n` times as many.
        self.longest_token = facts.longest_token
        self.markup = thought_markup(facts.template, facts.markers)
        own = call_format(facts.template, facts.markers)
        traits = TemplateTraits()  # of the best template, in case probing takes too long
        if facts.renders:
            with suppress(RequestError):
                render = partial(writer.render, options={}, prompting=True)
                traits = traits_of(render, self.markup)
        #: Abilities of the chat template. It has no tools if their calls could not be read.
        self.traits = replace(traits, tools=traits.tools and own is not None)
        #: format of this model's calls; if the template lists no tools, also of calls described in words
        self.tool_calls = JSON_CALLS if own is None else own if self.traits.tools else own.beside(JSON_CALLS)
        #: Equal for equal tokenizers and templates.
        self.identity = facts.identity

    @property
    def features(self) -> tuple[str, ...]:
        found = {"tools": self.traits.tools, "reasoning": self.markup.think is not None}
        return tuple(name for name, there in found.items() if there)

    @classmethod
    def load(cls, path: Path) -> Text:
        return cls(SandboxedRenderer(path))

    def rendered(self, conversation: Conversation, prompting: bool = True, exact: bool = False) -> str:
        """Return a conversation as the chat template writes it; `prompting` adds the beginning of an answer.

        That is the last message if the conversation `continues`. Unless `exact`, messages that the template
        refuses or omits are rewritten more plainly. Raises RequestError if there is no template, or it omits
        something in every form.
        """
        if not self.has_chat_template:
            why = "this model has no chat template, so it cannot answer chat messages"
            remedy = "use its instruct or chat version"
            raise RequestError(f"{why}; {remedy}", Code.NOT_SUPPORTED, param="messages")
        if prompting and conversation.continues:
            return continued_prompt(conversation, self.markup, partial(self._rendered, exact=exact))
        return self._rendered(conversation, prompting, exact, complete=prompting)

    def _rendered(
        self, conversation: Conversation, prompting: bool, exact: bool, complete: bool = True
    ) -> str:
        """Return the prompt; with `complete` it has all of the conversation. Raises RequestError."""
        options = template_options(conversation)
        refusal: RequestError | None = None
        for traits in [self.traits] if exact else plainer(self.traits):
            messages = template_messages(
                conversation, traits, self.tool_calls.written, prompting=prompting, markup=self.markup
            )
            tools = [tool_json(tool) for tool in conversation.tools] if traits.tools else []
            try:
                prompt = self._writer.render(messages, tools, options, prompting=prompting)
                if not complete or not (lacks := left_out(prompt, messages, tools)):
                    return prompt
                raise RequestError(f"the model's chat template leaves out {lacks}", param="messages")
            except RequestError as error:
                if error.status != REFUSED:
                    raise
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def stamp(self) -> str:
        """Return text that changes with the time in prompts; "" if the template writes no time."""
        if "strftime_now" not in self._writer.facts.template:
            return ""
        try:
            return self.rendered(Conversation((ChatMessage("user", "x"),)), prompting=False)
        except RequestError:  # assume that the time differs in each prompt
            return secrets.token_hex(8)

    def call_style(self, eos: tuple[int, ...]) -> CallStyle | None:
        """Return the template's style of calls in answers that `eos` may end; None if unknown."""
        if eos not in self._styles:
            ends = [self.specials.get(token) or self.decoded([token]) for token in (*eos, *self.eos)]
            if self.tool_calls.bare:  # the call is JSON only
                ends += self.specials.values()
            self._styles[eos] = call_style(self.rendered, self.tool_calls, ends)
        return self._styles[eos]

    @cached_property
    def answer_prefix(self) -> str:
        """Special tokens, and text between them, that the template writes before an answer."""
        try:
            prefix = answer_prefix(self.rendered)
        except RequestError:  # there is no chat template
            return ""
        return prefix if any(special in prefix for special in self.specials.values()) else ""

    @cached_property
    def grammar_tokens(self) -> tuple[tuple[str, int], ...]:
        """Tokens, with ids, that are one symbol to the grammar library: special tokens and added `<...>`."""
        added = {id_: text for id_, text, _ in self._writer.facts.added if text[:1] + text[-1:] == "<>"}
        return tuple((text, id_) for id_, text in (self.specials | added).items())

    @property
    def call_tokens(self) -> tuple[int, ...]:
        token = self._writer.facts.markers.get(self.tool_calls.start)
        return () if token is None else (token,)

    def thinks_on(self, prompt: Sequence[int]) -> bool:
        """Return True if the prompt ends inside a thought, so that the answer continues it."""
        if self.markup.think is None:
            return False
        return self.decoded(prompt[-_LONGEST_MARKER:]).rstrip().endswith(self.markup.think[0])

    def spelling(self, tokens: Sequence[int], end: str) -> int:
        """Return the number of last tokens that spell this text; 0 if none spell it and nothing else."""
        wanted, bytes_of = end.encode(errors="replace"), self._writer.facts.tokens.joined
        left = len(wanted)
        for count, token in enumerate(reversed(tokens), 1):
            left -= len(bytes_of((token,)))
            if left <= 0:
                return count if bytes_of(tokens[-count:]) == wanted else 0
        return 0

    def name(self, token: int) -> Name:
        """Return a token's name in log-probabilities. Bytes of an incomplete character show as U+FFFD."""
        if (special := self.specials.get(token)) is not None:
            return special, None
        piece = self._writer.facts.tokens.joined((token,))
        return (piece.decode(errors="replace"), tuple(piece)) if piece else (f"<{token}>", None)

    def detokenizer(self, skip: Collection[int] = (), *, inside: bool = False) -> Detokenizer:
        return Detokenizer(self._writer.facts.tokens, {*self.specials, *skip}, inside=inside)
