"""Programs with a command line: coding agents, `llm`, and two servers that stand between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .bench import HERE, Bench, Check, Output, free_port, post, says, shares

SKY = "The sky is blue."
SAY = f'DO say "{SKY}"'
ANSWER = f"\n{SKY}"  # at the beginning of a line: some programs show the prompt too
FALCON = "FALCON-7749"
SHAPE = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "word": {"type": "string"}},
    "required": ["answer", "word"],
    "additionalProperties": False,
}


def claude(bench: Bench) -> Iterator[Check]:
    home = bench.home()

    def run(prompt: str, *arguments: str) -> Output:
        arguments = ("-p", prompt, *arguments)
        return bench.run(bench.launch("claude", arguments, ["claude", *arguments]), home)

    yield says("text", run(SAY), ANSWER)
    yield says("Bash", run('DO call Bash {"command": "cat secret.txt"}', "--allowedTools", "Bash"), FALCON)
    path = json.dumps({"file_path": str(home / "project" / "secret.txt")})
    yield says("Read", run(f"DO call Read {path}"), FALCON)
    since = len(bench.ledger)
    words = 'DO call Bash {"command": "wc -c secret.txt"}'
    yield says("session goes on", run(words, "-c", "--allowedTools", "Bash"), "12 secret.txt")
    yield shares(bench.ledger[since:])
    stream = run(SAY, "--output-format", "stream-json", "--verbose")
    yield says("stream-json", stream, '"subtype":"success"', SKY)


def claude_too_long(bench: Bench) -> Iterator[Check]:
    home = bench.home()
    found = bench.run(bench.launch("claude", ["-p", SAY], ["claude", "-p", SAY]), home)
    yield says("recognized", found, "Prompt is too long")


def claude_slow(bench: Bench) -> Iterator[Check]:
    """An idle limit below the prefill."""
    limit = {
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "4500",
        "API_FORCE_IDLE_TIMEOUT": "1",
        "ANTHROPIC_BASE_URL": bench.url,
        "CLAUDE_ENABLE_STREAM_WATCHDOG": "1",
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": bench.model,
    }
    yield says("idle limit 4.5 s", bench.run(["claude", "-p", SAY], bench.home(), limit), ANSWER)


def codex_home(bench: Bench, more: str = "") -> Path:
    """A home with the provider as Codex documents it."""
    home = bench.home()
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{bench.model}"\nmodel_provider = "mlxtp"\n[model_providers.mlxtp]\nname = "mlxtp"\n'
        f'base_url = "{bench.url}/v1"\nwire_api = "responses"\n{more}'
    )
    return home


def codex_command(bench: Bench, *arguments: str) -> list[object]:
    arguments = ("exec", "--skip-git-repo-check", *arguments)
    return bench.launch("codex", arguments, ["codex", *arguments])


def codex(bench: Bench) -> Iterator[Check]:
    home = codex_home(bench)
    yield says("text", bench.run(codex_command(bench, SAY), home), ANSWER)
    shell = codex_command(bench, 'DO call exec_command {"cmd": "cat secret.txt"}')
    yield says("shell", bench.run(shell, home), FALCON)
    since = len(bench.ledger)
    again = codex_command(bench, "resume", "--last", 'DO call exec_command {"cmd": "wc -c secret.txt"}')
    yield says("session goes on", bench.run(again, home), "\n12 secret.txt")
    yield shares(bench.ledger[since:])
    patch = "*** Begin Patch\n*** Add File: new.txt\n+MERCURY\n*** End Patch"
    call = json.dumps({"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF"})
    write = codex_command(bench, "--sandbox", "danger-full-access", f"DO call exec_command {call}")
    found = bench.run(write, home)
    new = home / "project" / "new.txt"
    yield Check(
        "patch", new.is_file() and new.read_text() == "MERCURY\n", "" if new.is_file() else found.last()
    )


def codex_plain(bench: Bench) -> Iterator[Check]:
    """The provider alone, without `mlxtp launch`: Codex then offers the hosted web search as well."""
    home = codex_home(bench)

    def run(prompt: str) -> Output:
        return bench.run(["codex", "exec", "--skip-git-repo-check", prompt], home)

    yield says("text", run(SAY), ANSWER)
    yield says("shell", run('DO call exec_command {"cmd": "cat secret.txt"}'), FALCON)


def codex_mcp(bench: Bench) -> Iterator[Check]:
    script = HERE / "libraries" / "mcp_server.py"
    server = f'[mcp_servers.numbers]\ncommand = "{bench.python("clients")}"\nargs = ["{script}"]\n'
    home = codex_home(bench, server)
    found = bench.run(
        codex_command(bench, "--dangerously-bypass-approvals-and-sandbox",
                      'DO call look_up {"n": 5} DO call numbers__look_up {"n": 5} '
                      'DO call mcp__numbers__look_up {"n": 5}'), home)  # fmt: skip
    yield says("MCP tool", found, "FALCON-5")


def codex_schema(bench: Bench) -> Iterator[Check]:
    home = codex_home(bench)
    (home / "shape.json").write_text(json.dumps(SHAPE))
    words = 'DO call exec_command {"cmd": "cat secret.txt"} DO json {"answer": 9, "word": "nine"}'
    found = bench.run(codex_command(bench, "--output-schema", str(home / "shape.json"), words), home)
    yield says("shell, then the schema", found, FALCON, '{"answer": 9, "word": "nine"}')


def codex_slow(bench: Bench) -> Iterator[Check]:
    home = codex_home(bench, "stream_idle_timeout_ms = 4500\nstream_max_retries = 1\n")
    arguments = ["codex", "exec", "--skip-git-repo-check", SAY]
    yield says("idle limit 4.5 s", bench.run(arguments, home), ANSWER)
    since = len(bench.ledger)
    bench.run(arguments, codex_home(bench), interrupt_s=5)
    reasons = [seen.reason for seen in bench.ledger[since:]]
    yield Check("interrupt", reasons[-1:] == ["cancel"], f"requests ended with {reasons}")


def opencode_home(bench: Bench, context: int) -> Path:
    home = bench.home()
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    model = {"name": bench.model, "limit": {"context": context, "output": 8192}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxtp",
        "options": {"baseURL": f"{bench.url}/v1"},
        "models": {bench.model: model},
    }
    (folder / "opencode.json").write_text(
        json.dumps({"model": f"mlxtp/{bench.model}", "provider": {"mlxtp": provider}})
    )
    return home


def opencode_command(bench: Bench, *arguments: str) -> list[object]:
    return bench.launch("opencode", ["run", *arguments], ["opencode", "run", *arguments])


def opencode(bench: Bench) -> Iterator[Check]:
    """The prompt comes by stdin: as an argument it would be quoted."""
    home = opencode_home(bench, bench.context)
    yield says("text", bench.run(opencode_command(bench), home, stdin=SAY), ANSWER)
    path = json.dumps({"filePath": str(home / "project" / "secret.txt")})
    yield says("read", bench.run(opencode_command(bench), home, stdin=f"DO call read {path}"), FALCON)
    since = len(bench.ledger)
    command = json.dumps({"command": "wc -c secret.txt", "description": "Count"})
    again = bench.run(opencode_command(bench, "--continue"), home, stdin=f"DO call bash {command}")
    yield says("bash, session goes on", again, "12 secret.txt")
    yield shares(bench.ledger[since:])


def opencode_full(bench: Bench) -> Iterator[Check]:
    """Settings with a context that is too large: the prompt fits, 8192 tokens of answer do not."""
    found = bench.run(["opencode", "run"], opencode_home(bench, 200_000), stdin=SAY, limit_s=60)
    yield says("8192 tokens of answer do not fit", found, ANSWER)


def aider(bench: Bench) -> Iterator[Check]:
    home = bench.home()
    words = "secret.txt\n```\nMERCURY\n```\n"
    options = [
        "--yes-always",
        "--no-git",
        "--no-check-update",
        "--analytics-disable",
        "--no-show-release-notes",
    ]
    arguments = [*options, "--message", f"DO say {json.dumps(words)}", "secret.txt"]
    plain = ["aider", "--model", f"openai/{bench.model}", "--no-show-model-warnings", *arguments]
    endpoint = {"OPENAI_API_BASE": f"{bench.url}/v1", "OPENAI_API_KEY": "none"}
    found = bench.run(bench.launch("aider", arguments, plain), home, endpoint)
    done = (home / "project" / "secret.txt").read_text() == "MERCURY\n"
    yield Check("edit a file", done, "" if done else found.last())


def continue_cli(bench: Bench) -> Iterator[Check]:
    home = bench.home()
    (home / "config.yaml").write_text(
        "name: mlxtp\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: mlxtp\n    provider: openai\n"
        f"    model: {bench.model}\n    apiBase: {bench.url}/v1\n    apiKey: none\n    roles: [chat]\n"
        "    capabilities: [tool_use]\n"
    )
    cn = ["cn", "--config", str(home / "config.yaml"), "-p"]
    yield says("text", bench.run([*cn, SAY], home), ANSWER)
    path = json.dumps({"filepath": str(home / "project" / "secret.txt")})
    yield says("Read", bench.run([*cn, f"DO call Read {path}"], home), FALCON)


def llm(bench: Bench) -> Iterator[Check]:
    home = bench.home()
    entry = {
        "model_id": "mlxtp",
        "model_name": bench.model,
        "api_base": f"{bench.url}/v1",
        "supports_tools": True,
        "supports_schema": True,
    }
    (home / "extra-openai-models.yaml").write_text(json.dumps([entry]))
    program, told = (
        bench.folder / "llm" / "bin" / "llm",
        {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"},
    )
    yield says("text", bench.run([program, "-m", "mlxtp", SAY], home, told), ANSWER)
    look_up = 'def look_up(n: int) -> str:\n    "Look a number up."\n    return f"FALCON-{n}"'
    tool = [program, "-m", "mlxtp", "--functions", look_up, 'DO call look_up {"n": 5}']
    yield says("tool loop", bench.run(tool, home, told), "FALCON-5")
    schema = [program, "-m", "mlxtp", "--schema", "answer int, word", 'DO json {"answer": 9, "word": "nine"}']
    found = bench.run(schema, home, told)
    try:
        ok = json.loads(found.text) == {"answer": 9, "word": "nine"}
    except ValueError:
        ok = False
    yield Check("schema", ok, "" if ok else found.last()[:150])


ROUTES = ("openai", "hosted_vllm", "ollama_chat", "anthropic")


def litellm(bench: Bench) -> Iterator[Check]:
    home, port = bench.home(), free_port()
    base = {"openai": "/v1", "hosted_vllm": "/v1"}
    models = [
        {"model_name": route, "litellm_params": {"model": f"{route}/{bench.model}", "api_key": "none",
                                                 "api_base": f"{bench.url}{base.get(route, '')}"}}
        for route in ROUTES
    ]  # fmt: skip
    settings = {"model_list": models, "general_settings": {"master_key": "sk-none"}}
    (home / "config.yaml").write_text(json.dumps(settings))
    program = bench.folder / "litellm" / "bin" / "litellm"
    command = [program, "--config", home / "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with bench.server(command, home, {}, f"{url}/health/liveliness", 90):
        for route in ROUTES:
            body = {"model": route, "messages": [{"role": "user", "content": SAY}], "max_tokens": 100}
            for stream in (False, True):
                try:
                    text = post(f"{url}/v1/chat/completions", body | {"stream": stream}, "sk-none")
                    note = "" if "sky" in text else text[-200:]
                except OSError as error:
                    note = str(error)
                yield Check(f"{route}{', streamed' * stream}", not note, note)
