"""Join tokens, and the exchange by which a Mac becomes a member with one. No I/O, no clock.

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
# A person carries a token from one Mac to the next. Both ends prove that they know its secret without sending
# it. As text: 45 bytes in base32, 72 characters: version (1), cluster id (8), hash of the authority's
# certificate (16), secret (16), checksum (4).

VERSION = 1
SECRET_BYTES = 16
LIFE_S = 15 * 60.0  #: seconds from issue to expiry
MAX_FAILURES = 5  #: wrong proofs from one address, after which the token is refused there
MAX_OPEN = 64  #: open tokens that this Mac's own user requested: as many as a cluster has members
MAX_OPEN_EACH = 4  #: open tokens that one other member requested
#: Seconds in which the Mac that used a token may repeat its request with its key: the reply may be lost.
RESEND_S = 60.0
REMEMBERED_S = 3600.0  #: seconds after its expiry for which the issuer remembers a token
MAX_REMEMBERED = 256

_CLUSTER_ID_BYTES = 8
_CHECKSUM_BYTES = 4
_TEXT_BYTES = 1 + _CLUSTER_ID_BYTES + AUTHORITY_HASH_BYTES + SECRET_BYTES + _CHECKSUM_BYTES
TEXT_CHARACTERS = _TEXT_BYTES * 8 // 5
assert _TEXT_BYTES % 5 == 0  # so that base32 needs no padding

_ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567")
#: Characters that people and their mail programs put between groups, besides white space.
_SEPARATORS = "-_\u2010\u2011\u2012\u2013\u2014"
_AGAIN = "copy it again, or make a new one with `mlxtp token`"


@dataclass(frozen=True, slots=True)
class JoinToken:
    """Join token. `cluster_id` is 16 hex digits, `authority_hash` as in `wire/certificates.py`."""

    cluster_id: str
    authority_hash: bytes
    secret: bytes = field(repr=False)

    @property
    def id(self) -> bytes:
        """Key of 8 bytes by which the issuer finds the token; it reveals nothing of the secret."""
        return self._derive(b"mlxtp token id\0")[:TOKEN_ID_BYTES]

    @property
    def key(self) -> bytes:
        """Key of 32 bytes for proofs: all that the issuer keeps of the secret."""
        return self._derive(b"mlxtp token key\0")

    def text(self) -> str:
        body = bytes((VERSION,)) + bytes.fromhex(self.cluster_id) + self.authority_hash + self.secret
        return base64.b32encode(body + _checksum(body)).decode()

    def _derive(self, label: bytes) -> bytes:
        context = label + bytes.fromhex(self.cluster_id) + self.authority_hash
        return hmac.digest(self.secret, context, hashlib.sha256)


def read_token(text: str) -> JoinToken:
    """Return the token in a user's text. Raises ConfigError, which never quotes the token."""
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
    ends_at: float  #: expiry by the clock on the wall, which goes on while the Mac sleeps
    #: Wrong proofs by address, so that no address ends a token for the others.
    failures: Counter[str] = field(default_factory=Counter)
    used_by: str = ""
    used_at: float = 0.0
    void: bool = False  #: True once the member that requested it has left or was removed.

    def over_s(self, now: float) -> float:
        """Return the seconds since its expiry, by the clock that is further; negative before."""
        return max(now - self.expires_at, time.time() - self.ends_at)

    def is_open(self, now: float) -> bool:
        return not self.used_by and not self.void and self.over_s(now) < 0


