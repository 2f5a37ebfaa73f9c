"""How this Mac comes to belong to a cluster: it has been a member, founds one, or joins one with a token."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass

from ..cluster.admission import ask_to_join
from ..cluster.dialing import host_and_port
from ..cluster.discovery import Discovery
from ..cluster.identity import Identity, Store
from ..cluster.joining import AskElsewhere, Denied, Joiner
from ..cluster.sightings import Advert, Sighting
from ..cluster.tokens import Token, read_token
from ..config import Settings
from ..errors import Code, ConfigError, LinkError, ProtocolError, UserError
from ..wire.joining import NONCE_BYTES
from ..wire.messages import PROTOCOL_VERSION
from .state import forget

log = logging.getLogger(__name__)

FIND_S = 30.0
"""How long a Mac of the token's cluster is looked for."""
ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Entered:
    """Who this Mac is now, whether it founded or joined its cluster just now, and where others may be."""

    identity: Identity
    founded: bool = False
    joined: bool = False
    peers: tuple[str, ...] = ()


async def enter(settings: Settings, store: Store) -> Entered:
    """Raises UserError in the words of whoever typed `mlxtp node`."""
    identity = store.load_or_create()
    if not settings.join:
        if identity.membership is not None:
            return Entered(identity)
        if settings.join is not None:
            raise ConfigError(
                "--join without a token is for a Mac that is a member already, and this one is not. Run "
                "`mlxtp token` on a Mac of the cluster, then here `mlxtp node --join TOKEN`"
            )
        forget(settings.home)
        return Entered(store.found_cluster(), founded=True)
    token = read_token(settings.join)
    if identity.membership is not None:
        if identity.cluster_id == token.cluster_id:
            log.info("this Mac is a member of cluster %s already", identity.cluster_id)
            return Entered(identity)
        raise ConfigError(
            f"this Mac is a member of cluster {identity.cluster_id}, the token is for {token.cluster_id}; "
            "`mlxtp cluster leave` ends the one membership, then the token begins the other"
        )
    return await _join(settings, store, identity, token)


async def _join(settings: Settings, store: Store, identity: Identity, token: Token) -> Entered:
    seen: dict[str, None] = dict.fromkeys(settings.peers)
    discovery = Discovery(lambda sightings: _note(sightings, token, seen), log.warning)
    if settings.discovery:
        only = (settings.interface,) if settings.interface else ()
        await discovery.start(_advert(settings, identity), only)
    try:
        return await _ask_around(settings, store, identity, token, seen)
    finally:
        if settings.discovery:
            await discovery.close()


async def _ask_around(
    settings: Settings, store: Store, identity: Identity, token: Token, seen: dict[str, None]
) -> Entered:
    log.info("looking for cluster %s", token.cluster_id)
    until, problem = time.monotonic() + FIND_S, ""
    while time.monotonic() < until:
        for address in list(seen):
            where = host_and_port(address)
            if where is None:
                continue  # by the word of whoever was asked before
            nonce = secrets.token_bytes(NONCE_BYTES)
            joiner = Joiner(token, identity.node_id, identity.key, settings.name, nonce)
            try:
                granted = await ask_to_join(*where, joiner)
            except Denied:
                raise
            except AskElsewhere as elsewhere:
                problem = elsewhere.detail
                seen.update(dict.fromkeys(elsewhere.addresses))
            except (LinkError, ProtocolError) as error:
                problem = error.detail
            except UserError as refused:
                # Else another cluster may only pretend to be the token's on this network.
                if refused.code is not Code.JOIN_REFUSED or address in settings.peers or len(seen) == 1:
                    raise
                problem = refused.detail
            else:
                forget(settings.home)
                joined = store.save_membership(granted.membership)
                return Entered(joined, joined=True, peers=tuple(filter(host_and_port, granted.peers)))
        await asyncio.sleep(ASK_AGAIN_S)
    if not seen:
        raise ConfigError(
            f"no Mac of cluster {token.cluster_id} announced itself on this network within {FIND_S:g} s. "
            "Is `mlxtp node` running there? Its address can be given: --peer HOST:PORT"
        )
    raise ConfigError(f"cluster {token.cluster_id} could not be joined within {FIND_S:g} s: {problem}")


def _note(sightings: tuple[Sighting, ...], token: Token, seen: dict[str, None]) -> None:
    # Those that can let others in come first.
    for sighting in sorted(sightings, key=lambda sighting: not sighting.has_ca):
        if sighting.cluster_id == token.cluster_id:
            seen.update(dict.fromkeys(sighting.addresses))


def _advert(settings: Settings, identity: Identity) -> Advert:
    return Advert(identity.node_id, "", settings.name, settings.control_port or 1, False, PROTOCOL_VERSION)
