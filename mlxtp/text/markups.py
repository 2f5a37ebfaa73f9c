"""Markup of the model families: how each marks thoughts and writes calls. Pure.

The chat template and the vocabulary choose a row, never the model's name. `docs/api.md` lists the families.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

from .call_syntax import CallSyntax, JsonSyntax, NamedSyntax, TaggedSyntax
from .calls import CallFormat
from .json_mender import PYTHON_QUOTES

# --- thoughts ---------------------------------------------------------------------------------------------

USUAL_THINK = ("<think>", "</think>")  #: Templates of models with other markers know them too.


@dataclass(frozen=True, slots=True)
class Markup:
    """A model's markers, which no client sees."""

    think: tuple[str, str] | None = None  #: before and after a thought
    wrappers: tuple[str, ...] = ()  #: around an answer
    headers: tuple[str, ...] = ()  #: special tokens that begin a message's header
    header_end: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a template may cut out of messages, or refuse: these or the usual markers."""
        opens, closes = self.think or USUAL_THINK
        answer = f"{self.headers[-1]}final{self.header_end}" if self.headers else ""
        return tuple(dict.fromkeys(filter(None, (opens.partition(">")[0] + ">", opens, closes, answer))))


NO_MARKUP = Markup()


@dataclass(frozen=True, slots=True)
class ThoughtRow:
    """One markup of thoughts. All `tokens` or `texts` show it, if the template also has all `needed`."""

    families: str
    markup: Markup
    tokens: tuple[str, ...]
    texts: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()


def _tags(families: str, opens: str, closes: str, *wrappers: str, texts: tuple[str, ...] = ()) -> ThoughtRow:
    return ThoughtRow(families, Markup((opens, closes), wrappers), (opens, closes), (opens, closes), texts)


_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>")
_ATEM = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

# fmt: off
THOUGHTS: Sequence[ThoughtRow] = (
    ThoughtRow("gpt-oss", Markup(("<|channel|>analysis<|message|>", "<|end|>"), (),
               ("<|start|>", "<|channel|>"), "<|message|>"), _HARMONY),
    ThoughtRow("Muse Spark", Markup(("<|start|>assistant to=self<|message|>", "<|eom|>"), (), ("<|start|>",),
               "<|message|>"), _ATEM),
    ThoughtRow("Kimi K3", Markup(("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
               ("<|open|>response<|sep|>", "<|close|>response<|sep|>")), _XTML),
    ThoughtRow("Gemma 4", Markup(("<|channel>thought", "<channel|>")), ("<|channel>", "<channel|>")),
    _tags("Seed-OSS", "<seed:think>", "</seed:think>"),
    _tags("Command A and R7B", "<|START_THINKING|>", "<|END_THINKING|>"),
    _tags("Magistral, Ministral 3", "[THINK]", "[/THINK]"),
    _tags("MiniMax M3", "<mm:think>", "</mm:think>"),
    _tags("LongCat", "<longcat_think>", "</longcat_think>"),
    _tags("Hunyuan 3", "<think:opensource>", "</think:opensource>"),
    _tags("Apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    _tags("Inkling", "<|content_thinking|>", "<|end_message|>"),
    _tags("Solar Open", "<|think|>", "<|end|>", "<|begin|>assistant<|content|>",
          texts=("<|begin|>", "<|content|>")),
    _tags("PLaMo 3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    _tags("Kimi-VL", "◁think▷", "◁/think▷"),
    _tags("EXAONE Deep", "<thought>", "</thought>"),
    _tags("Granite 3.2", "Here is my thought process:", "Here is my response:"),
    _tags("Apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    _tags("Hunyuan, GLM-4.1V", "<think>", "</think>", "<answer>", "</answer>", texts=("<answer>",)),
    _tags("Granite 3.3, ERNIE 4.5", "<think>", "</think>", "<response>", "</response>",
          texts=("<response>",)),
    _tags("Qwen, DeepSeek, GLM, Kimi K2, MiniMax M2, Nemotron and most others", "<think>", "</think>"),
    _tags("models with `<|think:start|>`", "<|think:start|>", "<|think:end|>"),
)
# fmt: on


def thought_markup(template: str, vocabulary: Container[str]) -> Markup:
    for row in THOUGHTS:
        shown = all(token in vocabulary for token in row.tokens)
        written = bool(row.texts) and all(text in template for text in row.texts)
        if (shown or written) and all(text in template for text in row.needed):
            return row.markup
    return NO_MARKUP


# --- calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallRow:
    """One markup of calls. One group of `texts`, or the start, in the template shows it, or all `tokens`."""

    families: str
    format: CallFormat
    texts: tuple[tuple[str, ...], ...] = ()
    tokens: tuple[str, ...] = ()


_JSON = JsonSyntax()
_PYTHON = NamedSyntax(("{}(",), opening="(", quotes=PYTHON_QUOTES, plain=True)
_QWEN_XML = TaggedSyntax(
    ("<function={}>", '<function="{}">', '<function name="{}">'),
    ("<parameter",),
    "</function>",
    re.compile(r"<parameter(?:=|\s+name\s*=\s*)(?P<key>[^>\n]+)>"),
    "</parameter>",
    framed=True,
)


def _invoke(space: str = "", guess: bool = False, before: str = "") -> TaggedSyntax:
    """Return the syntax of `<invoke name="…">`; `space` begins the names of its tags."""
    opens, closes = f"<{space}", f"</{space}"
    value = (
        rf'{re.escape(opens)}parameter\s+name=(?P<key>"[^"]*"|[^\s>]+)(?:\s+string="(?P<type>[^"]*)")?[^>]*>'
    )
    return TaggedSyntax(
        (f'{before}{opens}invoke name="{{}}">', f"{before}{opens}invoke name={{}}>"),
        (f"{opens}parameter",),
        f"{closes}invoke>",
        re.compile(value),
        f"{closes}parameter>",
        guess=guess,
    )


def _pairs(prefix: str = "", suffix: str = "", before: str = "{}") -> TaggedSyntax:
    """Return GLM's syntax: tags around each key and each value, named with a prefix or suffix."""
    key, value = f"{prefix}arg_key{suffix}", f"{prefix}arg_value{suffix}"
    return TaggedSyntax(
        (before,),
        (f"<{key}>",),
        f"</{prefix}tool_call{suffix}>",
        re.compile(rf"<{key}>(?P<key>[^<]*)</{key}>(?:\s*<{value}>)?"),
        f"</{value}>",
        gap=None,
        guess=True,
    )


