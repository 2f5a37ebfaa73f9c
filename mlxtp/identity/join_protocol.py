"""Exchange by which a Mac becomes a member, with its two ends. Messages in, messages out; no I/O.

    joiner                                             member
      connects by TLS, shows nothing, trusts nothing
      ◄──────────── JoinOffer: the authority's certificate, a nonce
      the authority is the token's, and made the certificate that TLS shows: only now it sends
      JoinRequest: its key, proof of the token, signature by the key ────────────►
                                the token is good, proof and signature are right
      ◄──────────── JoinGrant: the certificate, proof of the token; or a JoinRefusal, signed by the authority

Both proofs and the signature cover the cluster, the authority's and the member's certificate, the joiner's
key, node id and name, and a nonce of either side. Nothing of one exchange is therefore valid in another one,
or between two others. Both ends draw a fresh nonce for each exchange.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import Code, ProtocolError, UserError
from ..wire.certificates import (
    Authority,
    MemberCertificates,
    PrivateKey,
    PublicKey,
    authority_hash,
    authority_key,
    check_node,
    cluster_of,
    fingerprint,
    hash_of,
    is_signed,
    key_at,
    point_of,
    sign,
)
from ..wire.peer_messages import MAX_NAME, PROOF_BYTES, JoinGrant, JoinOffer, JoinRefusal, JoinRequest
from .join_token import JoinToken, TokenIssuer

_REQUEST = b"mlxtp join request\0"
_GRANT = b"mlxtp join grant\0"
_REFUSAL = b"mlxtp join refusal\0"
_SIGNATURE = b"mlxtp join signature\0"

_ECDSA = ec.ECDSA(hashes.SHA256())
_NEW_TOKEN = "make a new one with `mlxtp token`"
_UNKNOWN = (
    f"this join token is not known here, or its proof is wrong; {_NEW_TOKEN} on this cluster's first Mac"
)


class AskElsewhere(UserError):
    """A member of the right cluster answered, but another Mac admits joiners: `name`, at `addresses`."""

    code = Code.JOIN_REFUSED

    def __init__(self, name: str, addresses: tuple[str, ...]) -> None:
        super().__init__(
            f"this Mac cannot let others in; {name} can, at {' or '.join(addresses) or 'its address'}"
        )
        self.name = name
        self.addresses = addresses


class Denied(UserError):
    """The Mac that admits joiners proved its identity and refused this one: no other Mac will admit it."""

    code = Code.JOIN_REFUSED


@dataclass(frozen=True, slots=True)
class Granted:
    """Grant to the joiner. `cluster` is the cluster's name for people, `peers` addresses to dial first."""

    membership: MemberCertificates
    cluster: str
    peers: tuple[str, ...]


