"""Choice of the group that serves the desired model, from what is known of the present members."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace

from ..api.request_metrics import Asked
from ..cluster.membership import MemberState as Standing
from ..cluster.node import ClusterNode
from ..config import EMBEDDED_MODEL, Settings
from ..errors import Code, GroupError, MlxtpError
from ..models.inspect import ModelSource, is_hub_id, read_config, shape_in
from ..models.local_model import LocalModels
from ..placement.candidates import Candidate
from ..placement.formation import FailedGroup, FailedGroups, links_of, preflight
from ..placement.model_shape import ModelShape
from ..placement.planner import Placement, PlacementOptions, plan
from ..placement.topology import MemberMachine, Topology
from ..placement.workload import CHAT, LEARNT, WORKLOADS, Workload, learnt
from ..wire.cluster_messages import ModelStatus
from ..wire.rdma import Matrix
from .fabric import FabricResults

log = logging.getLogger(__name__)

MEMORY_STEP_BYTES = 1 << 30


class Placer:
    """Planner of the next group.

    `held_bytes` returns the bytes that the group's ranks hold on a Mac, `asked` the requests of this Mac's
    clients.
    """

    def __init__(
        self,
        node: ClusterNode,
        models: LocalModels,
        results: FabricResults,
        held_bytes: Callable[[str], int],
        *,
        asked: Callable[[], Asked],
    ) -> None:
        self._node = node
        self._models = models
        self._results = results
        self._held_bytes = held_bytes
        self._asked = asked
        #: The requests whose expected time decides.
        self.workload = WORKLOADS.get(node.settings.workload, CHAT)
        self._failed = FailedGroups()
        self._lacking: set[str] = set()  #: Nodes whose MLX turned out to have no JACCL.
        self._shape: tuple[ModelSource, ModelShape] | None = None
        #: The last plan, or the reason for none, after what it was made from.
        self._known: tuple[object, Placement | None, str] | None = None

    # --- members -------------------------------------------------------------------------------------

    def members(self) -> list[MemberMachine]:
        """Return the members that are present and may take part, in the form that placement needs."""
        node = self._node
        found = []
        for node_id, status in node.membership.statuses().items():
            machine = node.peer_info.machines.get(node_id)
            if not status.present or machine is None:
                continue
            link = node.links.to(node_id)
            lack = self._lack(node_id)
            found.append(
                MemberMachine(
                    node_id,
                    node.name_of(node_id),
                    replace(machine, free_bytes=in_steps(machine.free_bytes), wired_bytes=0, notes=()),
                    link.remote if link is not None else "",
                    not lack,
                    lack,
                    jaccl=False if node_id in self._lacking else None,
                    held_bytes=self._held_bytes(node_id),
                    boot_id=status.boot_id,
                )
            )
        return sorted(found, key=lambda member: member.node_id)

    def topology(self) -> Topology:
        """Return the connections between the members that are present."""
        return Topology(self.members(), self.devices_by_hand())

    def _lack(self, node_id: str) -> str:
        node, ours = self._node, self._models.desired.status
        theirs = ours if node_id == node.node_id else node.peer_info.reported(ours.model).get(node_id)
        return model_lack(ours, theirs, node.name, node.name_of(node_id))

    def devices_by_hand(self) -> dict[str, dict[str, str]]:
        """Return the RDMA devices of the settings, by the ids of a node and of its peer."""
        known = {self._node.node_id, *self._node.peer_info.machines}
        return devices_by_hand(self._node.settings.rdma, {each: self._node.name_of(each) for each in known})

    def without_jaccl(self, nodes: list[str]) -> GroupError:
        """Note nodes whose MLX turned out to have no JACCL: with `auto` the next epoch uses the ring."""
        who = " and ".join(map(self._node.name_of, nodes))
        why = f"MLX on {who} has no JACCL; it needs macOS 26.2 or newer and librdma"
        if self._node.settings.fabric != "auto":
            return GroupError(why, Code.FORM_FAILED)
        log.warning("%s, so the ring is used", why)
        self._lacking.update(nodes)
        return GroupError(why, Code.REPLANNED)

    # --- the plan ------------------------------------------------------------------------------------

    def placement(self) -> tuple[Placement | None, str]:
        """Return the best plan for the present members, or the reason for none; kept until a change."""
        node = self._node
        source, desired = self._models.desired.source, node.replica.desired
        if not desired.model:
            return None, "no model is configured"
        if source is None:
            searching = f"{desired.model} is still being looked for"
            return None, self._models.desired.problem or self._models.desired.coming or searching
        leaving = node.leadership.draining
        members = [member for member in self.members() if member.node_id not in leaving]
        if not members:
            return None, "every Mac here is about to stop"
        try:
            options = self._options(desired.nodes, source.id)
        except MlxtpError as error:  # from the desired state of a member with another version
            return None, error.detail
        asked = (members, desired, source.id, options)
        if self._known is None or self._known[0] != asked:
            try:
                self._known = (asked, *self._plan(members, self._shape_of(source), options))
            except MlxtpError as error:
                self._known = (asked, None, error.detail)
        return self._known[1], self._known[2]

    def key(self, chosen: Candidate) -> tuple[float, ...]:
        """Return the order of plans: as many Macs as wanted, then requests of the workload per second."""
        source, nodes = self._models.desired.source, self._node.replica.desired.nodes
        settings = self._node.settings
        on_all = source is not None and placement_options(settings, nodes, source.id).nodes == "all"
        return (float(len(chosen.ranks)) if on_all else 0.0, self.rate(chosen))

    def rate(self, chosen: Candidate) -> float:
        """Return the requests of the workload per second, 0 without an estimate."""
        return chosen.speed.requests_per_second(self.workload) if chosen.speed is not None else 0.0

    def learn(self) -> None:
        """Learn the workload from what was requested. Only between groups: their keys are of one workload."""
        asked = self._asked()
        if self._node.settings.workload in WORKLOADS or not asked.answers:
            return
        sums = (asked.prompt, asked.cached, asked.answer, asked.at_once)
        prompt, cached, answer, at_once = (round(each / asked.answers) for each in sums)
        self.workload = learnt(
            asked.answers, Workload(LEARNT, prompt, cached, answer, max(1, at_once)), self.workload
        )

    def no_place(self, shape: ModelShape, nodes: str = "", only: Container[str] | None = None) -> str:
        """Return the reason why the present members have no place for a model of this shape.

        Each member counts as if it had the model, and as if nothing else ran on its machine. The reason is
        empty where there is a place, and as long as a suspect may come back.

        `nodes`: over how many Macs; empty for the present setting. `only` these may take part.
        """
        node = self._node
        if any(each.state is Standing.SUSPECT for each in node.membership.statuses().values()):
            return ""
        members = [
            replace(member, machine=replace(member.machine, free_bytes=0), model_ok=True, held_bytes=0)
            for member in self.members()
            if member.node_id not in node.leadership.draining and (only is None or member.node_id in only)
        ]
        try:
            options = self._options(nodes or node.replica.desired.nodes, shape.name)
            placement = plan(members, shape, node.node_id, options)
        except MlxtpError as error:
            return error.detail
        return placement.reason if placement.chosen is None else ""

    def _plan(
        self, members: list[MemberMachine], shape: ModelShape, options: PlacementOptions
    ) -> tuple[Placement, str]:
        """Return a plan that can form, and the reason for a plan without a group, with the way out."""
        here = self._node.node_id
        placement = plan(members, shape, here, options)
        if trouble := self._jaccl_trouble(placement.chosen, members, options):
            if options.backend == "jaccl":
                raise GroupError(f"JACCL cannot form: {trouble}", Code.FORM_FAILED)
            log.warning("JACCL cannot form, so the ring is used. %s", trouble)
            placement = plan(members, shape, here, replace(options, backend="ring"))
        if placement.chosen is not None:
            return placement, placement.reason
        words = [placement.reason, *placement.notes]
        auto = replace(options, nodes="auto")
        if isinstance(options.nodes, int) and plan(members, shape, here, auto).chosen is not None:
            words.append("`mlxtp serve MODEL --nodes auto` uses the Macs that are here")
        return placement, "; ".join(words)

    def _jaccl_trouble(
        self, chosen: Candidate | None, members: list[MemberMachine], options: PlacementOptions
    ) -> str:
        """Return the reason why JACCL would not form on all Macs of a group; empty for any other group."""
        if chosen is None or chosen.backend != "jaccl":
            return ""
        machines = {member.node_id: member.machine for member in members}
        by_rank = {rank: machines[node_id] for rank, node_id in enumerate(chosen.ranks)}
        for rank, node_id in enumerate(chosen.ranks):
            named = list(options.rdma.get(node_id, {}).values())
            trouble = preflight(
                rank, by_rank[rank], matrix(chosen), ring=chosen.jaccl_ring, others=by_rank, named=named
            )
            if trouble is not None:
                return f"{self._node.name_of(node_id)}: {trouble}"
        return ""

    def _options(self, nodes: str, model: str) -> PlacementOptions:
        options = placement_options(self._node.settings, nodes, model)
        failed = tuple(group for group, _ in self.left_out())
        return replace(
            options,
            measured=self._results.measured(),
            rdma=self.devices_by_hand(),
            failed=failed,
            workload=self.workload,
        )

    def _shape_of(self, source: ModelSource) -> ModelShape:
        if self._shape is None or self._shape[0] is not source:
            kv_bits = self._node.settings.kv_bits
            self._shape = (source, shape_in(source.path, read_config(source.path), source.id, kv_bits))
        return self._shape[1]

    # --- groups that failed --------------------------------------------------------------------------

    def formed(self, chosen: Candidate) -> None:
        """Note that a group works: its earlier failures no longer count."""
        self._failed.formed(chosen.kind, links_of(chosen.ranks, chosen.rdma))

    def leave_out(self, chosen: Candidate, error: MlxtpError, *, formed: bool, strikes: int = 1) -> bool:
        """Note that a group failed; log and return whether another one takes its place."""
        links, now = links_of(chosen.ranks, chosen.rdma), time.monotonic()
        what = "formed, and failed then" if formed else "did not form"
        group = FailedGroup(chosen.kind, links, f"it {what}: {error.detail}")
        members = {member.node_id: member for member in self.members()}
        if not self._failed.failed(group, error.code, members, now, strikes=strikes):
            return False
        placement, _ = self.placement()
        if placement is None or placement.chosen is None:
            self._failed.forget(chosen.kind, links)
            return False
        again_s = next(left_s for each, left_s in self.left_out() if each == group)
        log.warning(
            "%s on %s %s: %s; %s serves instead. The next try is in %.0f s, or when cables, ports or "
            "versions change",
            chosen.title,
            " + ".join(map(self._node.name_of, chosen.ranks)),
            what,
            error.detail,
            placement.chosen.title,
            again_s,
        )
        return True

    def left_out(self) -> tuple[tuple[FailedGroup, float], ...]:
        """Groups that failed to form, and the seconds until each is tried again."""
        members = {member.node_id: member for member in self.members()}
        return self._failed.left_out(members, time.monotonic())

    def left_out_lines(self) -> list[str]:
        """Return one sentence for each group that is left out, for users."""
        lines = []
        for each, left_s in self.left_out():
            names = " + ".join(sorted(map(self._node.name_of, each.nodes)))
            lines.append(
                f"{each.kind} on {names} is left out: {each.reason}. The next try is in {left_s:.0f} s"
            )
        return lines


def placement_options(settings: Settings, nodes: str, model: str) -> PlacementOptions:
    """Return the options of these settings, over `nodes` Macs. Raises MlxtpError for any other value."""
    wanted: str | int = int(nodes) if nodes.isdecimal() else nodes
    if wanted == "auto" and model == EMBEDDED_MODEL:
        wanted = "all"  # it is there to show that the cluster works, not to be fast
    return PlacementOptions(
        backend=settings.fabric,
        nodes=wanted,
        max_context=settings.max_context,
        fast_fences=settings.fast_fences,
        repeatable=settings.repeatable,
    )


def model_lack(ours: ModelStatus, theirs: ModelStatus | None, here: str, there: str) -> str:
    """Return the reason why the Mac called `there` cannot serve the model with this one; empty for none."""
    if theirs is None:
        return "it has not yet reported whether it has the model"
    if theirs.problem:
        return theirs.problem
    if not theirs.fingerprint:
        return "it is still getting the model"
    if ours.revision and theirs.revision and theirs.revision != ours.revision:
        return (
            f"it has the model at commit {theirs.revision[:12]}, {here} at {ours.revision[:12]}; "
            "`mlxtp pull MODEL --everywhere` brings the newest to all"
        )
    if ours.fingerprint and theirs.fingerprint != ours.fingerprint:
        if is_hub_id(ours.model):
            repair = f"`mlxtp verify {ours.model} --repair`"
            remedy = f"{repair} on {there}, then on {here}, gets the damaged files again"
        else:
            remedy = f"bring the same files to {there} and {here}"
        return (
            f"its files of the model differ: {theirs.fingerprint[:12]} there, {ours.fingerprint[:12]} on "
            f"{here}; {remedy}"
        )
    return ""


def devices_by_hand(items: Iterable[str], names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the RDMA devices that users set, by node id. Users give names of nodes, or starts of ids."""

    def nodes(text: str) -> list[str]:
        named = [node for node, name in names.items() if text == name]
        return named or [node for node in names if node.startswith(text)]

    found: dict[str, dict[str, str]] = {}
    for item in items:
        who, _, device = item.partition("=")
        one, _, other = who.partition("/")
        for node in nodes(one):
            for peer in nodes(other) if other else names.keys() - {node}:
                found.setdefault(node, {})[peer] = device
    return found


def matrix(chosen: Candidate) -> Matrix:
    """Return the RDMA devices between the ranks of a group, in the form that messages have."""
    return tuple(tuple(device or "" for device in row) for row in chosen.rdma)


def in_steps(size: int) -> int:
    """Round memory down to steps, so that only a large change makes another plan."""
    return size // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES
