"""`mlxtp launch`: starts another program with the settings to use this Mac's endpoint."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import Code, UserError, why_not_written
from ..short_names import stands_for
from .options import Home
from .printing import home_of, print_answer, typed, when_started

# --- programs: the settings of each one, as a pure function of what is served ----------------------------

NO_KEY = "none"  # sent where the endpoint needs no key, because clients insist on one
KEY_VARIABLE = "MLXTP_API_KEY"  # holds a program's key; MLXTP_KEY is read by mlxtp's own commands
PATIENCE_MS = 3_600_000  # a long prompt takes minutes before its first token
OPENCODE_CONTEXT = 32_768  # tokens: its own prompt takes 21,000
LEAST_OUTPUT, MOST_OUTPUT = 4096, 32_000  # tokens of one reply

Variables = Mapping[str, str | None]  # of an environment; None unsets one


@dataclass(frozen=True, slots=True)
class Served:
    url: str  #: without a path
    model: str
    context: int  #: tokens
    key: str = ""
    certificate: str = ""  #: path of a certificate that clients must trust
    folder: Path = Path()  #: for the files that `launch` writes
    features: frozenset[str] = frozenset()  #: as in `/v1/models`, such as "tools"


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of one program."""

    variables: Variables
    arguments: tuple[str, ...] = ()  #: before the user's own
    files: Mapping[Path, Any] = field(default_factory=dict)  #: JSON by path


@dataclass(frozen=True, slots=True)
class Program:
    command: str
    install: str
    setup: Callable[[Served], Setup]
    least_context: int  #: tokens; with fewer, its instructions and tools leave no room to work
    elsewhere: tuple[str, ...] = ()  #: places outside of PATH where its installers put it


def output_limit(context: int) -> int:
    """Return the tokens to reserve for one reply. Agents compact a conversation that leaves fewer."""
    return max(min(max(context // 8, LEAST_OUTPUT), MOST_OUTPUT, context // 2), 1)


def claude(served: Served) -> Setup:
    """Claude Code: https://code.claude.com/docs/en/env-vars and its pages on gateways and models."""
    model = served.model
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or NO_KEY,  # sent as `Authorization: Bearer`
        "ANTHROPIC_MODEL": model,
        # Claude Code names models by size; here one serves for all.
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,  # older versions' name for the Haiku model
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),  # it assumes 200,000 for unknown models
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(output_limit(served.context)),  # it assumes 32,000 for replies
        "API_TIMEOUT_MS": str(PATIENCE_MS),  # until a reply begins; 600,000 by default
        # The longest wait for an event other than a ping; 300,000 by default.
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE_MS),
        "API_FORCE_IDLE_TIMEOUT": "0",  # turns off the limit of its HTTP client, 300 s
        # Updates, telemetry and reports go to Anthropic.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Removes a line atop the system prompt that changes with each request, so that caches match.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # Credentials and switches for other providers.
        "ANTHROPIC_API_KEY": None,
        "CLAUDE_CODE_OAUTH_TOKEN": None,
        "CLAUDE_CODE_USE_BEDROCK": None,
        "CLAUDE_CODE_USE_VERTEX": None,
        "CLAUDE_CODE_USE_FOUNDRY": None,
    }
    return Setup(variables | _trusted(served, "NODE_EXTRA_CA_CERTS"))


