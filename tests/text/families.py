"""Calls as the chat templates of the families write them, by the name of their format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Arguments = Mapping[str, Any]
Written = Sequence[tuple[str, Arguments]]


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


def _json(key: str = "arguments") -> Callable[[int, str, Arguments], str]:
    def call(_: int, name: str, arguments: Arguments) -> str:
        return json.dumps({"name": name, key: arguments}, ensure_ascii=False)

    return call


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


WRITERS: Mapping[str, Callable[[Written], str]] = {
    "json": lambda calls: each(calls, lambda *call: f"<tool_call>\n{_json()(*call)}\n</tool_call>"),
    "llama": lambda calls: each(calls, _json("parameters"), "; "),
    "mistral": lambda calls: each(
        calls,
        lambda _, name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}",
        "",
    ),
    "qwen_xml": lambda calls: _xml(True, calls),
    "seed_oss": lambda calls: _xml(False, calls, "seed:tool_call"),
    "lfm2": lambda calls: "<|tool_call_start|>[" + each(calls, _python_call, ", ") + "]<|tool_call_end|>",
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + each(
            calls,
            lambda index, name, arguments: (
                f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
                f"{json.dumps(arguments)}<|tool_call_end|>"
            ),
            "",
        )
        + "<|tool_calls_section_end|>"
    ),
    "deepseek": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + each(
            calls,
            lambda _, name, arguments: (
                f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
            ),
            "",
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "dsml": lambda calls: (
        f"<{DSML}function_calls>\n"
        + _invoke(DSML, f'<{DSML}parameter name="KEY" string="STRING">VALUE</{DSML}parameter>', calls)
        + f"\n</{DSML}function_calls>"
    ),
    "glm": lambda calls: _pairs("", calls),
    "longcat": lambda calls: _pairs("longcat_", calls),
    "gemma4": lambda calls: each(
        calls, lambda _, name, arguments: f"<|tool_call>call:{name}{_gemma(arguments, QUOTE)}<tool_call|>", ""
    ),
    "function_gemma": lambda calls: each(
        calls,
        lambda _, name, arguments: (
            f"<start_function_call>call:{name}{_gemma(arguments, '<escape>')}<end_function_call>"
        ),
        "",
    ),
    "minimax_m2": lambda calls: (
        "<minimax:tool_call>\n"
        + _invoke("", '<parameter name="KEY">VALUE</parameter>', calls)
        + "\n</minimax:tool_call>"
    ),
    "minimax_m3": _minimax_m3,
    "minicpm5": lambda calls: each(
        calls,
        lambda _, name, arguments: f'<function name="{name}">{tagged(arguments, PARAM, "")}</function>',
    ),
    "muse_spark": lambda calls: (
        "<atem:function_calls>\n"
        + _invoke("atem:", '<atem:parameter name="KEY">VALUE</atem:parameter>', calls)
        + "\n</atem:function_calls>"
    ),
    "command": lambda calls: (
        "<|START_ACTION|>[\n    "
        + each(
            calls,
            lambda index, name, arguments: json.dumps(
                {"tool_call_id": str(index), "tool_name": name, "parameters": arguments}, ensure_ascii=False
            ),
            ",\n    ",
        )
        + "\n]<|END_ACTION|>"
    ),
    "kimi_k3": lambda calls: (
        "<|open|>tools<|sep|>"
        + each(
            calls,
            lambda index, name, arguments: (
                f'<|open|>call tool="{name}" index="{index + 1}"<|sep|>'
                + "".join(
                    f'<|open|>argument key="{key}" type="{kind(value)}"<|sep|>'
                    f"{plain(value)}<|close|>argument<|sep|>"
                    for key, value in arguments.items()
                )
                + "<|close|>call<|sep|>"
            ),
            "",
        )
        + "<|close|>tools<|sep|>"
    ),
    "harmony": lambda calls: each(
        calls,
        lambda _, name, arguments: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            f"{json.dumps(arguments, ensure_ascii=False)}<|call|>"
        ),
        "<|start|>assistant",
    ),
    "nemotron": lambda calls: f"<TOOLCALL>[{each(calls, _json(), ', ')}]</TOOLCALL>",
    "tool_calls": lambda calls: f"<tool_calls>[{each(calls, _json(), ', ')}]</tool_calls>",
    "tool_call": lambda calls: f"<|tool_call|>[{each(calls, _json(), ', ')}]",
    "gigachat": lambda calls: each(calls, lambda *call: f"<|function_call|>{_json()(*call)}", ""),
    "internlm": lambda calls: each(
        calls, lambda *call: f"<|action_start|><|plugin|>\n{_json('parameters')(*call)}<|action_end|>", ""
    ),
    "command_r": lambda calls: f"Action:\n```json\n[{each(calls, _json('parameters'), ', ')}]\n```",
    "apertus": lambda calls: (
        "<|tools_prefix|>["
        + each(calls, lambda _, name, arguments: json.dumps({name: arguments}, ensure_ascii=False), ", ")
        + "]<|tools_suffix|>"
    ),
    "olmo3": lambda calls: f"<function_calls>\n{each(calls, _python_call)}\n</function_calls>",
    "hunyuan3": lambda calls: (
        "<tool_calls:opensource>\n"
        + each(
            calls,
            lambda _, name, arguments: (
                f"<tool_call:opensource>{name}<tool_sep:opensource>\n"
                + "".join(f"{tagged({key: value}, HUNYUAN)}\n" for key, value in arguments.items())
                + "</tool_call:opensource>"
            ),
        )
        + "\n</tool_calls:opensource>"
    ),
    "solar": lambda calls: (
        "<|tool_calls|>"
        + each(
            calls,
            lambda index, name, arguments: (
                f"<|tool_call:begin|>id{index}<|tool_call:name|>{name}<|tool_call:args|>"
                f"{json.dumps(arguments)}<|tool_call:end|>"
            ),
            "",
        )
        + "<|calls|>"
    ),
    "plamo3": lambda calls: (
        "<|plamo:begin_tool_requests:plamo|>"
        + each(
            calls,
            lambda _, name, arguments: (
                "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
                f"{name}<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
                f"<|plamo:msg|>{json.dumps(arguments)}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
            ),
            "",
        )
        + "<|plamo:end_tool_requests:plamo|>"
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
    "dots": lambda calls: (
        "<dots_function_call>\n"
        + _invoke("", '<parameter name="KEY">VALUE</parameter>', calls)
        + "\n</dots_function_call>"
    ),
    "step3": lambda calls: (
        "<｜tool_calls_begin｜>\n"
        + each(
            calls,
            lambda *call: (
                "<｜tool_call_begin｜>function<｜tool_sep｜>"
                + _invoke("steptml:", '<steptml:parameter name="KEY">VALUE</steptml:parameter>', [call[1:]])
                + "<｜tool_call_end｜>"
            ),
        )
        + "\n<｜tool_calls_end｜>"
    ),
}

#: Special tokens in those texts, which no text of an argument can have.
SPECIALS: Mapping[str, Sequence[str]] = {
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "minimax_m3": (M3,),
    "inkling": ("<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>"),
}
