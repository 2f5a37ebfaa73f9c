"""Calls as the chat templates of the families write them, by the name of their format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Arguments = Mapping[str, Any]
Written = Sequence[tuple[str, Arguments]]
Writer = Callable[[Written], str]


def plain(value: object) -> str:
    """Return a value as templates write it between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def each(calls: Written, call: Callable[[int, str, Arguments], str], between: str = "\n") -> str:
    return between.join(call(index, name, arguments) for index, (name, arguments) in enumerate(calls))


def tagged(arguments: Arguments, value: str, between: str = "\n") -> str:
    """Return arguments, each with KEY, VALUE and STRING filled into `value`."""
    rows = [
        value.replace("KEY", key)
        .replace("STRING", str(isinstance(each, str)).lower())
        .replace("VALUE", plain(each))
        for key, each in arguments.items()
    ]
    return between.join(rows)


def _invoke(mark: str, value: str, calls: Written) -> str:
    def call(_: int, name: str, arguments: Arguments) -> str:
        inside = "".join(f"{tagged({key: each}, value)}\n" for key, each in arguments.items())
        return f'<{mark}invoke name="{name}">\n{inside}</{mark}invoke>'

    return each(calls, call)


def kind(value: object) -> str:
    return "string" if isinstance(value, str) else "number"


QUOTE = '<|"|>'
PARAM = '<param name="KEY">VALUE</param>'
PARAMETER = '<parameter name="KEY">VALUE</parameter>'
HUNYUAN = "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>"
M3 = "]<]minimax[>["
DSML = "｜DSML｜"


def _minimax_m3(calls: Written) -> str:
    def element(key: str, value: object) -> str:
        inside = plain(value)
        if isinstance(value, Mapping):
            inside = "".join(element(*each) for each in value.items())
        elif isinstance(value, list):
            inside = "".join(element("item", each) for each in value)
        return f"{M3}<{key}>{inside}{M3}</{key}>"

    def call(_: int, name: str, arguments: Arguments) -> str:
        inside = "".join(element(*each) for each in arguments.items())
        return f'{M3}<invoke name="{name}">{inside}{M3}</invoke>\n'

    return f"{M3}<tool_call>\n{each(calls, call, '')}{M3}</tool_call>"


