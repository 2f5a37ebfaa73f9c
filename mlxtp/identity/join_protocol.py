"""Join tokens, and the exchange that turns a Mac with a token into a member. No I/O, no clock.

joiner                                             member
      connects by TLS, shows nothing, trusts nothing
      ◄──────────── JoinOffer: the authority's certificate, a nonce
      the authority is the token's, and signed the certificate that TLS shows: only now it sends
      JoinRequest: its key, proof of the token, signature by the key ────────────►
                                the token is good, proof and signature are right
      ◄──────────── JoinGrant: the certificate, proof of the token; or a JoinRefusal, signed by the authority

Both proofs and the signature cover the cluster, the certificates of authority and member, the joiner's key,
node id and name, and a nonce from each side. So nothing from one exchange is valid in another, or between two
others. Each end draws a fresh nonce per exchange.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import Code, ConfigError, ProtocolError, UserError
from ..wire.certificates import (
    AUTHORITY_HASH_BYTES,
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
from ..wire.peer_messages import (
    MAX_NAME,
    PROOF_BYTES,
    TOKEN_ID_BYTES,
    JoinGrant,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
)

# --- tokens: their text, and the issuer that knows the valid ones ----------------------------------------
# A person carries a token from one Mac to another. Both ends prove that they know its secret without sending
# it. Its text has 72 characters: 45 bytes in base32. They are version (1), cluster id (8), hash of the
# authority's certificate (16), secret (16) and checksum (4).

VERSION = 1
SECRET_BYTES = 16
LIFE_S = 15 * 60.0  #: seconds from issue to expiry
MAX_FAILURES = 5  #: wrong proofs from one address until the token is refused there
MAX_OPEN = 64  #: open tokens requested by this Mac's own user: as many as a cluster has members
MAX_OPEN_EACH = 4  #: open tokens requested by one other member
#: Seconds that a Mac may repeat its request with its used token, since the reply may be lost.
RESEND_S = 60.0
REMEMBERED_S = 3600.0  #: seconds that the issuer remembers an expired token
MAX_REMEMBERED = 256

_CLUSTER_ID_BYTES = 8
_CHECKSUM_BYTES = 4
_TEXT_BYTES = 1 + _CLUSTER_ID_BYTES + AUTHORITY_HASH_BYTES + SECRET_BYTES + _CHECKSUM_BYTES
TEXT_CHARACTERS = _TEXT_BYTES * 8 // 5
assert _TEXT_BYTES % 5 == 0  # so that base32 needs no padding

_ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")
#: Characters, besides white space, that people and their mail programs put between groups.
_SEPARATORS = "-_\u2010\u2011\u2012\u2013\u2014"
_AGAIN = "copy it again, or make a new one with `mlxtp token`"


@dataclass(frozen=True, slots=True)
class JoinToken:
    cluster_id: str  #: 16 hex digits
    authority_hash: bytes  #: as in `wire/certificates.py`
    secret: bytes = field(repr=False)

    @property
    def id(self) -> bytes:
        """Key of 8 bytes for the issuer to find the token. It reveals nothing of the secret."""
        return self._derive(b"mlxtp token id\0")[:TOKEN_ID_BYTES]

    @property
    def key(self) -> bytes:
        """Key of 32 bytes for proofs. The issuer keeps only this of the secret."""
        return self._derive(b"mlxtp token key\0")

    def text(self) -> str:
        body = bytes((VERSION,)) + bytes.fromhex(self.cluster_id) + self.authority_hash + self.secret
        return base64.b32encode(body + _checksum(body)).decode()

    def _derive(self, label: bytes) -> bytes:
        context = label + bytes.fromhex(self.cluster_id) + self.authority_hash
        return hmac.digest(self.secret, context, hashlib.sha256)


def read_token(text: str) -> JoinToken:
    """Parse a user's text. Raises ConfigError, which never quotes the token."""
    letters = [letter for letter in text.upper() if not letter.isspace() and letter not in _SEPARATORS]
    if not letters:
        raise ConfigError(f"the join token is empty; {_AGAIN}")
    for place, letter in enumerate(letters, 1):
        if letter not in _ALPHABET:
            raise ConfigError(
                f"character {place} of the join token is {letter!r}, but tokens have letters and the digits "
                f"2 to 7 only; {_AGAIN}"
            )
    if len(letters) != TEXT_CHARACTERS:
        raise ConfigError(
            f"the join token has {len(letters)} characters instead of {TEXT_CHARACTERS}; {_AGAIN}"
        )
    data = base64.b32decode("".join(letters))
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if _checksum(body) != checksum:
        raise ConfigError(f"the join token has a typo: its checksum does not fit; {_AGAIN}")
    if body[0] != VERSION:
        raise ConfigError(
            f"the join token is of version {body[0]} and this mlxtp reads version {VERSION}; "
            f"install the same version of mlxtp on both Macs"
        )
    cluster_end = 1 + _CLUSTER_ID_BYTES
    hash_end = cluster_end + AUTHORITY_HASH_BYTES
    return JoinToken(body[1:cluster_end].hex(), body[cluster_end:hash_end], body[hash_end:])


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"mlxtp token checksum\0" + body).digest()[:_CHECKSUM_BYTES]