class TokenIssuer:
    """Issuer of one cluster's tokens, in memory only: no file brings a used one back.

    `now` is in seconds, of one clock, which may stand still while a Mac sleeps: a token also expires by the
    clock on the wall.
    """

    def __init__(self, cluster_id: str, authority_hash: bytes) -> None:
        self.authority_hash = authority_hash
        self._cluster_id = cluster_id
        self._slips: dict[bytes, _Slip] = {}

    def issue(self, secret: bytes, now: float, asked_by: str = "", *, own: bool = False) -> JoinToken:
        """Issue a token of a fresh random `secret` (16 bytes), good for one Mac within 15 minutes.

        `own`: `asked_by` is this Mac. Raises UserError (OVERLOADED) when too many of `asked_by` are open.
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
        """Return the key of a token in any state; of an unknown one, a key that proves nothing."""
        slip = self._slips.get(token_id)
        return slip.key if slip else bytes(hashlib.sha256().digest_size)

    def knows(self, token_id: bytes) -> bool:
        return token_id in self._slips

    def requested_by(self, token_id: bytes) -> str:
        return self._slips[token_id].requested_by

    def keep(self, members: Container[str]) -> None:
        """End the tokens that other nodes than these members requested, even if those come back later."""
        for slip in self._slips.values():
            slip.void |= bool(slip.requested_by) and slip.requested_by not in members

    def count_wrong_proof(self, token_id: bytes, address: str = "") -> None:
        slip = self._slips.get(token_id)
        if slip is not None and (address in slip.failures or len(slip.failures) < MAX_REMEMBERED):
            slip.failures[address] += 1

    def why_not(self, token_id: bytes, holder: str, now: float, address: str = "") -> str:
        """Return why the token is refused to `holder` (the fingerprint of its key); empty if it is good.

        Only for a joiner that has proven to have it: others would learn which guesses were near.
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


# --- the exchange, with its two ends: messages in, messages out ------------------------------------------

_REQUEST = b"mlxtp join request\0"
_GRANT = b"mlxtp join grant\0"
_REFUSAL = b"mlxtp join refusal\0"
_SIGNATURE = b"mlxtp join signature\0"

_ECDSA = ec.ECDSA(hashes.SHA256())
_NEW_TOKEN = "make a new one with `mlxtp token`"
_UNKNOWN = f"this join token is not known here, or its proof is wrong; {_NEW_TOKEN} on a Mac of this cluster"


class AskElsewhere(UserError):
    """A member of the right cluster answered, but another Mac can admit this one: `name`, at `addresses`."""

    code = Code.JOIN_REFUSED

    def __init__(self, why: str, name: str, addresses: tuple[str, ...], can: str = "can") -> None:
        super().__init__(f"{why}; {name} {can}, at {' or '.join(addresses) or 'its address'}")
        self.name = name
        self.addresses = addresses


class Denied(UserError):
    """The Mac that admits joiners proved its identity and refused this one: no other Mac will admit it."""

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

        Raises UserError (JOIN_REFUSED: another cluster), ProtocolError (NOT_AUTHENTIC: no member) or
        AskElsewhere (a member that admits no Mac); then nothing may be sent.
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
        """Return the grant. Raises ProtocolError (NOT_AUTHENTIC) for one of another request."""
        expected = _proof(_GRANT, self._token.key, self._transcript, grant.certificate)
        if not self._transcript or not hmac.compare_digest(expected, grant.proof):
            raise ProtocolError("the Mac that admitted us does not know the join token", Code.NOT_AUTHENTIC)
        node = check_node(grant.certificate, self._authority)
        if (node.node_id, node.fingerprint) != (self._node_id, fingerprint(self._key.public_key())):
            raise ProtocolError("the certificate is for another node or key than ours", Code.NOT_AUTHENTIC)
        membership = MemberCertificates(grant.certificate, self._authority)
        return Granted(membership, tuple(map(spoken, grant.peers)))

    def on_refusal(self, refusal: JoinRefusal) -> Denied | AskElsewhere:
        """Return the error of a refusal. Raises ProtocolError (NOT_AUTHENTIC) if another Mac made it."""
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
    """A Mac that the host admitted, by a token that the member `by` requested; `token` is its public name."""

    node_id: str
    name: str
    fingerprint: str
    by: str = ""
    token: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class JoinReply:
    message: JoinGrant | JoinRefusal
    admitted: Admitted | None = None


class Host:
    """A Mac that has the authority's key, for one exchange. `nonce` is 32 fresh random bytes.

    `certificate` is the one it showed in TLS. `members` has the fingerprint of each member's key by its node
    id. Admitted Macs get `peers`. `others` has the names of the other holders, and addresses of theirs.
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
    """Return a part of a token's id, for people: joiners send that in the clear."""
    return token_id.hex()[:8]


def redirect(authority: bytes, nonce: bytes, ask: str, at: tuple[str, ...]) -> JoinOffer:
    return JoinOffer(authority, nonce, spoken(ask), at)


def spoken(text: str, max_chars: int = MAX_NAME) -> str:
    """Return a text from another machine for a terminal: printable, on one line, not too long."""
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