def codex(served: Served) -> Setup:
    """Codex: a provider by `-c`, and a catalog of one model; without it Codex warns of missing metadata."""
    catalog = served.folder / "codex-models.json"
    provider = {
        "name": "mlxtp",
        "base_url": f"{served.url}/v1",
        "wire_api": "responses",
        "env_key": KEY_VARIABLE,
        "stream_idle_timeout_ms": PATIENCE_MS,
    }
    config = {
        "model": served.model,
        "model_provider": "mlxtp",
        "model_context_window": served.context,
        "model_catalog_json": str(catalog),
        "web_search": "disabled",  # OpenAI runs it, this server does not
        **{f"model_providers.mlxtp.{name}": value for name, value in provider.items()},
    }
    arguments = [part for name, value in config.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    variables = {KEY_VARIABLE: served.key or NO_KEY} | _trusted(served, "CODEX_CA_CERTIFICATE")
    return Setup(variables, tuple(arguments), {catalog: {"models": [_codex_model(served)]}})


#: Codex has 17,000 characters of instructions for unknown models, and none for models of a catalog.
CODEX_INSTRUCTIONS = (
    "You are a coding agent. You run in the Codex CLI on the user's computer and work in the user's folder. "
    "Use the tools to read files, run commands and change files; do not ask the user to do it. Read what you "
    "are going to change before you change it. Keep changes small and in the style of the code around them, "
    "and follow AGENTS.md files. Check your work, with the project's tests where there are some. Go on until "
    "the task is done, then say briefly what you did. Never claim what you did not see."
)


def _codex_model(served: Served) -> dict[str, Any]:
    return {
        "slug": served.model,
        "display_name": served.model,
        "description": "Served by mlxtp",
        "base_instructions": CODEX_INSTRUCTIONS,
        "context_window": served.context,
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, served.context // 8)},  # of tool output
        "input_modalities": ["text"],
        "shell_type": "unified_exec",
        "supports_parallel_tool_calls": True,
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "supported_in_api": True,
        "visibility": "list",
        "priority": 1,
    }


def opencode(served: Served) -> Setup:
    """opencode: a provider in the configuration that overrides any file."""
    model = {
        "name": served.model,
        "limit": {"context": served.context, "output": output_limit(served.context)},
        "tool_call": True,
        "reasoning": "reasoning" in served.features,
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "mlxtp": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "mlxtp",
                "options": {"baseURL": f"{served.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
                "models": {served.model: model},
            }
        },
        "model": f"mlxtp/{served.model}",
        "small_model": f"mlxtp/{served.model}",
        # In a smaller context opencode endlessly compacts a conversation that is only its own prompt.
        "compaction": {"auto": served.context >= OPENCODE_CONTEXT},
    }
    key = {KEY_VARIABLE: served.key or NO_KEY}
    content = {"OPENCODE_CONFIG_CONTENT": json.dumps(config, ensure_ascii=False)}
    return Setup(key | content | _trusted(served, "NODE_EXTRA_CA_CERTS"))


def aider(served: Served) -> Setup:
    """aider: LiteLLM's OpenAI client, and a file with the context, which aider cannot look up."""
    name, metadata = f"openai/{served.model}", served.folder / "aider-models.json"
    limits = {
        "max_input_tokens": served.context,
        "max_output_tokens": output_limit(served.context),
        "litellm_provider": "openai",
        "mode": "chat",
    }
    variables = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": served.key or NO_KEY}
    arguments = ("--model", name, "--model-metadata-file", str(metadata), "--no-show-model-warnings")
    return Setup(variables | _trusted(served, "SSL_CERT_FILE"), arguments, {metadata: {name: limits}})


def _trusted(served: Served, variable: str) -> dict[str, str | None]:
    return {variable: served.certificate} if served.certificate else {}


PROGRAMS: Mapping[str, Program] = {
    "claude": Program(
        "claude",
        "https://code.claude.com/docs/en/setup",
        claude,
        65_536,
        ("~/.local/bin/claude", "~/.claude/local/claude"),
    ),
    "codex": Program("codex", "https://developers.openai.com/codex/cli", codex, 32_768),
    "opencode": Program(
        "opencode", "https://opencode.ai/docs", opencode, OPENCODE_CONTEXT, ("~/.opencode/bin/opencode",)
    ),
    "aider": Program("aider", "https://aider.chat/docs/install.html", aider, 8192, ("~/.local/bin/aider",)),
}


# --- the command -----------------------------------------------------------------------------------------

FOLDER = "launch"  # of a home: files for the programs


def launch(
    app_name: Annotated[
        str,
        typer.Argument(
            metavar="APP", help=f"The program: {', '.join(PROGRAMS)}.", autocompletion=lambda: list(PROGRAMS)
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the program, after --.")
    ] = None,
    print_only: Annotated[
        bool,
        typer.Option("--print", help="Print the settings as shell commands instead of starting the program."),
    ] = False,
    key: Annotated[
        str,
        typer.Option(metavar="KEY", help="The API key, where the endpoint requires one; also MLXTP_KEY."),
    ] = "",
    home: Home = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --print: print one JSON object, also for an error.")
    ] = False,
) -> None:
    """Start a coding agent, such as Claude Code, that uses the model served here.

    Its variables and arguments are printed first. Its own files stay as they are, and their settings, such as
    `env` in ~/.claude/settings.json, still apply.
    """
    if as_json and not print_only:
        raise typer.BadParameter("--json goes with --print")
    if app_name not in PROGRAMS:
        with typed():
            raise UserError(f"{app_name} is unknown; known programs: {', '.join(PROGRAMS)}")
    chosen = PROGRAMS[app_name]
    path = "" if print_only else find_program(chosen)
    served = find_served(home_of(home), key or os.environ.get("MLXTP_KEY", ""))
    if served.context < chosen.least_context:
        typer.echo(
            f"mlxtp: {served.model} has a context of {served.context} tokens, of which {app_name} needs "
            f"{chosen.least_context} or more: it will probably fail",
            err=True,
        )
    setup = chosen.setup(served)
    for file, content in setup.files.items():
        _write(file, content)
    if print_only:
        files = [str(file) for file in setup.files]
        answer = {"variables": setup.variables, "arguments": setup.arguments, "files": files}
        print_answer(answer, as_json, "\n".join(as_shell(chosen, setup)))
        return
    typer.echo("\n".join(summary(app_name, served, setup)), err=True)
    given = [chosen.command, *setup.arguments, *(arguments or ())]
    os.execve(path, given, changed(os.environ, setup.variables))


