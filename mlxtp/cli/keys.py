"""`mlxtp key`: creates, lists and revokes API keys. It needs no agent; a running one applies the change."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..api.api_keys import MAX_PER_MINUTE, ApiKey, KeyFile, check_name, check_rate
from ..client import AgentClient
from ..errors import UserError
from .options import AsJson, Home
from .printing import day_of, home_of, print_answer, table_of, typed
from .shell_completion import keys

_HOW = """
This is the key of {name}. It is shown only once: mlxtp keeps a hash of it. Clients send it as
`Authorization: Bearer KEY` or as `x-api-key: KEY`; most call it the API key. A running agent
accepts it from now on, on this Mac only: each Mac has keys of its own.
"""


commands = typer.Typer(
    name="key",
    no_args_is_help=True,
    help="API keys, for programs on other machines: create, list and revoke them.",
)


@commands.command()
def create(
    name: Annotated[
        str, typer.Argument(help="Name of its owner, such as laptop: letters, digits, . - and _.")
    ],
    per_minute: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Most requests a minute, from 1 to {MAX_PER_MINUTE}. Default: any number.",
        ),
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key for this Mac's endpoint and print it, once."""
    with typed():
        check_name(name)
        check_rate(per_minute or 0)
        if per_minute is not None and per_minute < 1:
            raise UserError(f"--per-minute {per_minute}: a key needs at least one request a minute")
    made, text = _keys(home).create(name, per_minute or 0, time.time())
    print_answer({"key": text, **_row(made, {})}, as_json, text)
    if not as_json:
        print(_HOW.format(name=made.name), file=sys.stderr)


@commands.command(name="list")
def list_(home: Home = None, as_json: AsJson = False) -> None:
    """List the API keys of this Mac's endpoint, with the times when each was created and last used."""
    file = _keys(home)
    used = _used(file.path.parent)
    rows = [_row(key, used) for key in file.load()]
    none = "there are no API keys; `mlxtp key create NAME` makes one"
    print_answer({"keys": rows}, as_json, _table(rows) if rows else none)


@commands.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name: see `mlxtp key list`.", autocompletion=keys)],
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Revoke an API key. The endpoint refuses it within a second."""
    left = _keys(home).revoke(name)
    last = (
        "\nthat was the last one: programs on this Mac need no key now (unless --api-keys always), and "
        "those on other machines are refused"
    )
    words = f"the key of {name} is revoked{'' if left else last}"
    print_answer({"revoked": name, "left": left}, as_json, words)


def _keys(home: Path | None) -> KeyFile:
    return KeyFile(home_of(home))


def _used(home: Path) -> Mapping[str, int]:
    """Return when keys were last used, from the agent that runs there; empty without one."""
    try:
        return {str(name): int(at) for name, at in AgentClient(home).get("keys")["used"].items()}
    except UserError:
        return {}


def _row(key: ApiKey, used: Mapping[str, int]) -> dict[str, Any]:
    return {
        "name": key.name,
        "created": key.created,
        "per_minute": key.per_minute or None,
        "last_used": used.get(key.name),
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("name", "created", "per minute", "last used since the agent started")
    table = table_of(*columns, right=("per minute",))
    for row in rows:
        used = "-" if row["last_used"] is None else day_of(row["last_used"])
        table.add_row(row["name"], day_of(row["created"]), str(row["per_minute"] or "any"), used)
    return table
