"""`mlxtp pull`, `list`, `remove` and `verify`: the models of the Hub on this Mac's disk.

A running agent pulls, so that its cluster downloads once; without one this process does.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ..client import AgentClient
from ..errors import (
    Code,
    Exit,
    MlxtpError,
    ModelError,
    UserError,
    why_not_written,
)
from ..models.hub_cache import Repo, cache_folder, gigabytes, hash_of, hub_name
from ..models.inventory import Revision, revisions_here
from ..models.manifest import Manifest
from . import shell_completion
from .options import AsJson, Home
from .printing import home_of, print_json

LOOK_S = 0.5
END_S = 2.0
"""How long Ctrl-C waits for threads that wait for the network."""
_PULL_S = 60.0
"""How long the agent may take to ask the Hub what a model consists of."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="OWNER/NAME on the Hub; OWNER/NAME@REVISION for a certain one.",
        autocompletion=shell_completion.hub_models,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(pull)
    app.command(name="list")(list_)
    app.command()(remove)
    app.command()(verify)


def pull(
    model: Model,
    everywhere: Annotated[
        bool, typer.Option("--everywhere", help="On every Mac of the cluster that is there now.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Download a model, or what is missing of it: from a member that has it, else from the Hub.

    Cut short, it goes on where it was when it is said again.
    """
    repo, revision = _check_hub(model)
    rows = _by_agent(model, everywhere, home, as_json)
    if rows is None:
        rows = [_by_itself(repo, revision, as_json)]
        _tell_removed(model, home)
    problems = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
    if as_json:
        print_json({"model": model, "members": rows})
    for problem in () if as_json else problems:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]mlxtp:[/] {escape(problem)}")
    if problems:
        raise typer.Exit(Exit.REFUSED)
    if not as_json:
        where = " and ".join(row["name"] for row in rows)
        size = max(row["total_bytes"] for row in rows)  # none of what another program put there
        print(f"{model} is on {where}" + (f": {gigabytes(size)}" if size else ""))


def list_(home: Home = None, as_json: AsJson = False) -> None:
    """List the models of the Hub on this Mac: size, how much of each is here, which other Macs have it."""
    cache, elsewhere = _stored(home)
    rows = [_row(each, elsewhere) for each in revisions_here(cache=cache)]
    if as_json:
        print_json({"folder": str(cache), "models": rows})
        return
    if not rows:
        print(f"no model is in {cache}; `mlxtp pull OWNER/NAME` brings one")
        return
    Console(highlight=False).print(_table(rows))
    print(f"in {cache}")


def remove(model: Model, home: Home = None, as_json: AsJson = False) -> None:
    """Remove a model from this Mac's disk, all revisions unless one is named. What others share stays."""
    repo, revision = _here(model, home)
    _allowed("removable", model, home)
    here = repo.commits()
    chosen = frozenset({repo.commit(revision)}) if "@" in model else here
    if not chosen & here and not (repo.folder.exists() and "@" not in model):
        raise ModelError(
            f"{model} is not on this Mac, in {repo.cache}; `mlxtp list` shows what is", Code.MODEL_NOT_FOUND
        )
    try:
        freed = repo.remove(chosen)
    except OSError as error:
        raise ModelError(f"{model}: {why_not_written(error, repo.cache)}") from None
    _tell_removed(model, home)
    if as_json:
        print_json({"removed": model, "revisions": sorted(chosen), "freed_bytes": freed})
        return
    print(f"{model} is removed from {repo.cache}; {gigabytes(freed)} are free again")


def verify(
    model: Model,
    repair: Annotated[bool, typer.Option("--repair", help="Get damaged files anew.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Read a model's files on this Mac and compare each with its hash."""
    repo, revision = _here(model, home)
    commit = repo.commit(revision)
    manifest = repo.manifest(commit)
    if manifest is None:
        raise ModelError(
            f"nothing is known of {model} on this Mac, in {repo.cache}; `mlxtp list` shows what is here",
            Code.MODEL_NOT_FOUND,
        )
    bad, unread = _damaged(repo, manifest, quiet=as_json)
    if bad and repair:
        _repair(repo, manifest, bad, home, as_json)
    found = bad | unread
    if as_json:
        print_json({"model": model, "revision": commit, "bytes": manifest.size, "damaged": found})
    elif not found:
        print(f"{model}: {len(manifest.files)} files, {gigabytes(manifest.size)}, all as they should be")
    else:
        for path, why in found.items():
            print(f"{path}: {why}")
        again = "they were got anew" if repair else f"`mlxtp verify {model} --repair` gets them anew"
        if bad:
            print(f"bad files: {len(bad)} of {len(manifest.files)}; {again}")
        if unread:
            print(f"files that cannot be read: {len(unread)}; they are left as they are")
    if unread or (bad and not repair):
        raise typer.Exit(Exit.REFUSED)


# --- pulling ------------------------------------------------------------------------------------------


def _by_agent(
    model: str, everywhere: bool, home: Path | None, as_json: bool
) -> list[Mapping[str, Any]] | None:
    """The agent's last word of each member; None when there is no agent that can."""
    try:
        client = AgentClient(home_of(home), _PULL_S)
        name = client.post("pull", model=model, everywhere="yes" if everywhere else "")["model"]
    except UserError as error:
        if everywhere or error.code not in (Code.NOT_READY, Code.NOT_SUPPORTED):
            raise
        return None
    with _Bars(quiet=as_json) as bars:
        try:
            while True:
                rows: list[Mapping[str, Any]] = client.post("pulling", model=name)["members"]
                bars.show(
                    (row["name"], row["held_bytes"], row["total_bytes"], bool(row.get("waits")))
                    for row in rows
                )
                if rows and all(row["complete"] or row["problem"] for row in rows):
                    return rows
                time.sleep(LOOK_S)  # nothing tells when there is more
        except KeyboardInterrupt:
            print("mlxtp: the agent goes on; the same command shows how far it is", file=sys.stderr)
            raise typer.Exit(Exit.INTERRUPTED) from None


def _by_itself(repo: Repo, revision: str, as_json: bool) -> Mapping[str, Any]:
    """This process gets it. Raises ModelError."""
    from ..models.daemon_thread import begin
    from ..models.download import Fetch

    refs = [ref for ref, commit in repo.refs().items() if commit == revision]
    fetch = Fetch(repo, refs[0] if refs else revision, revision)
    work = begin(fetch.from_hub)
    try:
        with _Bars(quiet=as_json) as bars:
            while not work.done():
                wait([work], LOOK_S)
                if fetch.manifest is not None:
                    bars.show([(repo.name, fetch.held_bytes, fetch.manifest.size, False)])
    except KeyboardInterrupt:
        print("mlxtp: it ends; what has come stays, and the same command goes on", file=sys.stderr)
        fetch.stop()
        with contextlib.suppress(KeyboardInterrupt):
            wait([work], END_S)
        raise typer.Exit(Exit.INTERRUPTED) from None
    error = work.exception()
    if error is not None and not isinstance(error, MlxtpError):
        raise ModelError(f"cannot get {repo.name}: {type(error).__name__}: {error}") from error
    here = repo.snapshot(revision)
    if error is not None:
        if fetch.manifest is not None or here is None:
            raise error
        print(f"mlxtp: {error.detail}. What is here is left as it is", file=sys.stderr)
    if here is None:
        raise ModelError(f"{repo.name} came, and is not complete in {repo.cache}; `mlxtp list` shows what is")
    manifest = fetch.manifest or repo.manifest(here.name)
    size = manifest.size if manifest is not None else 0
    return {
        "name": "this Mac",
        "held_bytes": size,
        "total_bytes": size,
        "complete": True,
        "problem": "",
        "revision": here.name,
    }


class _Speed(TransferSpeedColumn):
    """What came in a second; on the whole, of what has ended; nothing while nobody knows."""

    def render(self, task: Task) -> Text:
        """The speed of one bar."""
        if task.finished_speed or task.speed:
            return super().render(task)
        came = int(task.completed - task.fields["begun"])
        if not came or not task.finished_time:
            return Text("")
        return Text(f"{decimal(int(came / task.finished_time))}/s", style="progress.data.speed")


class _Bars:
    """A bar on stderr for each of what is told, as long as something of it comes."""

    def __init__(self, *, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            _Speed(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._progress.tasks:
            if not task.completed:
                self._progress.remove_task(task.id)
        if self._progress.tasks:
            self._progress.stop()
        else:  # leave no empty line, either
            self._progress.live.transient = True
            self._progress.live.stop()

    def show(self, rows: Iterable[tuple[str, int, int, bool]]) -> None:
        """Names, bytes that are there, bytes in all (0: not known yet), whether others come first."""
        for name, held, total, waits in rows:
            self._progress.start()
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, completed=held, begun=held)
            said = f"{name} (waits for others to come first)" if waits else name
            self._progress.update(self._tasks[name], description=said, completed=held, total=total or None)


# --- the disk -----------------------------------------------------------------------------------------


def _damaged(repo: Repo, manifest: Manifest, *, quiet: bool) -> tuple[dict[str, str], dict[str, str]]:
    """What is wrong, by path: with files that have other bytes than they should, and with unreadable ones."""
    bad: dict[str, str] = {}
    unread: dict[str, str] = {}
    done = 0
    with _Bars(quiet=quiet) as bars:

        def read(count: int) -> None:
            nonlocal done
            done += count
            bars.show([(manifest.name, done, manifest.size, False)])

        for file in manifest.files:
            try:
                found = hash_of(repo.readable(file), file, read) if repo.has(file) else None
            except OSError as error:
                unread[file.path] = f"it cannot be read: {error.strerror}"
                continue
            if found is None:
                bad[file.path] = "it is not here, or has another size"
            elif found != file.hash:
                bad[file.path] = f"its hash is {found[:12]}…, not {file.hash[:12]}…"
    return bad, unread


def _repair(repo: Repo, manifest: Manifest, bad: Collection[str], home: Path | None, as_json: bool) -> None:
    """Get bad files anew. Nothing goes before it is known that somebody can give them. Raises UserError."""
    from ..models import hub_client
    from ..models.hub_cache import Stopped

    model = f"{repo.name}@{manifest.revision}"
    if not _allowed("repairable", model, home):
        hub_client.look_up(repo.name, manifest.revision)
    try:
        with repo.locked(lambda: True):
            for file in manifest.files:
                if file.path in bad:
                    repo.blob(file).unlink(missing_ok=True)
    except Stopped:
        raise UserError(
            f"somebody is just adding to {repo.name}; end that, or wait until it is over"
        ) from None
    except OSError as error:
        raise ModelError(f"{model}: {why_not_written(error, repo.cache)}") from None
    rows = _by_agent(model, False, home, as_json)
    if rows is None:
        _by_itself(repo, manifest.revision, as_json)
        _tell_removed(model, home)
    elif repo.snapshot(manifest.revision) is None:
        problems = [row["problem"] for row in rows if row["problem"]]
        raise ModelError(f"{model} is not whole again: {'; '.join(problems) or 'it came not'}")


def _check_hub(model: str) -> tuple[Repo, str]:
    """Raises UserError for what is no model of the Hub."""
    from ..models.names import is_hub_id

    if not is_hub_id(model):
        what = "a folder is left as it is" if Path(model).exists() else f"{model!r:.200} is no OWNER/NAME"
        raise UserError(f"{what}: this is about models of the Hub, by OWNER/NAME or OWNER/NAME@REVISION")
    return hub_name(model)


def _here(model: str, home: Path | None) -> tuple[Repo, str]:
    """Where the agent of this home has it, or would have it; where this user has it, if there is no agent."""
    repo, revision = _check_hub(model)
    return Repo(repo.name, _stored(home)[0]).as_here(), revision


def _allowed(what: str, model: str, home: Path | None) -> bool:
    """Whether there is an agent that was asked. Raises UserError when it says no."""
    try:
        AgentClient(home_of(home), _PULL_S).post(what, model=model)
    except UserError as error:
        if error.code is not Code.NOT_READY:
            raise
        return False
    return True


def _tell_removed(model: str, home: Path | None) -> None:
    """The agent, if there is one, has not seen what was just done."""
    with contextlib.suppress(UserError):
        AgentClient(home_of(home)).post("removed", model=model)


def _stored(home: Path | None) -> tuple[Path, list[Mapping[str, Any]]]:
    """The cache folder of the agent of this home, this user's if there is none; and what others have."""
    try:
        told = AgentClient(home_of(home)).get("stored")
    except UserError:
        return cache_folder(), []
    return Path(told.get("folder") or cache_folder()), list(told["elsewhere"])


def _row(here: Revision, elsewhere: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    others = [each for each in elsewhere if (each["name"], each["revision"]) == (here.name, here.revision)]
    return {
        "name": here.name,
        "revision": here.revision,
        "refs": list(here.refs),
        "size_bytes": here.total,
        "held_bytes": here.held,
        "complete": here.complete,
        "elsewhere": sorted(each["node"] for each in others if each["complete"]),
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "revision", "size", "here", "also on"):
        table.add_column(column, justify="right" if column == "size" else "left")
    for row in rows:
        share = "all" if row["complete"] else f"[yellow]{gigabytes(row['held_bytes'])}[/]"
        named = ", ".join(row["refs"])
        table.add_row(
            escape(row["name"]),
            f"{row['revision'][:12]}{f' ({escape(named)})' if named else ''}",
            gigabytes(row["size_bytes"]),
            share,
            escape(", ".join(row["elsewhere"])),
        )
    return table
