"""Hello of this node, judgment of other nodes' hellos, and their statements about themselves."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..config import Settings
from ..errors import Code, MlxtpError, ProtocolError
from ..identity.store import Identity
from ..imports import installed, metal_wheel
from ..settings import SETTINGS
from ..wire.certificates import NodeIdentity
from ..wire.cluster_messages import AgentHello
from ..wire.codecs import printable
from ..wire.messages import PROTOCOL_VERSION, Error
from .cluster_state import BACK, READS, Roster, roster_text
from .links import ControlLink

log = logging.getLogger(__name__)

# --- versions and settings: can ranks of two Macs compute together? --------------------------------------


def compare(ours: AgentHello, theirs: AgentHello) -> str | None:
    """Return the first difference that keeps two agents from sharing a group, and the remedy; or None."""
    our_name, their_name = ours.name, theirs.name or theirs.node_id[:8]
    if ours.version != theirs.version:
        return (
            f"{our_name} speaks protocol {ours.version}, {their_name} protocol {theirs.version}: install "
            "the same mlxtp on both"
        )
    our_versions, their_versions = _pairs(ours.versions), _pairs(theirs.versions)
    for package, same, rule in _RULES:
        one, other = our_versions.get(package, "none"), their_versions.get(package, "none")
        if same(one) != same(other):
            return f"{our_name} runs {package} {one}, {their_name} {package} {other}: {rule}"
    our_flags, their_flags = _pairs(ours.flags), _pairs(theirs.flags)
    for flag in sorted(our_flags.keys() | their_flags.keys()):
        one, other = our_flags.get(flag, _UNSET), their_flags.get(flag, _UNSET)
        if one != other:
            return (
                f"{flag} is {one} on {our_name} and {other} on {their_name}: ranks compute alike only with "
                "the same; start both with the same flags"
            )
    return None


def unlike_kernels(ours: AgentHello, theirs: AgentHello) -> str:
    """Return a warning if both wheels of mlx-metal are known, and for different systems; else ""."""
    one, other = (_pairs(each.versions).get(_WHEEL, "") for each in (ours, theirs))
    if not one or not other or one == other:
        return ""
    return (
        f"mlx-metal is made for {one} on {ours.name} and for {other} on {theirs.name}: its kernels differ in "
        "speed and rounding"
    )


_UNSET = "at its default"
_WHEEL = "mlx-metal"


def _major(version: str) -> str:
    return version.partition(".")[0]


#: Package, the part of its version that must be equal, and the remedy.
_RULES: tuple[tuple[str, Callable[[str], str], str], ...] = (
    ("mlxtp", _major, "versions may differ behind the first point only; install the same mlxtp on both"),
    ("mlx", str, "ranks compute alike only with the same; install one version on both"),
    ("mlx-lm", str, "ranks compute alike only with the same; install one version on both"),
)


def _pairs(items: tuple[str, ...]) -> Mapping[str, str]:
    return {name: value for name, _, value in (item.partition("=") for item in items)}


# --- hellos ----------------------------------------------------------------------------------------------

_PACKAGES = ("mlxtp", "mlx", "mlx-lm")
#: Settings that change how ranks compute, or that one Mac applies for others.
_FLAGS = ("prefill_chunk", *(name for each in SETTINGS if each.same_on_all for name in each.names))
#: Prefixes of MLX's variables that ranks get from their agent, or that change no numbers. Others must be
#: equal: with a different MLX_BFS_MAX_WIDTH, a rank reorders a layer's collectives, and numbers are wrong.
_PER_RANK = ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL", "MLX_METAL_FAST_SYNCH",
             "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS", "MLX_MAX_OPS_PER_BUFFER",
             "MLX_MAX_MB_PER_BUFFER")  # fmt: skip


def versions_here() -> tuple[str, ...]:
    return tuple(f"{package}={installed(package) or 'none'}" for package in _PACKAGES)


def flags_of(settings: Settings, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return settings that are not at their defaults, and MLX's variables, as "name=value"."""
    defaults = type(settings)(settings.home, "", 0, 1, "")
    flags = [
        f"{name}={getattr(settings, name)}"
        for name in _FLAGS
        if getattr(settings, name) != getattr(defaults, name)
    ]
    names = [name for name in environment if name.startswith("MLX_") and not name.startswith(_PER_RANK)]
    return tuple(flags + [f"{name}={environment[name]}" for name in sorted(names)])


