"""Changes of the shared state that this node makes and receives: of members, signed, and of deployments.

The authority signs every admission, so that gossip cannot invent members. A member signs a removal with its
own key. A receiver never trusts a relaying neighbor alone. docs/security.md lists what harm a member can do.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from .. import audit
from ..errors import Code, RemoteProtocolError, UserError
from ..identity.store import Identity
from ..wire.certificates import PrivateKey, PublicKey, authority_key, is_signed, key_at, point_of, sign
from ..wire.cluster_messages import MAX_MEMBERS, MAX_MODEL, Deployment, Deployments, Members, RosterEntry
from .cluster_state import (
    ADMITTED,
    MAX_ROWS,
    NOT_REMOVED,
    ClusterState,
    DeploymentTable,
    Replica,
    Roster,
    admission_of,
    fields_of,
    holding_of,
    is_founder,
    name_of,
    received,
    removal_of,
    remover_of,
)
from .links import ControlLink, Handlers, PeerLinks

log = logging.getLogger(__name__)


# --- signatures of members' entries ---------------------------------------------------------------------

_ADMISSION = b"mlxtp roster admission\0"
_REMOVAL = b"mlxtp roster removal\0"
_AUTHORIZED = b"mlxtp roster authorized removal\0"
_HOLDING = b"mlxtp roster holder\0"


class RosterProofs:
    """Signatures of roster entries: made with this node's keys, and checked on receipt."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._authority = authority_key(identity.member.authority)

    def admission(
        self, entry: RosterEntry, admitted_by: str = "", address: str = "", at: int = 0
    ) -> RosterEntry:
        """Fill in an admission, and sign it if this Mac has the authority's key. A node may be its own
        admitter only with this Mac's key: that marks the founder.
        """
        if admitted_by == entry.node_id and entry.fingerprint != self.identity.fingerprint:
            admitted_by = ""
        entry = replace(entry, admitted_by=admitted_by, address=address, at=at)
        authority = self.identity.authority
        if authority is None:
            return entry
        return replace(entry, admission=self._sign(authority.key, _ADMISSION, admission_of(entry)))

    def own(self, entry: RosterEntry) -> RosterEntry:
        return self.admission(entry, self.identity.node_id if self.identity.authority else "")

    def removal(self, entry: RosterEntry) -> RosterEntry:
        """Sign a removal with this node's key, and with the authority's key if it is here."""
        key, authority = self.identity.key, self.identity.authority
        entry = replace(entry, remover=point_of(key.public_key()).hex())
        entry = replace(entry, removal=self._sign(key, _REMOVAL, removal_of(entry)[:2]))
        if authority is None:
            return entry
        return replace(entry, authorized=self._sign(authority.key, _AUTHORIZED, removal_of(entry)[:3]))

    def holding(self, entry: RosterEntry) -> RosterEntry:
        authority = self.identity.authority
        assert authority is not None
        return replace(entry, holding=self._sign(authority.key, _HOLDING, holding_of(entry)[:3]))

    def proven(self, entries: Iterable[RosterEntry], held: Roster) -> tuple[RosterEntry, ...]:
        """Return another member's entries that are new to `held` and have valid signatures."""
        mine = {entry.fingerprint: entry for entry in held.entries}
        known, admitted = dict(mine), []
        for told in entries:
            had = mine.get(told.fingerprint)
            if self._is_admitted(told, had):
                entry = told
            elif had is not None:
                entry = replace(told, **fields_of(had, ADMITTED))  # keep the held admission, signed or not
            else:
                continue
            if entry != had and self._is_holding_proven(entry, had):
                known.setdefault(entry.fingerprint, entry)
                admitted.append(entry)
        return tuple(each for each in admitted if self._is_proven(each, mine.get(each.fingerprint), known))

    def _is_admitted(self, entry: RosterEntry, mine: RosterEntry | None) -> bool:
        if mine is not None and mine.admission and _admission(entry) == _admission(mine):
            return True
        return self._by_authority(entry.admission, _ADMISSION, admission_of(entry))

    def _is_proven(
        self, entry: RosterEntry, mine: RosterEntry | None, known: Mapping[str, RosterEntry]
    ) -> bool:
        if not entry.removed:
            return all(getattr(entry, name) == empty for name, empty in NOT_REMOVED.items())
        if mine is not None and mine.removal and removal_of(entry) == removal_of(mine):
            return True
        key, remover = _key(entry.remover), known.get(remover_of(entry))
        if key is None or not _holds(key, entry.removal, _REMOVAL, self._parts(removal_of(entry)[:2])):
            return False
        if entry.authorized:
            return self._by_authority(entry.authorized, _AUTHORIZED, removal_of(entry)[:3])
        return remover is not None and _may_remove(remover, entry, known)

    def _is_holding_proven(self, entry: RosterEntry, mine: RosterEntry | None) -> bool:
        if mine is not None and holding_of(entry) == holding_of(mine):
            return True
        if not entry.holding:
            return not (entry.holds or entry.holds_in)
        return self._by_authority(entry.holding, _HOLDING, holding_of(entry)[:3])

    def _by_authority(self, signature: str, label: bytes, parts: tuple[str | int, ...]) -> bool:
        return _holds(self._authority, signature, label, self._parts(parts))

    def _sign(self, key: PrivateKey, label: bytes, parts: tuple[str | int, ...]) -> str:
        return sign(key, label, *self._parts(parts)).hex()

    def _parts(self, parts: tuple[str | int, ...]) -> list[bytes]:
        return [str(part).encode() for part in (self.identity.cluster_id, *parts)]


