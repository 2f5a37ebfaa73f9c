"""One cluster for all tests that break it: each pays for one recovery instead of two starts.

Options of `make chaos`: `--quick`, `--rounds N`, `--json FILE`. At the end stands a table of what was found.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from mlxtp.api.app import create_app
from mlxtp.groups.health import ServingState

from . import findings
from .harness import KEEP_ALIVE_S, FaultyCluster

ROOT = Path(__file__).parents[2]

FOR_CHAOS = frozenset((
    "test_agent.py::test_killed_while_it_decodes",
    "test_agent.py::test_told_to_stop_twice_or_for_too_long[twice]",
    "test_agent.py::test_told_to_stop_while_it_decodes[SIGTERM]",
    "test_agent.py::test_told_to_stop_while_it_ends_an_epoch",
    "test_caches.py::test_a_cache_of_which_rank_1_has_kept_less",
    "test_caches.py::test_a_cache_that_rank_1_is_told_to_drop_and_has_not",
    "test_caches.py::test_caches_that_rank_1_keeps_for_itself_are_never_used",
    "test_caches.py::test_rank_1_rolls_drafts_back_too_far",
    "test_canary.py::test_a_rank_that_computes_something_else_while_idle_ends_the_epoch[1]",
    "test_canary.py::test_a_rank_that_crashes_in_the_first_sum_after_idling",
    "test_canary.py::test_a_rank_that_stands_still_in_a_proof_ends_the_epoch",
    "test_canary.py::test_an_idle_group_proves_itself_and_goes_on",
    "test_canary.py::test_requests_that_come_while_it_proves_itself",
    "test_clients.py::test_a_client_that_stops_reading",
    "test_clients.py::test_a_client_that_stops_reading_and_leaves",
    "test_clients.py::test_clients_of_whom_many_leave[0-1]",
    "test_deaths.py::test_five_failed_epochs_are_the_last",
    "test_deaths.py::test_killed_on_the_way_up[load-1]",
    "test_deaths.py::test_killed_while_idle[0]",
    "test_deaths.py::test_killed_while_idle[1]",
    "test_deaths.py::test_ranks_that_disagree_give_their_memory_back",
    "test_deaths.py::test_the_reason_is_shown_while_it_restarts",
    "test_disk.py::test_killed_in_the_middle_of_a_block[write-1]",
    "test_frames.py::test_a_frame_of_another_epoch_is_dropped_and_counted[0-Forward]",
    "test_frames.py::test_a_frame_of_another_epoch_is_dropped_and_counted[1-Ack]",
    "test_frames.py::test_a_prompt_before_the_model_is_loaded",
    "test_frames.py::test_an_end_token_costs_at_most_the_step_that_was_on_its_way",
    "test_frames.py::test_one_request_is_prompt_steps_and_one_stop[one chunk]",
    "test_frames.py::test_rank_0_refuses[other epoch-codes3]",
    "test_frames.py::test_rank_0_refuses[seq ahead-codes0]",
    "test_frames.py::test_rank_0_refuses[truncated-codes1]",
    "test_frames.py::test_rank_0_refuses[unknown type-codes2]",
    "test_frames.py::test_rank_1_refuses[truncated-codes3]",
    "test_frames.py::test_rank_1_refuses[unknown uid-codes1]",
    "test_grammars.py::test_a_model_is_taken_away_while_a_grammar_is_compiled",
    "test_grammars.py::test_rank_0_is_killed_while_a_grammar_is_compiled",
    "test_mutations.py::test_a_bit_flipped_before_ranks_exchange_logits_reaches_all[winners-fields0]",
    "test_mutations.py::test_a_bit_flipped_in_the_logits_that_rank_1_gathered_changes_nothing",
    "test_mutations.py::test_a_model_that_comes_later_with_a_changed_weight_ends_the_epoch",
    "test_mutations.py::test_a_step_frame_after_the_stop",
    "test_mutations.py::test_a_stop_with_another_number_of_forwards",
    "test_mutations.py::test_another_draw_of_rank_1_changes_no_token",
    "test_mutations.py::test_one_step_frame_too_many",
    "test_mutations.py::test_one_step_too_many_on_all_ranks[at its end token]",
    "test_mutations.py::test_one_step_too_many_on_all_ranks[at its limit]",
    "test_mutations.py::test_rank_1_draws_another_token_than_rank_0",
    "test_mutations.py::test_rank_1_has_a_voice[rudely]",
    "test_mutations.py::test_rank_1_has_another_position",
    "test_mutations.py::test_rank_1_has_its_rows_in_another_order[order]",
    "test_mutations.py::test_rank_1_has_its_rows_in_another_order[rows]",
    "test_mutations.py::test_rank_1_reports_a_wrong_number[collectives]",
    "test_mutations.py::test_rank_1_reports_a_wrong_number[forwards]",
    "test_mutations.py::test_rank_1_runs_a_step_twice[middle]",
    "test_mutations.py::test_rank_1_swallows_an_exception[middle]",
    "test_mutations.py::test_rank_1_takes_another_token",
    "test_pauses.py::test_a_pause_is_filled_with_empty_chunks",
    "test_pauses.py::test_a_request_that_kills_does_not_take_others_along[1]",
    "test_pauses.py::test_killed_at_a_random_token[0-0]",
    "test_pauses.py::test_killed_at_a_random_token[0-1]",
    "test_pauses.py::test_no_request_waits_for_ever_for_another_group",
    "test_pauses.py::test_several_failures_during_one_answer[0-2]",
    "test_pauses.py::test_when_the_server_gives_up_so_does_who_waits",
    "test_replies.py::test_a_late_ack_within_its_limit_is_a_pause",
    "test_replies.py::test_a_reply_on_the_way_up[SanityDone-garbage-codes0]",
    "test_replies.py::test_an_ack_comes_twice",
    "test_replies.py::test_an_ack_is_garbage",
    "test_replies.py::test_an_ack_never_comes",
    "test_replies.py::test_idling_is_not_part_of_the_first_step",
    "test_replies.py::test_rank_0_raises_after_the_frame_went_out[in decode]",
    "test_replies.py::test_rank_0_raises_after_the_frame_went_out[in prefill]",
    "test_replies.py::test_the_last_ack_comes_too_late",
    "test_replies.py::test_the_last_ack_never_comes",
    "test_strangers.py::test_a_stranger_at_the_ring_port[garbage]",
))  # fmt: skip
"""Slow cases that only `make chaos` runs, because a sibling of each shows the same on every change."""


ROUNDS = 3
"""The number of seeds of a story with a random moment, unless an option changes it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--quick", action="store_true", help="only what `make test` runs of this folder")
    group.addoption("--rounds", type=int, default=ROUNDS, help="seeds for each story with a random moment")
    group.addoption("--json", type=Path, help="a file for every fault, and for the sums")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Stories with a random moment take a seed."""
    if "seed" in metafunc.fixturenames:
        rounds = metafunc.config.getoption("rounds", ROUNDS)
        first, *more = range(max(rounds, 1))
        metafunc.parametrize("seed", [first, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in more)])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before pytest leaves out what is marked."""
    for item in items:
        if item.nodeid.removeprefix("tests/chaos/") in FOR_CHAOS:
            item.add_marker(pytest.mark.chaos)
    if config.getoption("quick", False):
        kept = [item for item in items if _is_quick(item)]
        config.hook.pytest_deselected(items=[item for item in items if not _is_quick(item)])
        items[:] = kept


