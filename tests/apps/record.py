"""The files in `recordings`, made short from what `make apps APPS_ARGS="--record FOLDER"` left.

`python -m tests.apps.record FOLDER` writes every file that PICKS names again. Those in `vectors` are what
Open WebUI 0.12.4 sent for a document, with models for vectors in place of the actor, and were copied by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).with_name("recordings")
LONGEST = 160  # characters of a string that is kept whole
MOST_TOOLS = 2  # beside those that are called, and one of each type
NINE: dict[str, Any] = {"json": {"answer": 9, "word": "nine"}}
BLUE, FALCON = {"text": "The sky is blue."}, {"text": "FALCON-7749"}


def call(name: str) -> dict[str, Any]:
    return {"call": name}


PICKS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "plain": {
        "claude_code_text": ("claude/0000", BLUE),
        "claude_code_bash": ("claude/0001", call("Bash")),
        "claude_code_result": ("claude/0002", FALCON),
        "claude_code_session": ("claude/0006", {"text": "12 secret.txt"}),
        "opencode_title": ("opencode/0002", {"text": "The actor has read"}),
        "opencode_read": ("opencode/0003", call("read")),
        "opencode_result": ("opencode/0004", FALCON),
        "aider_edit": ("aider/0000", {"text": "MERCURY"}),
        "continue_read": ("continue/0001", call("Read")),
        "continue_result": ("continue/0002", FALCON),
        "llm_tool": ("llm/0001", call("look_up")),
        "llm_result": ("llm/0002", {"text": "FALCON-5"}),
        "litellm_ollama_stream": ("litellm/0005", BLUE),
        "litellm_anthropic_stream": ("litellm/0007", BLUE),
        "ollama_python_result": ("ollama/0005", {"text": "FALCON-5"}),
        "ollama_js_tool": ("ollama-js/0003", call("look_up")),
        "langchain_ollama_result": ("langchain-ollama/0003", {"text": "FALCON-5"}),
        "llama_index_tool": ("llama-index/0003", call("look_up")),
        "pydantic_ai_anthropic_result": ("pydantic-ai-anthropic/0003", {"text": "FALCON-5"}),
        "ai_sdk_responses_result": ("ai-responses/0004", {"text": "FALCON-5"}),
        "ai_sdk_anthropic_tool": ("ai-anthropic/0003", call("look_up")),
        "open_webui_stream": ("open-webui/0001", BLUE),
    },
    "codex": {
        "text": ("codex-idle/0000", BLUE),
        "shell": ("codex/0001", call("exec_command")),
        "shell_result": ("codex/0002", FALCON),
        "session": ("codex/0004", {"text": "12 secret.txt"}),
        "mcp_tool": ("codex-mcp/0000", call("look_up")),
        "mcp_result": ("codex-mcp/0001", {"text": "FALCON-5"}),
        "schema_shell": ("codex-schema/0000", call("exec_command")),
        "schema_answer": ("codex-schema/0001", NINE),
    },
    "structured": {
        "llm_schema": ("llm/0003", NINE),
        "ollama_python_format": ("ollama/0006", NINE),
        "ollama_js_format": ("ollama-js/0005", NINE),
        "openai_parse": ("openai/0005", NINE),
        "openai_beside_tools": ("openai/0007", NINE),
        "anthropic_forced": ("anthropic/0004", NINE),
        "anthropic_parse": ("anthropic/0005", NINE),
        "instructor_tools": ("instructor/0000", NINE),
        "instructor_json_schema": ("instructor/0004", NINE),
        "instructor_responses_tools": ("instructor/0006", NINE),
        "instructor_anthropic_tools": ("instructor/0007", NINE),
        "langchain_function_calling": ("langchain-openai/0004", NINE),
        "langchain_agent": ("langchain-openai/0007", call("look_up")),
        "langchain_anthropic": ("langchain-anthropic/0004", NINE),
        "llama_index": ("llama-index/0005", NINE),
        "pydantic_ai_anthropic": ("pydantic-ai-anthropic/0004", NINE),
        "pydantic_ai_beside_tools": ("pydantic-ai-chat/0006", call("look_up")),
        "ai_sdk_beside_tools": ("ai-compatible/0006", call("look_up")),
        "ai_sdk_anthropic": ("ai-anthropic/0005", NINE),
    },
}
"""By group and name: the row and the number of the request, and what the actor is to answer."""


def trimmed(value: Any, called: str) -> Any:
    """The same shape with short strings and few tools. `called`: the text that names the used tools."""
    if isinstance(value, str):
        text = re.sub(r"/tmp/apps-\w+", "/home/user", value)
        text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "0" * 8, text)
        text = re.sub(r"[0-9a-f]{32,}", "0" * 8, text)
        return text if len(text) <= LONGEST or "DO " in text else f"{text[:LONGEST]} …"
    if isinstance(value, list):
        return [trimmed(each, called) for each in value]
    if isinstance(value, Mapping):
        kept = dict(value)
        if isinstance(tools := kept.get("tools"), list):
            kept["tools"] = few(tools, called)
        return {key: trimmed(each, called) for key, each in kept.items()}
    return value


def few(tools: list[Any], called: str) -> list[Any]:
    """The first tools, those that are called, and one of each type."""
    found, types = [], set()
    for at, tool in enumerate(tools):
        each = [tool, tool.get("function") or {}, *(tool.get("tools") or [])]
        used = any(f"call {one['name']} " in called for one in each if "name" in one)
        if at < MOST_TOOLS or used or tool.get("type") not in types:
            found.append(tool)
        types.add(tool.get("type"))
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    for group, picks in PICKS.items():
        (RECORDINGS / group).mkdir(parents=True, exist_ok=True)
        for name, (source, expected) in picks.items():
            recorded = json.loads((folder / f"{source}.json").read_text())
            body = trimmed(recorded["body"], json.dumps(recorded["body"]))
            kept = {"path": recorded["path"], "expected": expected, "body": body}
            text = json.dumps(kept, indent=1, ensure_ascii=False)
            (RECORDINGS / group / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
