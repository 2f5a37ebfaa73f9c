"""Roster of the cluster: signatures of its entries, and changes as this node makes and receives them.

The authority signs every admission, so that gossip invents no member. The member that removes another one
signs that with its own key. A receiver never trusts a relaying neighbour alone. docs/security.md lists what
one member can still do to the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from .. import audit
from ..errors import UserError
from ..identity.store import Identity
from ..wire.certificates import PublicKey, authority_key, fingerprint, is_signed, key_at, point_of, sign
from ..wire.cluster_messages import MAX_MEMBERS, Members, RosterEntry
from .cluster_state import ClusterState, Replica, Roster, admission_of, is_founder, removal_of
from .links import ControlLink

log = logging.getLogger(__name__)

_ADMISSION = b"mlxtp roster admission\0"
_REMOVAL = b"mlxtp roster removal\0"


class RosterProofs:
    """Signatures that this node makes, and checks of those that it receives."""

    def __init__(self, identity: Identity) -> None:
        assert identity.membership is not None
        self._identity = identity
        self._authority = authority_key(identity.membership.authority)

    def admission(
        self, entry: RosterEntry, admitted_by: str = "", address: str = "", at: int = 0
    ) -> RosterEntry:
        """Sign an admission, on the Mac that has the authority; elsewhere add no signature.

        The signature names a Mac as admitted by itself only for this Mac's own key: that marks the founder.
        """
        if admitted_by == entry.node_id and entry.fingerprint != self._identity.fingerprint:
            admitted_by = ""
        entry = replace(entry, admitted_by=admitted_by, address=address, at=at)
        authority = self._identity.authority
        if authority is None:
            return entry
        return replace(entry, admission=sign(authority.key, _ADMISSION, *self._admission(entry)).hex())

    def own(self, entry: RosterEntry) -> RosterEntry:
        """Sign this node's own admission, as `admission` does: the founder admitted itself."""
        return self.admission(entry, self._identity.node_id if self._identity.authority else "")

    def removal(self, entry: RosterEntry) -> RosterEntry:
        """Sign the removal that the entry records, in this node's name."""
        key = self._identity.key
        entry = replace(entry, remover=point_of(key.public_key()).hex())
        return replace(entry, removal=sign(key, _REMOVAL, *self._removal(entry)).hex())

    def completed(self, roster: Roster) -> Roster:
        """Sign entries that an earlier version kept without signatures, on the Mac that has the authority."""
        if self._identity.authority is None:
            return roster
        return Roster(tuple(self._completed(entry) for entry in roster.entries))

    def _completed(self, entry: RosterEntry) -> RosterEntry:
        if not entry.admission:
            ours = entry.fingerprint == self._identity.fingerprint
            entry = self.own(entry) if ours else self.admission(entry)
        if entry.removed and not entry.removal:
            entry = self.removal(replace(entry, removed_in=entry.version))
        return entry

    def proven(self, entries: Iterable[RosterEntry], held: Roster) -> tuple[RosterEntry, ...]:
        """Return those of another member's entries that are news to `held` and have valid signatures."""
        mine = {entry.fingerprint: entry for entry in held.entries}
        known, admitted = dict(mine), []
        for told in entries:
            had = mine.get(told.fingerprint)
            if self._is_admitted(told, had):
                entry = told
            elif had is not None:
                entry = _with_removal(had, told)  # the held entry stays, signed or not
            else:
                continue
            if entry != had:
                known.setdefault(entry.fingerprint, entry)
                admitted.append(entry)
        return tuple(each for each in admitted if self._is_proven(each, mine.get(each.fingerprint), known))

    def _is_admitted(self, entry: RosterEntry, mine: RosterEntry | None) -> bool:
        if mine is not None and mine.admission and _admission(entry) == _admission(mine):
            return True
        return _holds(self._authority, entry.admission, _ADMISSION, self._admission(entry))

    def _is_proven(
        self, entry: RosterEntry, mine: RosterEntry | None, known: Mapping[str, RosterEntry]
    ) -> bool:
        """Return True when an entry has no removal, or proves it."""
        if not entry.removed:
            return not (entry.removed_in or entry.remover or entry.removal)
        if mine is not None and mine.removal and removal_of(entry) == removal_of(mine):
            return True
        key = _key(entry.remover)
        remover = known.get(fingerprint(key)) if key is not None else None
        if key is None or remover is None or not _may_remove(remover, entry, known):
            return False
        return _holds(key, entry.removal, _REMOVAL, self._removal(entry))

    def _admission(self, entry: RosterEntry) -> list[bytes]:
        return [str(part).encode() for part in (self._identity.cluster_id, *admission_of(entry))]

    def _removal(self, entry: RosterEntry) -> list[bytes]:
        parts = (self._identity.cluster_id, entry.fingerprint, entry.removed_in)
        return [str(part).encode() for part in parts]


def remover_of(entry: RosterEntry) -> str:
    """Return the fingerprint of the key that signed an entry's removal; empty for none."""
    key = _key(entry.remover)
    return fingerprint(key) if key is not None else ""


def _may_remove(remover: RosterEntry, entry: RosterEntry, known: Mapping[str, RosterEntry]) -> bool:
    """Return True when the rules let one member remove another.

    A member may leave. No other Mac removes the founder. A member removes no other after a removal of its own
    that the founder or itself signed. Removals by others do not end that right: their versions prove nothing.
    """
    if remover.fingerprint == entry.fingerprint:
        return True
    if is_founder(entry):
        return False
    if not remover.removed or entry.removed_in <= remover.removed_in:
        return True
    by = known.get(remover_of(remover))
    return by is None or not (is_founder(by) or by.fingerprint == remover.fingerprint)


def _with_removal(entry: RosterEntry, removed: RosterEntry) -> RosterEntry:
    """Return an entry with the removal of another entry of the same key."""
    return replace(
        entry,
        removed=removed.removed,
        removed_in=removed.removed_in,
        remover=removed.remover,
        removal=removed.removal,
    )


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


# --- changes ---------------------------------------------------------------------------------------------


def restored(proofs: RosterProofs, identity: Identity, name: str, kept: ClusterState) -> Replica:
    """Restore the kept state, signed where this node can sign, and with this node as a member."""
    found = Replica(identity.node_id, replace(kept, roster=proofs.completed(kept.roster)))
    if identity.node_id not in found.roster.members():
        found.admit(identity.node_id, name, identity.fingerprint, proofs.own)
    return found


class Enrolment:
    """Changes of the roster. `name_of` returns a node's name, for users."""

    def __init__(self, proofs: RosterProofs, replica: Replica, name_of: Callable[[str], str]) -> None:
        self._proofs = proofs
        self._replica = replica
        self._name_of = name_of
        self._on_change: list[Callable[[], None]] = []

    def on_change(self, handler: Callable[[], None]) -> None:
        """Have `handler` called when a node became a member or ceased to be one."""
        self._on_change.append(handler)

    def admit(
        self, node_id: str, name: str, fingerprint: str, *, by: str = "", address: str = "", token: str = ""
    ) -> None:
        """Admit a new member, by a `token` that `by` requested. Raises UserError when it cannot be one."""
        seal = partial(self._proofs.admission, admitted_by=by, address=address, at=int(time.time()))
        self._replica.admit(node_id, name, fingerprint, seal)
        self._changed()
        name, how = name or node_id[:8], f", by a token that {self._name_of(by)} requested" if by else ""
        words, by = f"{name} is a member now{how}", self._name_of(by or node_id)
        about = {"member": name, "node_id": node_id, "address": address, "token": token, "by": by}
        audit.record("member_joined", words, about)

    def remove(self, *node_ids: str) -> None:
        """Remove members. Raises UserError for a node that is no member, or a founder on another Mac."""
        replica, name_of = self._replica, self._name_of
        if (founder := replica.roster.founder()) in node_ids and founder != replica.self_id:
            raise UserError(
                f"{name_of(founder)} founded this cluster, and no other Mac can remove it; run "
                "`mlxtp cluster leave --force` there"
            )
        for node_id in node_ids:
            words = f"{name_of(replica.self_id)} removes {name_of(node_id)} from the cluster"
            audit.record("member_removed", words, {"member": name_of(node_id), "node_id": node_id})
            replica.remove(node_id, self._proofs.removal)
        self._changed()

    def received(self, link: ControlLink, members: Members) -> None:
        """Take in another member's roster."""
        replica = self._replica
        full, before = replica.overfull, replica.roster
        if replica.enrols(self._proofs.proven(members.entries, before)):
            for entry in replica.roster.entries:
                if entry.removed and not before.removed(entry.fingerprint):
                    by = replica.roster.by_key(remover_of(entry))
                    who = self._name_of(by.node_id) if by else "a member"
                    words, node_id = f"{who} removed {entry.name}", entry.node_id
                    about = {"member": entry.name, "node_id": node_id, "by": who}
                    audit.record("member_removed", words, about)
            self._changed()
        if replica.overfull and not full:
            words = "%s reports more than %d members; those beyond are left out"
            log.warning(words, self._name_of(link.node_id), MAX_MEMBERS)

    def _changed(self) -> None:
        for handler in self._on_change:
            handler()
