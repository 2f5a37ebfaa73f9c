"""Helpers of several stories of this folder."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from mlxtp.agent import make_gateway
from mlxtp.config import Settings
from mlxtp.groups import overview
from mlxtp.groups.group import Group
from mlxtp.groups.lifecycle import Supervisor
from mlxtp.groups.ranks import WORKER, Worker

from ..gateway.test_gateway import DEPLOYMENT, GROUP
from ..live_cluster import WAIT_S
from ..played import scenes


def made(settings: Settings, worker: Worker = WORKER) -> Supervisor:
    """A supervisor with a gateway of its own, which shows the health of this group alone."""
    gateway = make_gateway(
        settings, lambda _model: overview.health(cast(Any, node), cast(Any, groups), gateway)
    )
    supervisor = Supervisor(settings, gateway, GROUP, worker=worker)
    scope = SimpleNamespace(deployment=DEPLOYMENT, model=SimpleNamespace(source=None))
    group = SimpleNamespace(supervisor=supervisor, scope=scope)
    table = SimpleNamespace(live=lambda: ())
    node = SimpleNamespace(settings=settings, desired=SimpleNamespace(table=table))
    groups = SimpleNamespace(shown=group)
    return supervisor


async def sees(condition: Callable[[], object], what: str = "") -> None:
    """Wait for what is not announced. Fails when it never comes."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {WAIT_S:g} s: {what or condition}\n{standing()}") from None


async def within(story: Awaitable[None], seconds: float = WAIT_S) -> None:
    """A story that hangs fails."""
    async with limited(seconds):
        await story


@asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[None]:
    """A block that takes longer fails, and shows where it stood."""
    stood: list[str] = []
    showing = asyncio.get_running_loop().call_later(seconds, lambda: stood.append(standing()))
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise AssertionError("\n".join([f"not within {seconds:g} s", *stood])) from None
    finally:
        showing.cancel()


def standing() -> str:
    """Return each task with the calls in which it waits, and each group with its requests and ranks."""
    lines = [f"{task.get_name()}: {' > '.join(_awaited(task.get_coro()))}" for task in asyncio.all_tasks()]
    for group in [each for each in gc.get_objects() if type(each) is Group]:
        status, supervisor = group.supervisor.status, group.supervisor
        ranks = [status.ranks] if status.ranks is not None else []
        lines.append(
            f"{group.scope.group} on {group.node.name}: {status.state} in epoch {status.epoch}, "
            f"{status.reason or group.waiting or '-'}; {supervisor.gateway.deployments.phases}; "
            f"{[(each.epoch, each.watch.pongs) for each in ranks]}"
        )
    return "\n".join(lines)


def _awaited(work: Any) -> list[str]:
    """Return the function and line of each coroutine that waits for the next one, the outermost first."""
    found = []
    while (frame := getattr(work, "cr_frame", None)) is not None:
        found.append(f"{work.__qualname__}:{frame.f_lineno}")
        work = work.cr_await
    return found


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run it in an event loop of its own. Fails when a task ended by an error that was not looked at."""
    silent: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: silent.append(context))
        await story

    asyncio.run(watched())
    gc.collect()
    assert not silent, silent


def play_alone(story: Callable[[], Awaitable[None]], seconds: float = WAIT_S) -> None:
    run(within(story(), seconds))


in_a_loop = scenes(play_alone, stages=0)
"""Of a test that needs no stage, and may take so many `seconds`."""