# --- the issuer ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Slip:
    key: bytes = field(repr=False)
    expires_at: float
    requested_by: str  #: node id of the member that requested it
    ends_at: float  #: expiry by the wall clock, which runs while the Mac sleeps
    #: Wrong proofs by address, so that no address can block a token for others.
    failures: Counter[str] = field(default_factory=Counter)
    used_by: str = ""
    used_at: float = 0.0
    void: bool = False  #: The member that requested it has left or was removed.

    def over_s(self, now: float) -> float:
        """Return the seconds since its expiry by the faster clock; negative before it."""
        return max(now - self.expires_at, time.time() - self.ends_at)

    def is_open(self, now: float) -> bool:
        return not self.used_by and not self.void and self.over_s(now) < 0


class TokenIssuer:
    """Issuer of one cluster's tokens, in memory only: no file brings a used token back.

    `now`: seconds of one clock. That clock may stand still while a Mac sleeps, so a token also expires by the
    wall clock.
    """

    def __init__(self, cluster_id: str, authority_hash: bytes) -> None:
        self.authority_hash = authority_hash
        self._cluster_id = cluster_id
        self._slips: dict[bytes, _Slip] = {}

    def issue(self, secret: bytes, now: float, asked_by: str = "", *, own: bool = False) -> JoinToken:
        """Issue a token of a fresh random `secret` (16 bytes), for one Mac within 15 minutes.

        `own`: `asked_by` is this Mac. Raises UserError (OVERLOADED) if `asked_by` has too many open tokens.
        """
        most = MAX_OPEN if own or not asked_by else MAX_OPEN_EACH
        self._forget(now)
        open_until = [
            now - slip.over_s(now)
            for slip in self._slips.values()
            if slip.requested_by == asked_by and slip.is_open(now)
        ]
        if len(open_until) >= most:
            raise UserError(
                f"{len(open_until)} join tokens that the same Mac requested are open, which is the limit; "
                f"use one of them, or wait {min(open_until) - now:.0f} s until the oldest expires",
                Code.OVERLOADED,
            )
        token = JoinToken(self._cluster_id, self.authority_hash, secret)
        self._slips[token.id] = _Slip(token.key, now + LIFE_S, asked_by, time.time() + LIFE_S)
        return token

    def key(self, token_id: bytes) -> bytes:
        """Return the key of a token in any state; for an unknown one, a key that proves nothing."""
        slip = self._slips.get(token_id)
        return slip.key if slip else bytes(hashlib.sha256().digest_size)

    def knows(self, token_id: bytes) -> bool:
        return token_id in self._slips

    def requested_by(self, token_id: bytes) -> str:
        return self._slips[token_id].requested_by

    def keep(self, members: Container[str]) -> None:
        """Void the tokens of nodes that are not in `members`, even if they come back later."""
        for slip in self._slips.values():
            slip.void |= bool(slip.requested_by) and slip.requested_by not in members

    def count_wrong_proof(self, token_id: bytes, address: str = "") -> None:
        slip = self._slips.get(token_id)
        if slip is not None and (address in slip.failures or len(slip.failures) < MAX_REMEMBERED):
            slip.failures[address] += 1

    def why_not(self, token_id: bytes, holder: str, now: float, address: str = "") -> str:
        """Return why `holder` (the fingerprint of its key) may not use the token; "" if it may.

        Call it only once the joiner has proven the token: others would learn which guesses were near.
        """
        slip = self._slips[token_id]
        if slip.failures[address] >= MAX_FAILURES:
            return f"this join token is blocked after {MAX_FAILURES} wrong attempts from this address"
        if slip.void:
            return "the member that requested this join token was removed or left"
        if slip.used_by:
            again = slip.used_by == holder and now < slip.used_at + RESEND_S
            return "" if again else "this join token was used before; each token admits one Mac, once"
        if (over_s := slip.over_s(now)) >= 0:
            return f"this join token expired {over_s:.0f} s ago"
        return ""

    def use(self, token_id: bytes, holder: str, now: float) -> None:
        slip = self._slips[token_id]
        if not slip.used_by:
            slip.used_by, slip.used_at = holder, now

    def _forget(self, now: float) -> None:
        over = sorted(
            (slip.expires_at, token_id) for token_id, slip in self._slips.items() if not slip.is_open(now)
        )
        surplus = len(over) - MAX_REMEMBERED
        for place, (expires_at, token_id) in enumerate(over):
            if place < surplus or now >= expires_at + REMEMBERED_S:
                del self._slips[token_id]


# --- the exchange, and its two ends: messages in, messages out -------------------------------------------

_REQUEST = b"mlxtp join request\0"
_GRANT = b"mlxtp join grant\0"
_REFUSAL = b"mlxtp join refusal\0"
_SIGNATURE = b"mlxtp join signature\0"

_ECDSA = ec.ECDSA(hashes.SHA256())
_NEW_TOKEN = "make a new one with `mlxtp token`"
_UNKNOWN = f"this join token is not known here, or its proof is wrong; {_NEW_TOKEN} on a Mac of this cluster"


class AskElsewhere(UserError):
    """A member of the right cluster answered, but only another Mac, `name` at `addresses`, can admit."""

    code = Code.JOIN_REFUSED

    def __init__(self, why: str, name: str, addresses: tuple[str, ...], can: str = "can") -> None:
        super().__init__(f"{why}; {name} {can}, at {' or '.join(addresses) or 'its address'}")
        self.name = name
        self.addresses = addresses


class Denied(UserError):
    """The Mac that admits joiners proved its identity and refused: no other Mac will admit this one."""

    code = Code.JOIN_REFUSED


@dataclass(frozen=True, slots=True)
class Granted:
    membership: MemberCertificates
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

        Nothing may be sent if it raises: UserError (JOIN_REFUSED: another cluster), ProtocolError
        (NOT_AUTHENTIC: no member) or AskElsewhere (a member that cannot admit).
        """
        if not hmac.compare_digest(authority_hash(offer.authority), self._token.authority_hash):
            raise UserError(
                f"the join token is for cluster {self._token.cluster_id}, and another cluster answered; "
                f"{_NEW_TOKEN}, or use the address of a Mac here",
                Code.JOIN_REFUSED,
            )
        if cluster_of(offer.authority) != self._token.cluster_id:
            raise ProtocolError("the join token contradicts itself: wrong cluster id", Code.NOT_AUTHENTIC)
        check_node(server_certificate, offer.authority)
        if offer.ask:
            why = "this Mac cannot let others in"
            raise AskElsewhere(why, spoken(offer.ask), tuple(map(spoken, offer.at)))
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
        """Check and return the grant. Raises ProtocolError (NOT_AUTHENTIC) if it answers another request."""
        expected = _proof(_GRANT, self._token.key, self._transcript, grant.certificate)
        if not self._transcript or not hmac.compare_digest(expected, grant.proof):
            raise ProtocolError("the Mac that admitted us does not know the join token", Code.NOT_AUTHENTIC)
        node = check_node(grant.certificate, self._authority)
        if (node.node_id, node.fingerprint) != (self._node_id, fingerprint(self._key.public_key())):
            raise ProtocolError("the certificate is for another node or key than ours", Code.NOT_AUTHENTIC)
        membership = MemberCertificates(grant.certificate, self._authority)
        return Granted(membership, tuple(map(spoken, grant.peers)))

    def on_refusal(self, refusal: JoinRefusal) -> Denied | AskElsewhere:
        """Return a refusal's error. Raises ProtocolError (NOT_AUTHENTIC) if an impostor made it."""
        parts = _refused(self._transcript, refusal)
        if not self._transcript or not is_signed(
            authority_key(self._authority), refusal.signature, _REFUSAL, *parts
        ):
            raise ProtocolError("a Mac without the cluster's authority refused this one", Code.NOT_AUTHENTIC)
        if refusal.ask:
            why = f"the Mac there does not know this join token, so {_NEW_TOKEN}"
            return AskElsewhere(why, spoken(refusal.ask), tuple(map(spoken, refusal.at)), "may have made it")
        return Denied(f"the cluster did not let this Mac in: {spoken(refusal.detail, 1000)}")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A Mac that the host admitted."""

    node_id: str
    name: str
    fingerprint: str
    by: str = ""  #: the member that requested its token
    token: str = field(default="", compare=False)  #: its public name


@dataclass(frozen=True, slots=True)
class JoinReply:
    message: JoinGrant | JoinRefusal
    admitted: Admitted | None = None


class Host:
    """A Mac with the authority's key, for one exchange. `nonce` is 32 fresh random bytes.

    `certificate`: shown in TLS. `members`: fingerprint of each member's key, by node id. Admitted Macs get
    `peers`. `others`: names of the other holders, and their addresses.
    """

    def __init__(
        self,
        authority: Authority,
        certificate: bytes,
        issuer: TokenIssuer,
        nonce: bytes,
        *,
        members: Mapping[str, str],
        peers: tuple[str, ...] = (),
        address: str = "",
        others: tuple[str, tuple[str, ...]] = ("", ()),
    ) -> None:
        self._authority = authority
        self._others = others
        self.address = address
        self._certificate = certificate
        self._issuer = issuer
        self._members = members
        self._peers = peers
        self.offer = JoinOffer(authority.certificate, nonce)

    def on_request(self, request: JoinRequest, now: float) -> JoinReply:
        """Return the reply at `now` (seconds, the issuer's clock). A grant uses the token up."""
        transcript = _transcript(self.offer, request, self._certificate)
        token_key = self._issuer.key(request.token_id)
        proven = hmac.compare_digest(_proof(_REQUEST, token_key, transcript), request.proof)
        if not proven or not self._issuer.knows(request.token_id):
            self._issuer.count_wrong_proof(request.token_id, self.address)
            return self._refusal(transcript, _UNKNOWN, *self._others)
        key = _signer(request, transcript)
        if key is None:
            self._issuer.count_wrong_proof(request.token_id, self.address)
            return self._refusal(transcript, "this Mac does not hold the key that it showed")
        holder, node_id = fingerprint(key), request.node_id.hex()
        if reason := self._issuer.why_not(request.token_id, holder, now, self.address):
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
            JoinGrant(certificate, proof, self._peers),
            Admitted(node_id, spoken(request.name), holder, asked_by, token_name(request.token_id)),
        )

    def _refusal(self, transcript: bytes, reason: str, ask: str = "", at: tuple[str, ...] = ()) -> JoinReply:
        refusal = JoinRefusal(reason, b"", spoken(ask), at)
        signature = sign(self._authority.key, _REFUSAL, *_refused(transcript, refusal))
        return JoinReply(replace(refusal, signature=signature))


def _refused(transcript: bytes, refusal: JoinRefusal) -> tuple[bytes, ...]:
    return (transcript, *(part.encode() for part in (refusal.detail, refusal.ask, *refusal.at)))


def token_name(token_id: bytes) -> str:
    """Return the public part of a token's id, which joiners send in the clear anyway."""
    return token_id.hex()[:8]


def redirect(authority: bytes, nonce: bytes, ask: str, at: tuple[str, ...]) -> JoinOffer:
    return JoinOffer(authority, nonce, spoken(ask), at)


def spoken(text: str, max_chars: int = MAX_NAME) -> str:
    """Make text from another machine safe for a terminal: printable, on one line, not too long."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:max_chars])


def _signer(request: JoinRequest, transcript: bytes) -> PublicKey | None:
    try:
        key = key_at(request.public_key)
        key.verify(request.signature, _SIGNATURE + transcript, _ECDSA)
    except (ValueError, InvalidSignature):
        return None
    return key


def _transcript(offer: JoinOffer, request: JoinRequest, server_certificate: bytes) -> bytes:
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