class Introduction:
    """Hellos between this node and others. `addresses` returns the agent's present addresses."""

    problem = ""  #: Problem for the user to fix, such as a copied home folder.

    def __init__(
        self,
        settings: Settings,
        identity: Callable[[], Identity],
        http: str,
        addresses: Callable[[], tuple[str, ...]],
        roster: Callable[[], Roster],
    ) -> None:
        self.name = printable(settings.name)  # a system's name may have any characters
        self.boot_id = secrets.token_hex(8)
        self.http = http
        self.addresses = addresses
        self._identity = identity
        wheel = metal_wheel()
        self._versions = (*versions_here(), READS, *([f"{_WHEEL}={wheel}"] if wheel else []))
        self._flags = flags_of(settings)
        self.unlike: dict[str, str] = {}  #: Last warning about kernels by node id, or "".
        self._roster = roster
        #: Boot ids of two machines with one identity, and the message about it, by node id.
        self._doubles: dict[str, tuple[tuple[str, ...], str]] = {}

    def hello(self) -> AgentHello:
        return AgentHello(
            PROTOCOL_VERSION,
            self._identity().node_id,
            self._identity().cluster_id,
            self.boot_id,
            self.name,
            self._versions,
            self._flags,
            self.addresses(),
            self.http,
        )

    def judge(self, identity: NodeIdentity, hello: AgentHello) -> MlxtpError | None:
        return self._not_a_member(identity, hello) or self._given_up(hello) or self._unlike(hello)

    def met(self, hello: AgentHello) -> None:
        """Note that a peer's start was accepted. Warn once if its kernels differ."""
        warning = unlike_kernels(self.hello(), hello)
        if warning and warning != self.unlike.get(hello.node_id):
            log.warning("%s; `mlxtp doctor` says how to get the newer one", warning)
        self.unlike[hello.node_id] = warning
        _, what = self._doubles.pop(hello.node_id, ((), ""))
        if what and self.problem == what:
            self.problem = ""

    def doubled(self, node_id: str, boot_ids: tuple[str, ...], what: str) -> ProtocolError:
        """Return the error for two agents with one identity. `judge` refuses both from now on."""
        self._copied(what)
        if node_id != self._identity().node_id:
            self._doubles[node_id] = (boot_ids, self.problem)
        return ProtocolError(self.problem, Code.DUPLICATE_NODE)

    def forget_member(self, node_id: str) -> None:
        self._doubles.pop(node_id, None)
        self.unlike.pop(node_id, None)

    def received_error(self, link: ControlLink, error: Error) -> None:
        """Take in a refusal by a peer that met another agent with this node's identity."""
        if error.code == Code.DUPLICATE_NODE and error.detail != self.problem:
            self.problem = error.detail
            log.error("%s: %s", link.hello.name or link.node_id[:8], error.detail)

    def _not_a_member(self, identity: NodeIdentity, hello: AgentHello) -> MlxtpError | None:
        if (identity.node_id, identity.cluster_id) != (hello.node_id, hello.cluster_id):
            return ProtocolError("its certificate and its hello name different nodes", Code.NOT_AUTHENTIC)
        if hello.node_id == self._identity().node_id:
            return self._our_own(hello)
        roster = self._roster()
        if roster.removed(identity.fingerprint):
            who = hello.name or hello.node_id[:8]
            return ProtocolError(f"{who} was removed from this cluster; on it, {BACK}", Code.REMOVED_NODE)
        known = roster.members().get(hello.node_id)
        if known is not None and known.fingerprint != identity.fingerprint:
            return ProtocolError(f"{hello.node_id[:8]} is known by another key", Code.NOT_AUTHENTIC)
        return None

    def roster_for(self, identity: NodeIdentity) -> str:
        """Return the roster for a member with another version. Raises ProtocolError if it was removed."""
        if self._roster().removed(identity.fingerprint):
            raise ProtocolError("it was removed from this cluster", Code.REMOVED_NODE)
        return roster_text(self._roster().entries)

    def _given_up(self, hello: AgentHello) -> MlxtpError | None:
        boots, what = self._doubles.get(hello.node_id, ((), ""))
        if hello.boot_id not in boots:
            return None
        return ProtocolError(f"{what}. Then restart mlxtp", Code.DUPLICATE_NODE)

    def _our_own(self, hello: AgentHello) -> MlxtpError:
        if hello.boot_id == self.boot_id:
            return ProtocolError("this is the same node", Code.SAME_NODE)
        self._copied(f"another running agent has the identity of {self.name}")
        return ProtocolError(self.problem, Code.DUPLICATE_NODE)

    def _unlike(self, theirs: AgentHello) -> MlxtpError | None:
        difference = compare(self.hello(), theirs)
        return ProtocolError(difference, Code.MISMATCH) if difference else None

    def _copied(self, what: str) -> None:
        self.problem = (
            f"{what}: a home folder was copied. On the copy, stop mlxtp, remove the folder identity in it "
            "and join again with a new token"
        )
        log.error("%s", self.problem)


# --- reports of others -----------------------------------------------------------------------------------


@dataclass(slots=True)
class PeerInfo:
    """Statements of other members, by node id."""

    names: dict[str, str] = field(default_factory=dict)
    https: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)
    met_at: dict[str, float] = field(default_factory=dict)  #: When a node's link came up.

    def met(self, hello: AgentHello, now: float) -> None:
        self.names[hello.node_id] = hello.name
        self.met_at.setdefault(hello.node_id, now)
        self.https[hello.node_id] = hello.http
        self.addresses[hello.node_id] = hello.addresses

    def drop(self, node_id: str) -> None:
        self.met_at.pop(node_id, None)

    def forget_member(self, node_id: str) -> None:
        self.drop(node_id)
        for known in (self.names, self.https, self.addresses):
            known.pop(node_id, None)