def _may_remove(remover: RosterEntry, entry: RosterEntry, known: Mapping[str, RosterEntry]) -> bool:
    """Return True if a member without the authority may remove another: unless the authority, the founder or
    itself removed it before. Other removals do not count: their versions prove nothing. `Roster` protects
    holders of the authority's key.
    """
    if remover.fingerprint == entry.fingerprint:
        return True
    if not remover.removed or entry.removed_in <= remover.removed_in:
        return True
    by = known.get(remover_of(remover))
    if remover.authorized:
        return False
    return by is None or not (is_founder(by) or by.fingerprint == remover.fingerprint)


def _admission(entry: RosterEntry) -> tuple[str | int, ...]:
    return (*admission_of(entry), entry.admission)


def _key(point: str) -> PublicKey | None:
    try:
        return key_at(bytes.fromhex(point))
    except ValueError:
        return None


def _holds(key: PublicKey, signature: str, label: bytes, parts: list[bytes]) -> bool:
    try:
        return is_signed(key, bytes.fromhex(signature), label, *parts)
    except ValueError:
        return False


# --- changes of members ---------------------------------------------------------------------------------


def restored(proofs: RosterProofs, identity: Identity, name: str, kept: ClusterState) -> Replica:
    """Restore the saved state, with this node as a member, and as a holder if it has the authority's key."""
    found = Replica(identity.node_id, kept)
    if identity.node_id not in found.roster.members():
        found.hold(found.roster.admitting(identity.node_id, name, identity.fingerprint, proofs.own))
    if identity.authority is not None and identity.node_id not in found.roster.holders():
        found.hold(found.roster.stating(identity.node_id, proofs.holding, holds=True))
    return found