def _is_quick(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents and item.get_closest_marker("chaos") is None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not findings.FOUND or config.getoption("rounds", None) is None:  # `make test` has no need of it
        return
    terminalreporter.ensure_newline()
    Console(file=terminalreporter._tw._file, width=120).print(findings.table(findings.FOUND))
    if file := config.getoption("json", None):
        failed = len(terminalreporter.stats.get("failed", ()))
        body = {"failed_tests": failed, **findings.report(findings.FOUND)}
        file.write_text(json.dumps(body, indent=1) + "\n")


@pytest.fixture(scope="session", autouse=True)
def _ranks_find_the_faults() -> Iterator[None]:
    """`-m tests.chaos.worker` works from any folder. Streams here say soon that they are alive."""
    patch = pytest.MonkeyPatch()
    hasty = functools.partial(create_app, keep_alive_s=KEEP_ALIVE_S)
    patch.setattr("mlxtp.agent.create_app", hasty)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    yield
    patch.undo()


class _Shelf:
    """The cluster in use. One that a failed test has left broken is replaced."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.cluster: FaultyCluster | None = None

    def sound_cluster(self, split: str) -> FaultyCluster:
        """A cluster that serves: two ranks that divide each layer, or for a `split` so many stages."""
        if (old := self.cluster) is not None and (
            old.supervisor.status.state is not ServingState.READY or old.settings.split != split
        ):
            self.close()
        if self.cluster is None:
            kind = {"parallel": "pipeline", "ranks": split.count(",") + 1} if split != "auto" else {}
            self.cluster = FaultyCluster(self._factory.mktemp("faulty"), split=split, **kind)
        # The supervisor gives up after five failures in two minutes, which is what these tests are made of.
        self.cluster.supervisor._policy.failures.clear()
        return self.cluster

    def close(self) -> None:
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.close()
            assert cluster.all_pids() == set()


@pytest.fixture(scope="session")
def _shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Shelf]:
    shelf = _Shelf(tmp_path_factory)
    yield shelf
    shelf.close()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, _shelf: _Shelf) -> FaultyCluster:
    """Ready, without orders. A test may give the split of a pipeline as its parameter."""
    sound = _shelf.sound_cluster(getattr(request, "param", "auto"))
    sound.book.clear()
    sound.later.clear()
    return sound
