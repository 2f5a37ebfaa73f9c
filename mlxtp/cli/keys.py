"""`mlxtp key`: creates, lists and revokes API keys. It needs no agent; a running one applies the change."""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import audit
from ..api.api_keys import KeyFile, kept_use
from ..api.key_limits import (
    BATCH,
    COUNTS,
    DEFAULT_SCOPES,
    INTERACTIVE,
    MAX_PER_MINUTE,
    PRIORITIES,
    SCOPES,
    ApiKey,
    KeyCounts,
    KeyUse,
    counted,
)
from ..client import AgentClient
from ..errors import UserError
from ..logs import keep_audit
from ..short_names import stands_for
from ..values import parse_keep
from ..verbs import KeyUses
from .options import AsJson, Home, key_names, model_names
from .printing import day_of, home_of, print_answer, table_of, typed

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


def _most(what: str) -> Any:
    return typer.Option(metavar="N", help=f"Most {what}. Default: any number.")


@commands.command()
def create(
    name: Annotated[
        str, typer.Argument(help="Name of its owner, such as laptop: letters, digits, . - and _.")
    ],
    per_minute: Annotated[int | None, _most(f"requests a minute, from 1 to {MAX_PER_MINUTE}")] = None,
    tokens_per_minute: Annotated[int | None, _most("tokens of prompts and answers a minute")] = None,
    tokens_per_day: Annotated[int | None, _most("tokens a day, from midnight on")] = None,
    concurrent: Annotated[int | None, _most("requests at one time")] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time until it ends, such as 12h or 30d. Default: never."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model that it may use. May be repeated. Default: all models.", autocompletion=model_names
        ),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(SCOPES),
            help=f"Permits: {'; '.join(f'{each}: {what}' for each, what in SCOPES.items())}. May be "
            f"repeated. Default: {', '.join(DEFAULT_SCOPES)}.",
            autocompletion=lambda: list(SCOPES),
        ),
    ] = None,
    priority: Annotated[
        str,
        typer.Option(
            metavar="|".join(PRIORITIES),
            help="Class of its requests. Batch ones begin after interactive ones.",
            autocompletion=lambda: list(PRIORITIES),
        ),
    ] = INTERACTIVE,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key for this Mac's endpoint and print it, once."""
    now, given = time.time(), (per_minute, tokens_per_minute, tokens_per_day, concurrent)
    more: dict[str, Any] = {}
    with typed():
        for (field, _, what), count in zip(COUNTS, given, strict=True):
            more[field] = count or 0
            if count is not None and count < 1:
                one = counted(1, what).replace("1", "one", 1)
                raise UserError(f"--{field.replace('_', '-')} {count}: a key needs at least {one}")
        life_s = -1 if expires is None else parse_keep(expires, "--expires")
        if life_s == 0:
            raise UserError(f"--expires {expires}: a key needs at least one second")
        more |= {"expires": int(now) + life_s if life_s >= 0 else 0}
        more |= {"models": tuple([stands_for(each) or each for each in model or ()])}
        more |= {"scopes": tuple(scope or DEFAULT_SCOPES), "priority": priority}
        if problem := ApiKey(name, b"", int(now), **more).problem:
            raise UserError(problem)
    file = KeyFile(home_of(home))
    made, text = file.create(name, more.pop("per_minute"), now, **more)
    row = _row(made, None)
    _record("key_created", f"the key {name} is made", file, {each: row[each] for each in row if row[each]})
    print_answer({"key": text, **row}, as_json, text)
    if not as_json:
        print(_HOW.format(name=made.name), file=sys.stderr)


@commands.command(name="list")
def list_(home: Home = None, as_json: AsJson = False) -> None:
    """List the API keys of this Mac's endpoint, with their limits and their use."""
    file = KeyFile(home_of(home))
    keys = file.load()
    used = _used(file.path.parent, keys)
    rows = [_row(key, used.get(key.name)) for key in keys]
    none = "there are no API keys; `mlxtp key create NAME` makes one"
    print_answer({"keys": rows}, as_json, _table(rows) if rows else none)


@commands.command()
def revoke(
    name: Annotated[
        str, typer.Argument(help="The key's name: see `mlxtp key list`.", autocompletion=key_names)
    ],
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Revoke an API key. The endpoint refuses it within a second."""
    file = KeyFile(home_of(home))
    left = file.revoke(name)
    _record("key_revoked", f"the key {name} is revoked", file, {"name": name})
    last = (
        "\nthat was the last one: programs on this Mac need no key now (unless --api-keys always), and "
        "programs on other machines are refused"
    )
    words = f"the key of {name} is revoked{'' if left else last}"
    print_answer({"revoked": name, "left": left}, as_json, words)


def _record(event: str, words: str, file: KeyFile, about: Mapping[str, object]) -> None:
    keep_audit(file.path.parent)
    user = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    audit.record(event, words, {**about, "by": f"user {user}"})


def _used(home: Path, keys: Sequence[ApiKey]) -> Mapping[str, Mapping[str, Any]]:
    try:
        return {row["name"]: row for row in AgentClient(home).send(KeyUses())["keys"]}
    except UserError:
        kept, now = kept_use(home), time.time()
        counts = {key: kept[key.digest.hex()] for key in keys if key.digest.hex() in kept}
        return {key.name: KeyUse(key, each, 0.0).summary(now) for key, each in counts.items()}


def _row(key: ApiKey, used: Mapping[str, Any] | None) -> dict[str, Any]:
    used = used or KeyUse(key, KeyCounts(), 0.0).summary(0.0)
    rights = {"models": list(key.models), "scopes": list(key.scopes), "priority": key.priority}
    return {"created": key.created, **rights, **used, "last_used": used["last_used"] or None}


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = table_of("name", "permits", "used", "ends", "last used", wrapped=("permits", "used"))
    for row in rows:
        limits = [counted(row[field], what) for field, _, what in COUNTS if row[field]]
        only = [f"only {each}" for each in row["models"]]
        only += [BATCH] if row["priority"] == BATCH else []
        tokens = row["prompt_tokens"] + row["generated_tokens"]
        table.add_row(
            row["name"],
            ", ".join((*row["scopes"], *only, *limits)),
            f"{row['requests']:,} requests, {tokens:,} tokens, {row['tokens_today']:,} today",
            ("expired " if row["expires"] <= time.time() else "") + day_of(row["expires"])
            if row["expires"]
            else "never",
            day_of(row["last_used"]) if row["last_used"] else "-",
        )
    return table