class Enrolment:
    """Changes of the roster. `name_of` returns a node's name, for users."""

    def __init__(self, proofs: RosterProofs, replica: Replica, name_of: Callable[[str], str]) -> None:
        self._proofs = proofs
        self._replica = replica
        self._name_of = name_of
        self.on_change = Handlers[Callable[[], None]]()  #: Called after each change.
        self.on_gone = Handlers[Callable[[str], object]]()  #: Called with each former member, to forget it.
        self._members = frozenset(replica.roster.members())

    def admit(
        self, node_id: str, name: str, fingerprint: str, *, by: str = "", address: str = "", token: str = ""
    ) -> None:
        """Admit a member, by a `token` that `by` requested, or as already admitted. Raises UserError."""
        seal = partial(self._proofs.admission, admitted_by=by, address=address, at=int(time.time()))
        self._replica.hold(self._replica.roster.admitting(node_id, name, fingerprint, seal))
        self._changed()
        name, how = name or node_id[:8], f", by a token that {self._name_of(by)} requested" if by else ""
        words, by = f"{name} is a member now{how}", self._name_of(by or node_id)
        about = {"member": name, "node_id": node_id, "address": address, "token": token, "by": by}
        if token:
            audit.record("member_joined", words, about)
        else:
            log.info("%s", words)

    def remove(self, *node_ids: str) -> None:
        """Remove members. Raises UserError for an unknown node, and for a holder unless this Mac is one."""
        replica, name_of = self._replica, self._name_of
        holders = replica.roster.holders()
        held = [each for each in holders if each in node_ids and each != replica.self_id]
        if held and self._proofs.identity.authority is None:
            others = " or ".join(name_of(each) for each in holders if each not in held)
            raise UserError(
                f"{name_of(held[0])} holds the cluster's authority, so only another Mac that holds it can "
                f"remove it: {f'run this command on {others}' if others else 'there is none'}. "
                "`mlxtp cluster leave` works on it"
            )
        for node_id in node_ids:
            words = f"{name_of(replica.self_id)} removes {name_of(node_id)} from the cluster"
            audit.record("member_removed", words, {"member": name_of(node_id), "node_id": node_id})
            replica.hold(replica.roster.removing(node_id, self._proofs.removal))
        self._changed()

    def received(self, link: ControlLink | None, members: Members) -> None:
        replica, before = self._replica, self._replica.roster
        if replica.enrols(self._proofs.proven(members.entries, before)):
            for entry in replica.roster.entries:
                if entry.removed and not before.removed(entry.fingerprint):
                    by = replica.roster.by_key(remover_of(entry))
                    who = self._name_of(by.node_id) if by else "a member"
                    words, node_id = f"{who} removed {entry.name}", entry.node_id
                    about = {"member": entry.name, "node_id": node_id, "by": who}
                    audit.record("member_removed", words, about)
            self._changed()
        if (surplus := replica.roster.surplus()) and not before.surplus():
            who = self._name_of(link.node_id) if link is not None else "another member"
            words = "%s reports more than %d members; the latest are left out: %s"
            log.warning(words, who, MAX_MEMBERS, ", ".join(map(self._name_of, surplus)))

    def hold(self, identity: Identity) -> None:
        """Continue with or without the authority's key, and state that to all members."""
        proofs, holds = self._proofs, identity.authority is not None
        if holds:
            proofs.identity = identity
        self._replica.hold(self._replica.roster.stating(identity.node_id, proofs.holding, holds=holds))
        proofs.identity = identity
        self._changed()

    def _changed(self) -> None:
        for handler in self.on_change:
            handler()
        before, self._members = self._members, frozenset(self._replica.roster.members())
        for node_id in before - self._members - {self._replica.self_id}:
            for gone in self.on_gone:
                gone(node_id)


# --- changes of deployments -----------------------------------------------------------------------------

RELAY_S = 0.5  #: Least seconds between relays of others' changes; beats reveal omitted ones.
TableHandler = Callable[[DeploymentTable, DeploymentTable], None]  #: Gets the tables before and after.