def _in(name: str, start: str, end: str, *syntaxes: CallSyntax, direct: tuple[str, ...] = ()) -> CallFormat:
    """Return a format with one start and one end. The model may write JSON between them too."""
    return CallFormat(name, (start,), (end,) if end else (), tuple(dict.fromkeys((*syntaxes, _JSON))), direct)


#: Format of Hermes and Qwen. Models without a format of their own are asked to use it.
JSON_CALLS = CallFormat(
    "json",
    ("<tool_call>",),
    ("</tool_call>",),
    (_JSON, _QWEN_XML),
    ('{"name": "', '{"name":"'),
    streams=True,
    past='\n{"name": "NAME", "arguments": ARGUMENTS}\n',
)
_M3, _DSML = "]<]minimax[>[", "｜DSML｜"
_FENCED = re.compile(r"\s*(?:```(?:json)?)?\s*")

# fmt: off
CALLS: Sequence[CallRow] = (
    CallRow("MiniMax M3", _in(
        "minimax_m3", f"{_M3}<tool_call>", f"{_M3}</tool_call>",
        TaggedSyntax((f'{_M3}<invoke name="{{}}">',), (f"{_M3}<",), f"{_M3}</invoke>",
                     re.compile(rf"{re.escape(_M3)}<(?P<key>[^<>/\s]+)>"), f"{_M3}</{{}}>", gap=None,
                     nested=True),
        direct=(f"{_M3}<invoke name=",)),
        ((_M3,),), (_M3,)),
    CallRow("MiniMax M2", _in(
        "minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>", _invoke(), direct=("<invoke name=",))),
    CallRow("DeepSeek V3.2, V4", CallFormat(
        "dsml", (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
        (f"</{_DSML}function_calls>", f"</{_DSML}tool_calls>"), (_invoke(_DSML), _JSON),
        (f"<{_DSML}invoke name=",)),
        (("DSML", "invoke name="),), (_DSML,)),
    CallRow("DeepSeek V3, V3.1, R1", CallFormat(
        "deepseek", ("<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>"),
        ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        (NamedSyntax(("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n", "function<｜tool▁sep｜>{}\n",
                      "<｜tool_call_begin｜>function<｜tool_sep｜>{}\n",
                      "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>"), _FENCED), _JSON),
        ("<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>"))),
    CallRow("Gemma 4", _in(
        "gemma4", "<|tool_call>", "<tool_call|>",
        NamedSyntax(("call:{}{", "call:{}("), opening="{(", quotes=('<|"|>', '"', "'"), plain=True),
        direct=("call:{}{",)),
        (("<|tool_call>", "<tool_call|>"),)),
    CallRow("FunctionGemma", _in(
        "function_gemma", "<start_function_call>", "<end_function_call>",
        NamedSyntax(("call:{}{", "call:{}("), opening="{(", quotes=("<escape>", '"', "'")))),
    CallRow("LongCat", _in("longcat", "<longcat_tool_call>", "</longcat_tool_call>", _pairs("longcat_"))),
    CallRow("GLM 4.5 to 5, Laguna", _in(
        "glm", "<tool_call>", "</tool_call>", _pairs(), direct=("{}<arg_key>", "{}\n<arg_key>")),
        (("<arg_key>",),)),
    CallRow("LFM2, MiniCPM 3", CallFormat(
        "lfm2", ("<|tool_call_start|>",), ("<|tool_call_end|>",), (_PYTHON, _JSON), bare="["),
        (("<|tool_list_start|>",), ("<|tool_call_start|>",)), ("<|tool_call_start|>", "<|tool_call_end|>")),
    CallRow("Seed-OSS", _in(
        "seed_oss", "<seed:tool_call>", "</seed:tool_call>",
        TaggedSyntax(("<function={}>",), ("<parameter",), "</function>",
                     re.compile(r"<parameter=(?P<key>[^>\n]+)>"), "</parameter>"),
        direct=("<function=",))),
    CallRow("Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5", _in(
        "qwen_xml", "<tool_call>", "</tool_call>", _QWEN_XML, direct=("<function=",)),
        (("<tool_call>", "<function="),)),
    CallRow("Kimi K2", CallFormat(
        "kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        ("<|tool_call_end|>", "<|tool_call_section_end|>", "<|tool_calls_section_end|>"),
        (NamedSyntax(("<|tool_call_begin|>functions.{}:", "<|tool_call_begin|>{}:",
                      "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>",
                      "<|tool_call_begin|>{}<|tool_call_argument_begin|>"),
                     re.compile(r"\s*(?P<number>\d+)?\s*(?:<\|tool_call_argument_begin\|>)?")),),
        ("<|tool_call_begin|>",),
        past="<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>")),
    CallRow("MiniCPM5", CallFormat(
        "minicpm5", (), (),
        (TaggedSyntax(('<function name="{}">', "<function name='{}'>", "<function name={}>"), ("<param",),
                      "</function>",
                      re.compile(r"<param\s+name\s*=\s*(?P<key>\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>"),
                      "</param>", gap=""),),
        ("<function name=",)),
        (('<function name="', '<param name="'),)),
    CallRow("Mistral", _in(
        "mistral", "[TOOL_CALLS]", "",
        NamedSyntax(("{}[ARGS]", "{}[CALL_ID]", "{}{"), re.compile(r"\s*(?:\w+\s*\[ARGS\])?\s*")),
        direct=("{}[ARGS]",))),
    CallRow("Muse Spark", _in(
        "muse_spark", "<atem:function_calls>", "</atem:function_calls>", _invoke("atem:", guess=True),
        direct=("<atem:invoke name=",))),
    CallRow("Command A and R7B", _in("command", "<|START_ACTION|>", "<|END_ACTION|>")),
    CallRow("Nemotron Nano 2, Llama Nemotron", _in("nemotron", "<TOOLCALL>", "</TOOLCALL>")),
    CallRow("Hunyuan 3", CallFormat(
        "hunyuan3", ("<tool_calls:opensource>", "<tool_call:opensource>"), ("</tool_calls:opensource>",),
        (_pairs("", ":opensource", "{}<tool_sep:opensource>"), _JSON)),
        (("<tool_sep:opensource>",),), ("<tool_sep:opensource>",)),
    CallRow("Hunyuan, Jamba, Apriel, MiniMax M1", CallFormat(
        "tool_calls", ("<tool_calls>",), ("</tool_call>", "</tool_calls>"),
        (_JSON, NamedSyntax(("<tool_call>{}",), _FENCED)))),
    CallRow("Granite 3, Phi-4-mini", CallFormat(
        "tool_call", ("<|tool_call|>", "functools", "<tool_call>"),
        ("<|/tool_call|>", "</tool_call>", "<|/tool_call|>"), (_JSON,)),  # templates write the last
        (("<|tool_call|>",), ("functools",)), ("<|tool_call|>",)),
    CallRow("Apertus", _in("apertus", "<|tools_prefix|>", "<|tools_suffix|>", JsonSyntax(keyed=True))),
    CallRow("OLMo 3", _in("olmo3", "<function_calls>", "</function_calls>", _PYTHON)),
    CallRow("InternLM 2", _in("internlm", "<|action_start|><|plugin|>", "<|action_end|>"),
        (("<|action_start|>",),), ("<|action_start|>", "<|plugin|>")),
    CallRow("Solar Open", CallFormat(
        "solar", ("<|tool_calls|>",), ("<|tool_call:end|>", "<|calls|>"),
        (NamedSyntax(("<|tool_call:name|>{}<|tool_call:args|>",)), _JSON), id_mark="<|tool_call:begin|>"),
        (("<|tool_call:begin|>",),)),
    CallRow("GigaChat 3", _in("gigachat", "<|function_call|>", "")),
    CallRow("PLaMo 3", CallFormat(
        "plamo3", ("<|plamo:begin_tool_requests:plamo|>",),
        ("<|plamo:end_tool_arguments:plamo|>", "<|plamo:end_tool_request:plamo|>",
         "<|plamo:end_tool_requests:plamo|>"),
        (NamedSyntax(("<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{}"
                      "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>",),
                     re.compile(r"(?:<\|plamo:constrain\|>\w*<\|plamo:msg\|>)?\s*")), _JSON)),
        (("<|plamo:begin_tool_request",),)),
    CallRow("Inkling", CallFormat(
        "inkling", (), ("<|end_message|>",),
        (NamedSyntax(("{}<|content_invoke_tool_json|>",), wrapper="args"),),
        ("{}<|content_invoke_tool_json|>",)),
        (("<|content_invoke_tool_json|>",),), ("<|content_invoke_tool_json|>",)),
    CallRow("dots", _in(
        "dots", "<dots_function_call>", "</dots_function_call>", _invoke(), direct=("<invoke name=",))),
    CallRow("Step 3", CallFormat(
        "step3", ("<｜tool_calls_begin｜>",), ("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        (_invoke("steptml:", before="<｜tool_call_begin｜>function<｜tool_sep｜>"), _invoke("steptml:"),
         _JSON)),
        (("steptml",),)),
    CallRow("Command R", _in("command_r", "Action:", ""), (("Action:", "```json"),)),
    CallRow("Kimi K3", _in(
        "kimi_k3", "<|open|>tools<|sep|>", "<|close|>tools<|sep|>",
        TaggedSyntax(('<|open|>call tool="{}"',), ("index=", "<|sep|>"), "<|close|>call<|sep|>",
                     re.compile(r'<\|open\|>argument\s+key="(?P<key>[^"]*)"(?:\s+type="(?P<type>[^"]*)")?'
                                r"[^<]*<\|sep\|>"),
                     "<|close|>argument<|sep|>", gap="",
                     before_values=re.compile(r'^\s*(?:index="[^"]*")?\s*(?:<\|sep\|>)?'))),
        tokens=_XTML),
    CallRow("gpt-oss", CallFormat(
        "harmony", ("<|channel|>commentary to=",), ("<|call|>",), (NamedSyntax(("{}<|message|>",)),),
        addressed=True), tokens=_HARMONY),
    CallRow("Hermes, Qwen 2.5 and 3, and most others", JSON_CALLS),
    CallRow("Llama 3 and 4", CallFormat(
        "llama", ("<|python_tag|>", "<|python_start|>", "<|python_end|>"), ("<|eom_id|>",), (_JSON, _PYTHON),
        bare="{[", streams=True),
        (('"parameters": dictionary of argument name',), ("<|python_tag|>",), ("<|python_start|>",))),
)
# fmt: on


def call_format(template: str, vocabulary: Container[str]) -> CallFormat | None:
    """Return the format of the model's calls; None if neither template nor vocabulary shows one."""
    for row in CALLS:
        if any(all(text in template for text in group) for group in row.texts or ((row.format.start,),)):
            return row.format
    for row in CALLS:
        if row.tokens and all(token in vocabulary for token in row.tokens):
            return row.format
    return None


#: Tokens that show a markup or begin calls: the only part of a vocabulary that an agent needs.
MARKERS = frozenset(
    [token for row in THOUGHTS for token in row.tokens]
    + [text for row in CALLS for text in (*row.tokens, *row.format.starts)]
)