def find_served(home: Path, key: str, name: str = "") -> Served:
    """Return the deployed model `name`, or the default, for clients with `key`. Raises UserError if none."""
    client, status = when_started(home)
    if not status["model"]:
        why = f": {status['reason']}" if status["reason"] else ""
        raise UserError(
            f"no model is loaded ({status['state']}{why}); `mlxtp serve MODEL` loads one, and `mlxtp status` "
            "shows the progress",
            Code.NOT_READY,
        )
    listed = {str(model["id"]): model for model in client.models(key)}
    # The list also has models that a request would load first.
    deployed = deployed_as(name, status["deployments"])
    model = listed.get((deployed[0]["name"] if deployed else name) or status["model"])
    if name and (model is None or not any(each["replicas"]["ready"] for each in deployed)):
        why = deployed[0]["why"] or deployed[0]["state"] if deployed else "it is not deployed"
        ready = [each["model"] for each in status["deployments"] if each["replicas"]["ready"]]
        raise UserError(
            f"{name} is not served: {why}. Ready models: {', '.join(ready) or 'none'}", Code.NOT_READY
        )
    if model is None:
        raise UserError("the model is being replaced; try again", Code.NOT_READY)
    from ..api.endpoint import OWN_CERTIFICATE

    own = home / OWN_CERTIFICATE
    known = bool(client.certificate) and own.is_file() and own.read_text() == client.certificate
    return Served(
        client.url,
        str(model["id"]),
        int(model["context_length"]),
        key,
        str(own) if known else "",
        home / FOLDER,
        frozenset(model.get("supported_features", ())),
    )


def deployed_as(name: str, deployments: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return deployments of this name; if there is none, deployments of the model that it is short for."""
    found = [each for each in deployments if name in (each["name"], each["model"])]
    full = stands_for(name) if name and not found else ""
    return deployed_as(full, deployments) if full else found


def find_program(program: Program) -> str:
    for place in (program.command, *map(os.path.expanduser, program.elsewhere)):
        if found := shutil.which(place):
            return found
    raise UserError(
        f"{program.command} is not installed, or not on PATH; to install it, see {program.install}"
    )


def changed(environment: Mapping[str, str], variables: Variables) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name not in variables}
    return kept | {name: value for name, value in variables.items() if value is not None}


def summary(app_name: str, served: Served, setup: Setup) -> Iterator[str]:
    """Yield the model and the program's settings as lines for people, without keys."""
    gone = [name for name, value in setup.variables.items() if value is None]
    kept = [name for name in setup.variables if name not in gone]
    yield f"mlxtp: {app_name} uses {served.model} ({served.context:,} tokens) at {served.url}"
    width = shutil.get_terminal_size().columns
    for title, names in (("set", kept), ("unset", gone)):
        yield from textwrap.wrap(
            f"  {title}: {' '.join(names)}" if names else "", width, subsequent_indent="    "
        )
    if setup.arguments:
        yield f"  arguments: {shlex.join(setup.arguments)}"
    for file in setup.files:
        yield f"  written: {file}"


def as_shell(program: Program, setup: Setup) -> Iterator[str]:
    """Yield lines for `eval` in sh, bash or zsh. Arguments become a function with the program's name."""
    for name, value in setup.variables.items():
        yield f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
    if setup.arguments:
        yield f'{program.command}() {{ command {program.command} {shlex.join(setup.arguments)} "$@"; }}'


def _write(file: Path, content: object) -> None:
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(why_not_written(error, file.parent)) from None