def _gemma(value: object, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{key}:{_gemma(each, quote)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(_gemma(each, quote) for each in value) + "]"
        case _:
            return json.dumps(value)


def _xml(framed: bool, calls: Written, tag: str = "tool_call") -> str:
    value = "<parameter=KEY>\nVALUE\n</parameter>" if framed else "<parameter=KEY>VALUE</parameter>"

    def call(_: int, name: str, arguments: Arguments) -> str:
        inside = "".join(f"{tagged({key: each}, value)}\n" for key, each in arguments.items())
        return f"<{tag}>\n<function={name}>\n{inside}</function>\n</{tag}>"

    return each(calls, call)


def _pairs(prefix: str, calls: Written) -> str:
    value = f"<{prefix}arg_key>KEY</{prefix}arg_key><{prefix}arg_value>VALUE</{prefix}arg_value>"
    return each(
        calls,
        lambda _, name, arguments: (
            f"<{prefix}tool_call>{name}{tagged(arguments, value, '')}</{prefix}tool_call>"
        ),
        "",
    )


def _python_call(_: int, name: str, arguments: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def rows(call: str, between: str = "", around: str = "CALLS", *, ascii_: bool = False) -> Writer:
    """Return a writer of calls, each with NAME, INDEX, NEXT and JSON filled into `call`."""

    def filled(index: int, name: str, arguments: Arguments) -> str:
        row = call.replace("INDEX", str(index)).replace("NEXT", str(index + 1)).replace("NAME", name)
        return row.replace("JSON", json.dumps(arguments, ensure_ascii=ascii_))

    return lambda calls: around.replace("CALLS", each(calls, filled, between))


def invoked(value: str, around: str, mark: str = "") -> Writer:
    return lambda calls: around.replace("CALLS", _invoke(mark, value, calls))


def _kimi_k3(calls: Written) -> str:
    def call(index: int, name: str, arguments: Arguments) -> str:
        inside = "".join(
            f'<|open|>argument key="{key}" type="{kind(value)}"<|sep|>{plain(value)}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        return f'<|open|>call tool="{name}" index="{index + 1}"<|sep|>{inside}<|close|>call<|sep|>'

    return f"<|open|>tools<|sep|>{each(calls, call, '')}<|close|>tools<|sep|>"


def _hunyuan3(calls: Written) -> str:
    def call(_: int, name: str, arguments: Arguments) -> str:
        inside = "".join(f"{tagged({key: value}, HUNYUAN)}\n" for key, value in arguments.items())
        return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{inside}</tool_call:opensource>"

    return f"<tool_calls:opensource>\n{each(calls, call)}\n</tool_calls:opensource>"


def _step3(calls: Written) -> str:
    def call(_: int, *call: Any) -> str:
        inside = _invoke("steptml:", PARAMETER.replace("parameter", "steptml:parameter"), [call])
        return f"<｜tool_call_begin｜>function<｜tool_sep｜>{inside}<｜tool_call_end｜>"

    return f"<｜tool_calls_begin｜>\n{each(calls, call)}\n<｜tool_calls_end｜>"


def _quoted(call: str, quote: str) -> Writer:
    def filled(_: int, name: str, arguments: Arguments) -> str:
        return call.replace("NAME", name).replace("VALUES", _gemma(arguments, quote))

    return lambda calls: each(calls, filled, "")


NAMED = '{"name": "NAME", "arguments": JSON}'
PARAMETERS = NAMED.replace("arguments", "parameters")
DSML_VALUE = f'<{DSML}parameter name="KEY" string="STRING">VALUE</{DSML}parameter>'
ATEM = PARAMETER.replace("parameter", "atem:parameter")
KIMI = "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>"
DEEPSEEK = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"
COMMAND = '{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": JSON}'
HARMONY = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>"
SOLAR = "<|tool_call:begin|>idINDEX<|tool_call:name|>NAME<|tool_call:args|>JSON<|tool_call:end|>"
PLAMO = (
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>JSON"
    "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
)
WRITERS: Mapping[str, Writer] = {
    "json": rows(f"<tool_call>\n{NAMED}\n</tool_call>", "\n"),
    "llama": rows(PARAMETERS, "; "),
    "mistral": rows("[TOOL_CALLS]NAME[ARGS]JSON"),
    "qwen_xml": lambda calls: _xml(True, calls),
    "seed_oss": lambda calls: _xml(False, calls, "seed:tool_call"),
    "lfm2": lambda calls: "<|tool_call_start|>[" + each(calls, _python_call, ", ") + "]<|tool_call_end|>",
    "kimi_k2": rows(KIMI, around="<|tool_calls_section_begin|>CALLS<|tool_calls_section_end|>", ascii_=True),
    "deepseek": rows(DEEPSEEK, around="<｜tool▁calls▁begin｜>CALLS<｜tool▁calls▁end｜>", ascii_=True),
    "dsml": invoked(DSML_VALUE, f"<{DSML}function_calls>\nCALLS\n</{DSML}function_calls>", DSML),
    "glm": lambda calls: _pairs("", calls),
    "longcat": lambda calls: _pairs("longcat_", calls),
    "gemma4": _quoted("<|tool_call>call:NAMEVALUES<tool_call|>", QUOTE),
    "function_gemma": _quoted("<start_function_call>call:NAMEVALUES<end_function_call>", "<escape>"),
    "minimax_m2": invoked(PARAMETER, "<minimax:tool_call>\nCALLS\n</minimax:tool_call>"),
    "minimax_m3": _minimax_m3,
    "minicpm5": lambda calls: each(
        calls, lambda _, name, arguments: f'<function name="{name}">{tagged(arguments, PARAM, "")}</function>'
    ),
    "muse_spark": invoked(ATEM, "<atem:function_calls>\nCALLS\n</atem:function_calls>", "atem:"),
    "command": rows(COMMAND, ",\n    ", "<|START_ACTION|>[\n    CALLS\n]<|END_ACTION|>"),
    "kimi_k3": _kimi_k3,
    "harmony": rows(HARMONY, "<|start|>assistant"),
    "nemotron": rows(NAMED, ", ", "<TOOLCALL>[CALLS]</TOOLCALL>"),
    "tool_calls": rows(NAMED, ", ", "<tool_calls>[CALLS]</tool_calls>"),
    "tool_call": rows(NAMED, ", ", "<|tool_call|>[CALLS]"),
    "gigachat": rows(f"<|function_call|>{NAMED}"),
    "internlm": rows(f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>"),
    "command_r": rows(PARAMETERS, ", ", "Action:\n```json\n[CALLS]\n```"),
    "apertus": rows('{"NAME": JSON}', ", ", "<|tools_prefix|>[CALLS]<|tools_suffix|>"),
    "olmo3": lambda calls: f"<function_calls>\n{each(calls, _python_call)}\n</function_calls>",
    "hunyuan3": _hunyuan3,
    "solar": rows(SOLAR, around="<|tool_calls|>CALLS<|calls|>", ascii_=True),
    "plamo3": rows(
        PLAMO, around="<|plamo:begin_tool_requests:plamo|>CALLS<|plamo:end_tool_requests:plamo|>", ascii_=True
    ),
    "inkling": lambda calls: each(
        calls,
        lambda _, name, arguments: (
            f"<|message_model|>{name}<|content_invoke_tool_json|>"
            + json.dumps({"name": name, "args": arguments}, separators=(",", ":"))
            + "<|end_message|>"
        ),
        "",
    ),
    "dots": invoked(PARAMETER, "<dots_function_call>\nCALLS\n</dots_function_call>"),
    "step3": _step3,
}

#: Special tokens in those texts, which no text of an argument can have.
SPECIALS: Mapping[str, Sequence[str]] = {
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "minimax_m3": (M3,),
    "inkling": ("<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>"),
}