class DesiredDeployments:
    """Changes of the deployments. Calls `changed` after each, and after all handlers."""

    def __init__(
        self,
        replica: Replica,
        links: PeerLinks,
        changed: Callable[[], None],
        name_of: Callable[[str], str] = str,
    ) -> None:
        self._replica = replica
        self._links = links
        self._changed = changed
        self._name_of = name_of
        self.on_change = Handlers[TableHandler]()  #: Called when this or another node changes deployments.
        self.retry_if = Handlers[Callable[[str], bool]]()  #: If one is True, a repeated request is a change.
        self._parts: WeakKeyDictionary[ControlLink, list[Deployment]] = WeakKeyDictionary()
        self._relay_at = -math.inf
        links.on(self._received, Deployments)

    @property
    def table(self) -> DeploymentTable:
        return self._replica.deployments

    def has(self, model: str, *, replace: bool = False, **asked: Any) -> bool:
        return self._is_there(self.row(model, **asked), replace=replace)

    def row(self, model: str, **asked: Any) -> Deployment:
        """Return the row of a model with the given fields. They override earlier fields that contradict them:
        a split and another number of Macs, a pipeline and one Mac.
        """
        row = self.table.get(name_of(model)) or Deployment(name_of(model))
        split, parallel, nodes = (asked.get(name, "") for name in ("split", "parallel", "nodes"))
        stages = str(row.split.count(",") + 1)
        if split and split != "auto":
            row = replace(row, nodes="auto", parallel="")
        elif parallel in ("tensor", "auto") or nodes not in ("", "auto", "all", stages):
            row = replace(row, split="auto")
        if nodes == "1" and row.parallel == "pipeline":
            row = replace(row, parallel="")
        elif parallel == "pipeline" and row.nodes == "1":
            row = replace(row, nodes="auto")
        return replace(row, model=model, **asked)

    def serve(self, model: str, *, replace: bool = False, **asked: Any) -> Deployment:
        """Add a deployment of `model`, or change its `asked` fields; `replace`: remove all others.

        Without a difference the table stays as it is, unless `retry_if`. Raises UserError for an impossible
        name, and if there is no room.
        """
        if len(model) > MAX_MODEL or not model.isprintable():
            raise UserError(
                f"a model is called by at most {MAX_MODEL} printable characters, not {model[:200]!r}"
            )
        row = self.row(model, **asked)
        there = self._is_there(row, replace=replace)
        if not there or any(lacking(model) for lacking in self.retry_if):
            self._set(self.table.setting(row, self._replica.self_id, alone=replace))
        return row

    def _is_there(self, row: Deployment, *, replace: bool) -> bool:
        return row == self.table.get(row.name) and (not replace or len(self.table.live()) == 1)

    def unload(self, model: str) -> None:
        table, name = self._replica.deployments, name_of(model)
        if table.get(name) is None:
            deployed = ", ".join(row.name for row in table.live()) or "none"
            raise UserError(f"{model[:200]} is not deployed. Deployed models: {deployed}")
        self._set(table.removing(self._replica.self_id, name))

    def unload_all(self) -> None:
        table = self._replica.deployments
        if names := [row.name for row in table.rows if not row.removed]:
            self._set(table.removing(self._replica.self_id, *names))

    def _received(self, link: ControlLink, message: Deployments) -> None:
        rows = self._parts.setdefault(link, [])
        rows += message.rows
        if len(rows) > MAX_ROWS:
            raise RemoteProtocolError(f"more than {MAX_ROWS} deployments", Code.FIELD_INVALID)
        if message.more:
            return
        del self._parts[link]
        before = self._replica.deployments
        if self._replica.desires(received(rows, message.floor)):
            self._record_removed(link, before)
            self._spread(before, relayed=True)

    def _record_removed(self, link: ControlLink, before: DeploymentTable) -> None:
        """Record who removed deployments, and who reports it: only the link proves its sender."""
        told_by, writers = self._name_of(link.node_id), {row.name: row.writer for row in self.table.rows}
        for row in before.live():
            if self.table.get(row.name) is None:
                by = self._name_of(writers.get(row.name) or link.node_id)
                words = f"{by} removed {row.model}" + (f", as {told_by} reports" if by != told_by else "")
                about = {"model": row.model, "by": by, "reported_by": told_by}
                audit.record("model_unloaded", words, about, foreign=True)

    def _set(self, table: DeploymentTable) -> None:
        before, self._replica.deployments = self._replica.deployments, table
        for row in before.live():
            if table.get(row.name) is None:
                audit.record("model_unloaded", f"{row.model} is no longer to be served", {"model": row.model})
        for row in table.live():
            if (was := before.get(row.name)) is None or was.model != row.model:
                audit.record("model_served", f"{row.model} is to be served", {"model": row.model})
        self._spread(before)

    def _spread(self, before: DeploymentTable, *, relayed: bool = False) -> None:
        table, now = self.table, time.monotonic()
        for handler in self.on_change:
            handler(before, table)
        if not relayed or now >= self._relay_at:
            self._relay_at = now + RELAY_S
            self._links.broadcast(*table.messages())
        self._changed()