class Joiner:
    """Joining end of one exchange. `nonce` is 32 fresh random bytes."""

    def __init__(self, token: JoinToken, node_id: str, key: PrivateKey, name: str, nonce: bytes) -> None:
        self._token = token
        self._node_id = node_id
        self._key = key
        self._name = spoken(name)
        self._nonce = nonce
        self._authority = b""
        self._transcript = b""

    def on_offer(self, offer: JoinOffer, server_certificate: bytes) -> JoinRequest:
        """Return the request to a server that showed `server_certificate` (DER) in its TLS handshake.

        Raises UserError (JOIN_REFUSED) when the offer is another cluster's. Raises ProtocolError
        (NOT_AUTHENTIC) when the server is no member of the cluster that it names. Raises AskElsewhere when it
        admits no Mac. Nothing may be sent then.
        """
        if not hmac.compare_digest(authority_hash(offer.authority), self._token.authority_hash):
            raise UserError(
                f"the join token is for cluster {self._token.cluster_id}, and another cluster answered; use "
                f"a token of that one, or the address of a Mac in this one",
                Code.JOIN_REFUSED,
            )
        if cluster_of(offer.authority) != self._token.cluster_id:
            raise ProtocolError("the join token contradicts itself: wrong cluster id", Code.NOT_AUTHENTIC)
        check_node(server_certificate, offer.authority)
        if offer.ask:
            raise AskElsewhere(spoken(offer.ask), tuple(map(spoken, offer.at)))
        self._authority = offer.authority
        request = JoinRequest(
            self._token.id,
            bytes.fromhex(self._node_id),
            self._name,
            point_of(self._key.public_key()),
            self._nonce,
            bytes(PROOF_BYTES),
            b"",
        )
        self._transcript = _transcript(offer, request, server_certificate)
        return replace(
            request,
            proof=_proof(_REQUEST, self._token.key, self._transcript),
            signature=self._key.sign(_SIGNATURE + self._transcript, _ECDSA),
        )

    def on_grant(self, grant: JoinGrant) -> Granted:
        """Return the grant. Raises ProtocolError (NOT_AUTHENTIC) when the grant is not for this request."""
        expected = _proof(_GRANT, self._token.key, self._transcript, grant.certificate)
        if not self._transcript or not hmac.compare_digest(expected, grant.proof):
            raise ProtocolError("the Mac that admitted us does not know the join token", Code.NOT_AUTHENTIC)
        node = check_node(grant.certificate, self._authority)
        if (node.node_id, node.fingerprint) != (self._node_id, fingerprint(self._key.public_key())):
            raise ProtocolError("the certificate is for another node or key than ours", Code.NOT_AUTHENTIC)
        membership = MemberCertificates(grant.certificate, self._authority)
        return Granted(membership, spoken(grant.cluster), tuple(map(spoken, grant.peers)))

    def on_refusal(self, refusal: JoinRefusal) -> Denied:
        """Return the error to raise when the authority's holder refused this request.

        Raises ProtocolError (NOT_AUTHENTIC) for a refusal by another Mac, a removed member for example.
        """
        parts = (self._transcript, refusal.detail.encode())
        if not self._transcript or not is_signed(
            authority_key(self._authority), refusal.signature, _REFUSAL, *parts
        ):
            raise ProtocolError("a Mac without the cluster's authority refused this one", Code.NOT_AUTHENTIC)
        return Denied(f"the cluster did not let this Mac in: {spoken(refusal.detail, 1000)}")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A Mac that the host admitted, with its key, by a token that the member `by` requested."""

    node_id: str
    name: str
    fingerprint: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class JoinReply:
    """Message to a joiner, and the Mac that it admits, if any."""

    message: JoinGrant | JoinRefusal
    admitted: Admitted | None = None


class Host:
    """The Mac that has the authority's key, for one exchange. `nonce` is 32 fresh random bytes.

    `certificate` is the one it showed in TLS. `members` has the fingerprint of each member's key by its node
    id. Admitted Macs get `cluster` and `peers`. The joiner is at `address`.
    """

    def __init__(
        self,
        authority: Authority,
        certificate: bytes,
        issuer: TokenIssuer,
        nonce: bytes,
        *,
        members: Mapping[str, str],
        cluster: str = "",
        peers: tuple[str, ...] = (),
        address: str = "",
    ) -> None:
        self._authority = authority
        self._address = address
        self._certificate = certificate
        self._issuer = issuer
        self._members = members
        self._cluster = cluster
        self._peers = peers
        self.offer = JoinOffer(authority.certificate, nonce)

    def on_request(self, request: JoinRequest, now: float) -> JoinReply:
        """Return the reply to a request, at `now` (seconds, the issuer's clock).

        A grant uses the token up.
        """
        transcript = _transcript(self.offer, request, self._certificate)
        token_key = self._issuer.key(request.token_id)
        proven = hmac.compare_digest(_proof(_REQUEST, token_key, transcript), request.proof)
        if not proven or not self._issuer.knows(request.token_id):
            self._issuer.fail(request.token_id, self._address)
            return self._refusal(transcript, _UNKNOWN)
        key = _signer(request, transcript)
        if key is None:
            self._issuer.fail(request.token_id, self._address)
            return self._refusal(transcript, "this Mac does not hold the key that it showed")
        holder, node_id = fingerprint(key), request.node_id.hex()
        if reason := self._issuer.why_not(request.token_id, holder, now, self._address):
            return self._refusal(transcript, f"{reason}; {_NEW_TOKEN}")
        if self._members.get(node_id, holder) != holder:
            return self._refusal(
                transcript,
                f"another member has node id {node_id} already: this Mac's mlxtp folder is a copy of its. "
                f"Remove the folder identity in it, so that this Mac gets an id of its own",
            )
        asked_by = self._issuer.requested_by(request.token_id)
        if asked_by == node_id:
            return self._refusal(transcript, "a member cannot join by a token that it requested itself")
        self._issuer.use(request.token_id, holder, now)
        certificate = self._authority.certify(node_id, key)
        proof = _proof(_GRANT, token_key, transcript, certificate)
        return JoinReply(
            JoinGrant(certificate, proof, spoken(self._cluster), self._peers),
            Admitted(node_id, spoken(request.name), holder, asked_by),
        )

    def _refusal(self, transcript: bytes, reason: str) -> JoinReply:
        signature = sign(self._authority.key, _REFUSAL, transcript, reason.encode())
        return JoinReply(JoinRefusal(reason, signature))


def redirect(authority: bytes, nonce: bytes, ask: str, at: tuple[str, ...]) -> JoinOffer:
    """Return the offer of a member without the authority's key, which names the Mac that admits joiners."""
    return JoinOffer(authority, nonce, spoken(ask), at)


def spoken(text: str, max_chars: int = MAX_NAME) -> str:
    """Return a text from another machine for a terminal: printable, on one line, not too long."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:max_chars])


def _signer(request: JoinRequest, transcript: bytes) -> PublicKey | None:
    """Return the key in the request if its signature was made with it, else None."""
    try:
        key = key_at(request.public_key)
        key.verify(request.signature, _SIGNATURE + transcript, _ECDSA)
    except (ValueError, InvalidSignature):
        return None
    return key


def _transcript(offer: JoinOffer, request: JoinRequest, server_certificate: bytes) -> bytes:
    """Return 32 bytes that identify everything the two ends sent before the first proof."""
    return hash_of(
        offer.authority,
        server_certificate,
        offer.nonce,
        request.token_id,
        request.node_id,
        request.name.encode(),
        request.public_key,
        request.nonce,
    )


def _proof(label: bytes, key: bytes, transcript: bytes, certificate: bytes = b"") -> bytes:
    return hmac.digest(key, label + transcript + hashlib.sha256(certificate).digest(), hashlib.sha256)
