"""A `sandbox-exec` that confines nothing: `fake_sandbox.py NOTES <arguments of sandbox-exec>`.

It reads its arguments as macOS does, writes down its rules as lists with all parameters replaced, and becomes
the command. That one writes down the files that Python opens. While NOTES/refuse exists, it refuses.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

_TOKEN = re.compile(r'\s*(?:([()])|"((?:[^"\\]|\\.)*)"|([^\s()"]+))', re.DOTALL)

WATCH = """
import os, sys
log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        os.write(log, f"{{arguments[2] & os.O_ACCMODE}} {{path!r}}\\n".encode())
sys.addaudithook(note)
"""


def rules_of(arguments: list[str]) -> tuple[list[list[object]], list[str]]:
    """Return the rules of these arguments of `sandbox-exec`, and the command behind them.

    Raises AssertionError for a profile that is not well-formed, and for parameters without use or value.
    """
    profile, values, rest = "", {}, list(arguments)
    while rest[0] in ("-p", "-D"):
        flag, value, *rest = rest
        if flag == "-p":
            assert not profile
            profile = value
        else:
            name, _, values[name] = value.partition("=")
    levels: list[list[object]] = [[]]
    at = 0
    text = re.sub(r";[^\n]*", "", profile).rstrip()
    while at < len(text):
        token = _TOKEN.match(text, at)
        assert token, text[at:]
        at = token.end()
        mark, string, atom = token.groups()
        if mark == "(":
            levels.append([])
        elif mark == ")":
            assert len(levels) > 1, "closed too often"
            done = levels.pop()
            levels[-1].append(done)
        else:
            levels[-1].append(atom if string is None else ["string", string])
    assert len(levels) == 1, "not closed"
    used: set[str] = set()

    def replaced(node: object) -> object:
        if not isinstance(node, list):
            return node
        if node[0] == "string":
            return node[1]
        if node[0] == "param":
            name = node[1][1]
            used.add(name)
            return values[name]
        return [replaced(each) for each in node]

    rules = [replaced(rule) for rule in levels[0]]
    assert used == values.keys()
    return rules, rest  # type: ignore[return-value]


def main() -> None:
    notes, arguments = Path(sys.argv[1]), sys.argv[2:]
    if (notes / "refuse").exists():
        sys.exit("sandbox-exec: profile:12: unbound variable: xpc-service-name")
    rules, command = rules_of(arguments)
    name = f"{len(list(notes.glob('*.json')))}-{os.getpid()}"
    places = [os.environ["HOME"], os.environ.pop("TMPDIR"), str(Path.cwd())]  # MLX compiles in /tmp, once
    about = {"rules": rules, "places": places}
    (notes / f"{name}.json").write_text(json.dumps(about))
    watch = notes / name
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH.format(log=str(notes / f"{name}.opened")))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(watch), before)))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
