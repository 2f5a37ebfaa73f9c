"""Join tokens: their text, and the issuer that knows the valid ones. No clock, nothing random.

A person carries a token from one Mac to the next. It names the cluster, and identifies the cluster's
authority (by a hash of its certificate). It also holds a secret of 128 bits. Both ends prove that they know
the secret without sending it.

As text: 45 bytes in base32, 72 characters: version (1), cluster id (8), hash of the authority (16), secret
(16), checksum (4).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from ..errors import Code, ConfigError, UserError
from ..wire.certificates import AUTHORITY_HASH_BYTES
from ..wire.peer_messages import TOKEN_ID_BYTES

VERSION = 1
SECRET_BYTES = 16
LIFE_S = 15 * 60.0  #: seconds from issue to expiry
MAX_FAILURES = 5  #: wrong proofs from one address, after which the token is refused there
MAX_OPEN = 16
#: Seconds in which the Mac that used a token may repeat its request, with the same key: the reply may be
#: lost.
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
        """Return the text of the token: 72 characters, A to Z and 2 to 7."""
        body = bytes((VERSION,)) + bytes.fromhex(self.cluster_id) + self.authority_hash + self.secret
        return base64.b32encode(body + _checksum(body)).decode()

    def _derive(self, label: bytes) -> bytes:
        context = label + bytes.fromhex(self.cluster_id) + self.authority_hash
        return hmac.digest(self.secret, context, hashlib.sha256)


def read_token(text: str) -> JoinToken:
    """Return the token in a user's text: in any case, with spaces, line breaks or dashes in between.

    Raises ConfigError that says what is wrong with it, without quoting the token.
    """
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
    """Record of one token at the issuer."""

    key: bytes = field(repr=False)
    expires_at: float
    requested_by: str  #: node id of the member that requested it
    #: Wrong proofs by address, so that no address ends a token for the others.
    failures: Counter[str] = field(default_factory=Counter)
    used_by: str = ""
    used_at: float = 0.0
    void: bool = False  #: True once the member that requested it has left or was removed.

    def is_open(self, now: float) -> bool:
        return not self.used_by and not self.void and now < self.expires_at


class TokenIssuer:
    """Issuer of one cluster's tokens, on the Mac that has its authority's key.

    `now` is in seconds, of one clock. It lives in memory only: after a restart, an agent refuses all tokens
    issued before. No file can bring a used token back.
    """

    def __init__(self, cluster_id: str, authority_hash: bytes) -> None:
        self._cluster_id = cluster_id
        self._authority_hash = authority_hash
        self._slips: dict[bytes, _Slip] = {}

    def issue(self, secret: bytes, now: float, asked_by: str = "") -> JoinToken:
        """Issue a token of a fresh random `secret` (16 bytes), good for one Mac within 15 minutes.

        Raises UserError (OVERLOADED) when 16 are open already.
        """
        self._forget(now)
        open_until = [slip.expires_at for slip in self._slips.values() if slip.is_open(now)]
        if len(open_until) >= MAX_OPEN:
            raise UserError(
                f"{len(open_until)} join tokens are open, which is the limit; use one of them, or wait "
                f"{min(open_until) - now:.0f} s until the oldest expires",
                Code.OVERLOADED,
            )
        token = JoinToken(self._cluster_id, self._authority_hash, secret)
        self._slips[token.id] = _Slip(token.key, now + LIFE_S, asked_by)
        return token

    def key(self, token_id: bytes) -> bytes:
        """Return the key of a token in any state. For an unknown one, return a key that proves nothing."""
        slip = self._slips.get(token_id)
        return slip.key if slip else bytes(hashlib.sha256().digest_size)

    def knows(self, token_id: bytes) -> bool:
        """Return True if there is such a token, valid or not."""
        return token_id in self._slips

    def requested_by(self, token_id: bytes) -> str:
        """Return the node id of the member that requested a known token."""
        return self._slips[token_id].requested_by

    def keep(self, members: Container[str]) -> None:
        """End the tokens that other nodes than these members requested, even if those come back later."""
        for slip in self._slips.values():
            slip.void |= bool(slip.requested_by) and slip.requested_by not in members

    def fail(self, token_id: bytes, address: str = "") -> None:
        """Count a wrong proof: a Mac at this address named this token without having it."""
        slip = self._slips.get(token_id)
        if slip is not None and (address in slip.failures or len(slip.failures) < MAX_REMEMBERED):
            slip.failures[address] += 1

    def why_not(self, token_id: bytes, holder: str, now: float, address: str = "") -> str:
        """Return why the token is refused to `holder` (the fingerprint of its key); empty if it is good.

        Only for a joiner that has proven to have the token: to others the reason would reveal which guesses
        were near.
        """
        slip = self._slips[token_id]
        if slip.failures[address] >= MAX_FAILURES:
            return f"this join token is blocked after {MAX_FAILURES} wrong attempts from this address"
        if slip.void:
            return "the member that requested this join token was removed or left"
        if slip.used_by:
            again = slip.used_by == holder and now < slip.used_at + RESEND_S
            return "" if again else "this join token was used before; each token admits one Mac, once"
        if now >= slip.expires_at:
            return f"this join token expired {now - slip.expires_at:.0f} s ago"
        return ""

    def use(self, token_id: bytes, holder: str, now: float) -> None:
        """Mark the token as used by `holder`, after `why_not` returned no reason."""
        slip = self._slips[token_id]
        if not slip.used_by:
            slip.used_by, slip.used_at = holder, now

    def _forget(self, now: float) -> None:
        """Drop tokens that no joiner will name any more."""
        over = sorted(
            (slip.expires_at, token_id) for token_id, slip in self._slips.items() if not slip.is_open(now)
        )
        surplus = len(over) - MAX_REMEMBERED
        for place, (expires_at, token_id) in enumerate(over):
            if place < surplus or now >= expires_at + REMEMBERED_S:
                del self._slips[token_id]
