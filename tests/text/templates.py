"""Chat templates, each as small as the traits of a family that it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken

from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..api.conftest import byte_level, save

LISTS = "{% if tools %}# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
XML = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
#: One system message, at the beginning, and a user's message.
QWEN = (
    LISTS + "{% set u = namespace(found=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set u.found = true %}{% endif %}{% endfor %}"
    "{% if not u.found %}{{ raise_exception('No user query.') }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System comes first.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    + XML
    + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
#: User and assistant take turns; calls stand alone, with short ids; the last message is not the assistant's.
MISTRAL = (
    "{% set n = namespace(i=0) %}{% if messages[0].role == 'system' %}[SYSTEM_PROMPT]{{ messages[0].content }}"
    "[/SYSTEM_PROMPT]{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (n.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set n.i = n.i + 1 %}{% endif %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('IDs of length 9') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>"
    "{% else %}{% if loop.last %}{{ raise_exception('user or tool last') }}{% endif %}{{ m.content }}</s>{% endif %}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
#: The first system message alone; one call in a message, whose thoughts are refused beside text. Text beside
#: a call is a thought, and dropped before a later answer.
GPT_OSS = (
    LISTS
    + "{% if messages[0].role == 'system' %}<|start|>developer<|message|>{{ messages[0].content }}<|end|>"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}{% if '<|channel|>final<|message|>' in m.content %}"
    "{{ raise_exception('tags in a message') }}{% endif %}{% if m.tool_calls %}"
    "{% if m.thinking and m.content %}{{ raise_exception('content or thinking') }}{% endif %}"
    "{% set ns = namespace(later=false) %}{% for x in messages[loop.index:] %}"
    "{% if x.role == 'assistant' and not x.tool_calls %}{% set ns.later = true %}{% endif %}{% endfor %}"
    "{% if (m.thinking or m.content) and not ns.later %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking or m.content }}<|end|>{% endif %}{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
    "{{ f.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role not in ('assistant', 'tool')"
    " %}{{ raise_exception('no call before the result') }}{% endif %}<|start|>functions<|message|>"
    "{{ m.content | tojson }}<|end|>{% endif %}{% endfor %}"
)
#: No tools, and the last system message alone.
R1 = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endif %}{% endfor %}{{ ns.s }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
)
#: Tools are listed, calls are not written.
LFM2 = (
    "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}<|im_start|>system\n{{ s }}"
    "{% if tools %}List of tools: <|tool_list_start|>[{{ tools | tojson }}]<|tool_list_end|>{% endif %}<|im_end|>\n"
    "{% for m in rest %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role | upper }}: {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}\n{% endfor %}"
)
#: No system message, and turns.
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
#: Calls by their ids alone.
KIMI = (
    LISTS
    + "{% for m in messages %}<|im_{{ m.role }}|>{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n"
    "{% endif %}{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
)
#: One call at once, without words; results as JSON; arguments have to be text.
LLAMA = (
    LISTS + "{# <|python_tag|> #}{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls at once!') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ "" + f.arguments }}}'
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
#: A switch for thoughts in the texts, which it takes out of them.
SMOL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | replace('/no_think', '') | replace('/think', '')"
    " | trim }}<|im_end|>\n{% endfor %}"
)
#: Thoughts end at the first marker; keys and values of calls in tags of their own.
GLM = (
    LISTS
    + "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}{% endif %}</think>{{ m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}"
    "<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
#: The first system message alone.
MINIMAX = (
    "{% set first = messages[0].role == 'system' %}]~b]system\n{{ messages[0].content if first }}"
    + LISTS
    + "<minimax:tool_call>[e~[{% for m in messages if m.role != 'system' %}]~b]{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    '{% if m.tool_calls %}<minimax:tool_call>{% for c in m.tool_calls %}<invoke name="{{ c.function.name }}">'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}'
    "</parameter>{% endfor %}</invoke>{% endfor %}</minimax:tool_call>{% endif %}[e~[{% endfor %}"
)
#: Thoughts are taken out of texts; results of tools follow their call.
GEMMA4 = (
    "{% macro text(t) %}{% for p in t.split('<channel|>') %}{{ p.split('<|channel>')[0] }}{% endfor %}{% endmacro %}"
    "<|turn>system\n"
    "{% for t in tools or [] %}<|tool>declaration:{{ t.function.name }}{{ t.function | tojson }}<tool|>{% endfor %}<turn|>"
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:{{ m.name }}{value:<|\"|>{{ m.content }}"
    "<|\"|>}<tool_response|>{% else %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.reasoning_content and m.tool_calls %}<|channel>thought\n{{ m.reasoning_content }}<channel|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ c.function.arguments | tojson }}<tool_call|>"
    "{% endfor %}{{ text(m.content) if m.role == 'assistant' else m.content | trim }}<turn|>{% endif %}{% endfor %}"
)
#: The end of most, beside those that have one of their own, or none.
ANSWER = "{% if add_generation_prompt %}<|answer|>{% endif %}"
THINKS = ("<think>", "</think>")
TEMPLATES: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "qwen": (QWEN, ("<|im_start|>", "<|im_end|>"), (*THINKS, "<tool_call>", "</tool_call>")),
    "mistral": (MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ()),
    "gpt-oss": (GPT_OSS, ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>"), ()),
    "r1": (R1, ("<|User|>", "<|Assistant|>"), THINKS),
    "lfm2": (LFM2, ("<|tool_call_start|>", "<|tool_call_end|>"), ()),
    "parts": (PARTS, (), ()),
    "gemma": (GEMMA, (), ()),
    "kimi": (KIMI, ("<|im_end|>",), ()),
    "llama": (LLAMA, (), ()),
    "smol": (SMOL, (), ()),
    "glm": (GLM, (), (*THINKS, "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>")),
    "minimax": (MINIMAX, (), (*THINKS, "<minimax:tool_call>", "</minimax:tool_call>")),
    "gemma4": (GEMMA4, ("<|turn>", "<turn|>", "<|channel>", "<channel|>"), ("<|tool_call>", "<tool_call|>")),
    "deepseek": ("", ("｜DSML｜",), THINKS),
}


def text_of(name: str, folder: Path) -> Text:
    """Return the text of a model in a new folder. DeepSeek's template is mlx-lm's module."""
    template, special, added = TEMPLATES[name]
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in added])
    save(tokenizer, folder, (template and template + ANSWER * (name not in ("qwen", "mistral"))) or None)
    if not template:
        settings = folder / "tokenizer_config.json"
        settings.write_text(
            json.dumps(json.loads(settings.read_text()) | {"chat_template_type": "deepseek_v32"})
        )
    return Text(LocalRenderer.load(folder))
