"""Join tokens, requested on any Mac and issued by the one that holds the authority's key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable

from ..errors import ConfigError, MlxtpError, UserError
from ..identity.join_token import read_token
from ..wire.certificates import authority_hash
from ..wire.cluster_messages import TokenIssued, TokenWanted
from .surroundings import Surroundings

log = logging.getLogger(__name__)

ANSWER_S = 5.0


class TokenIssuing:
    """Requests and issues join tokens. `issuer` makes one for a member; None on Macs that cannot."""

    def __init__(self, cluster: Surroundings) -> None:
        self.issuer: Callable[[str], str] | None = None
        self._cluster = cluster
        self._answers: dict[bytes, asyncio.Future[str]] = {}  #: Open requests, by nonce.

    async def token(self) -> str:
        """Return a new join token, from the Mac that can issue one. Raises UserError when none can now."""
        if self.issuer is not None:
            return self.issuer("")
        cluster = self._cluster
        founder = cluster.peer_info.authority
        if founder and founder not in cluster.leadership.roster.members():
            raise UserError(
                "the Mac that founded this cluster has left it, so no Mac can join it; found a new cluster"
            )
        if founder not in cluster.links.nodes():
            who = cluster.name_of(founder) if founder else "the Mac that founded this cluster"
            raise UserError(
                f"only {who} can issue join tokens, and it is away; start it, or run this command there"
            )
        nonce = secrets.token_bytes(16)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[nonce] = answer
        try:
            cluster.links.send(founder, TokenWanted(nonce))
            async with asyncio.timeout(ANSWER_S):
                return self._checked(await answer, founder)
        except TimeoutError:
            raise UserError(f"{cluster.name_of(founder)} did not reply; try again") from None
        finally:
            del self._answers[nonce]

    def _checked(self, text: str, founder: str) -> str:
        """Return the token as it is written here. Raises UserError for one that is not of this cluster."""
        membership = self._cluster.identity.membership
        assert membership is not None
        with contextlib.suppress(ConfigError):
            token = read_token(text)
            if (token.cluster_id, token.authority_hash) == (
                membership.cluster_id,
                authority_hash(membership.authority),
            ):
                return token.text()
        name = self._cluster.name_of(founder)
        raise UserError(
            f"{name} replied with something else than a join token of this cluster; do not trust that Mac"
        )

    def received(self, node_id: str, message: TokenWanted | TokenIssued) -> None:
        """Take in another agent's request for a token, or its reply with one."""
        if isinstance(message, TokenIssued):
            self._issued(message)
        else:
            self._issue(node_id, message)

    def _issue(self, node_id: str, wanted: TokenWanted) -> None:
        token, problem = "", "this Mac cannot issue join tokens"
        if self.issuer is not None:
            try:
                token, problem = self.issuer(node_id), ""
                log.info("%s requested a join token", self._cluster.name_of(node_id))
            except UserError as error:
                problem = error.detail
        with contextlib.suppress(MlxtpError):
            self._cluster.links.send(node_id, TokenIssued(wanted.nonce, token, problem))

    def _issued(self, issued: TokenIssued) -> None:
        answer = self._answers.get(issued.nonce)
        if answer is None or answer.done():
            return
        if issued.token:
            answer.set_result(issued.token)
        else:
            answer.set_exception(UserError(issued.problem))
