"""The table: every program, the settings of its engine, and the function that runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import programs, web
from .bench import HERE, VERSIONS, Bench, Check

ROOMY: dict[str, Any] = {}
SMALL: dict[str, Any] = {"context": 16_384, "rambles": True}
"""For structured output: what a grammar leaves open is gone on with."""
SLOW: dict[str, Any] = {"slow": True}


@dataclass(frozen=True)
class Row:
    """One line of the table. `venv` and `package` say what is installed; `node`: a real agent will do."""

    key: str
    app: str
    venv: str
    package: str
    act: Callable[[Bench], Iterator[Check]]
    engine: dict[str, Any]
    node: bool = False

    @property
    def version(self) -> str:
        table = VERSIONS["npm"] if self.venv == "npm" else VERSIONS["pip"][self.venv]
        return str(table[self.package])


def read(output: str) -> Iterator[Check]:
    """The checks among the lines of a script."""
    for line in output.splitlines():
        if line.startswith('{"tried"'):
            yield Check(**json.loads(line))


def python(script: str, venv: str, part: str, bench: Bench) -> Iterator[Check]:
    """A script of the folder `libraries` in the environment `venv`."""
    command = [bench.python(venv), HERE / "libraries" / script, *([part] if part else [])]
    output = bench.run(command, bench.home(), bench.environment, limit_s=300)
    yield from read(output.text)
    if output.code:
        yield Check("run", False, output.last())


def node(script: str, part: str, bench: Bench) -> Iterator[Check]:
    """A JavaScript of the folder `libraries`, beside a link to what npm installed."""
    home = bench.home()
    (home / "node_modules").symlink_to(bench.npm / "node_modules")
    for name in (script, "checks.mjs"):
        shutil.copy(HERE / "libraries" / name, home)
    output = bench.run(
        ["node", home / script, *([part] if part else [])], home, bench.environment, limit_s=300
    )
    yield from read(output.text)
    if output.code:
        yield Check("run", False, output.last())


def library(key: str, app: str, venv: str, package: str, script: str, part: str = "",
            engine: dict[str, Any] = SMALL) -> Row:  # fmt: skip
    act = partial(node, script, part) if venv == "npm" else partial(python, script, venv, part)
    return Row(key, app, venv, package, act, engine, node=engine is SMALL)


CLAUDE, CODEX, SDK = "@anthropic-ai/claude-code", "@openai/codex", "ai"
PYDANTIC_AI, INDEX = "pydantic-ai-slim[openai,anthropic]", "llama-index"
ROWS = [
    Row("claude", "Claude Code", "npm", CLAUDE, programs.claude, ROOMY),
    Row("claude-long", "Claude Code, prompt too long", "npm", CLAUDE, programs.claude_too_long,
        {"context": 50_000}),
    Row("claude-idle", "Claude Code, slow prefill", "npm", CLAUDE, programs.claude_slow, SLOW),
    Row("codex", "Codex", "npm", CODEX, programs.codex, ROOMY),
    Row("codex-schema", "Codex `--output-schema`", "npm", CODEX, programs.codex_schema, ROOMY),
    Row("codex-mcp", "Codex with an MCP server", "npm", CODEX, programs.codex_mcp, ROOMY),
    Row("codex-plain", "Codex, its own settings alone", "npm", CODEX, programs.codex_plain, ROOMY),
    Row("codex-idle", "Codex, slow prefill", "npm", CODEX, programs.codex_slow, SLOW),
    Row("opencode", "opencode", "npm", "opencode-ai", programs.opencode, ROOMY),
    Row("opencode-full", "opencode, context nearly full", "npm", "opencode-ai", programs.opencode_full,
        {"context": 24_000}),
    Row("aider", "aider", "aider", "aider-chat", programs.aider, ROOMY),
    Row("continue", "Continue CLI", "npm", "@continuedev/cli", programs.continue_cli, ROOMY),
    Row("llm", "llm", "llm", "llm", programs.llm, SMALL),
    Row("litellm", "LiteLLM proxy", "litellm", "litellm[proxy]", programs.litellm, ROOMY, node=True),
    library("openai", "OpenAI Python", "clients", "openai", "openai_python.py"),
    library("anthropic", "Anthropic Python", "clients", "anthropic", "anthropic_python.py"),
    library("ollama", "Ollama Python", "clients", "ollama", "ollama_python.py"),
    library("ollama-js", "Ollama JavaScript", "npm", "ollama", "ollama_js.mjs"),
    library("idle", "Official libraries, slow prefill", "clients", "openai", "idle.py", engine=SLOW),
    *(library(f"langchain-{part}", f"LangChain, {name}", "langchain", package, "langchain_python.py", part)
      for part, name, package in (
          ("openai", "OpenAI chat", "langchain-openai"), ("responses", "responses", "langchain-openai"),
          ("anthropic", "Anthropic", "langchain-anthropic"), ("ollama", "Ollama", "langchain-ollama"))),
    library("llama-index", "LlamaIndex", INDEX, f"{INDEX}-core", "llama_index_python.py"),
    *(library(f"pydantic-ai-{part}", f"pydantic-ai, {name}", "pydantic-ai", PYDANTIC_AI,
              "pydantic_ai_python.py", part)
      for part, name in (
          ("chat", "OpenAI chat"), ("responses", "OpenAI responses"), ("anthropic", "Anthropic"))),
    library("instructor", "instructor, every mode but those of other providers", "instructor", "instructor",
            "instructor_python.py"),
    library("dspy", "DSPy", "dspy", "dspy", "dspy_python.py"),
    *(library(f"ai-{part}", f"AI SDK, {name}", "npm", SDK, "ai_sdk.mjs", part)
      for part, name in (
          ("compatible", "openai-compatible"), ("chat", "OpenAI chat"), ("responses", "OpenAI responses"),
          ("anthropic", "Anthropic"))),
    library("ai-idle", "AI SDK, slow prefill", "npm", SDK, "ai_sdk_idle.mjs", engine=SLOW),
    Row("open-webui", "Open WebUI", "open-webui", "open-webui", web.open_webui, ROOMY),
]  # fmt: skip
