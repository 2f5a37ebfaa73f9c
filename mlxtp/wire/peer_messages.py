"""Messages between Macs on separate connections: to join a cluster, and to copy a model."""

from __future__ import annotations

from .codecs import U32, U63, Message, binary, integer, text, texts
from .codecs import holding as _f

# --- joining a cluster; `identity/join_protocol.py` describes the proofs ---------------------------------
# They travel on a separate link (`LinkKind.JOIN`), because one end has no certificate yet. Frames on this
# link are limited to 4 KiB, and each message fits.

NODE_ID_BYTES = 16
POINT_BYTES = 65  #: a P-256 public key as an uncompressed point (SEC 1)
MAX_CERTIFICATE_BYTES = 1500  #: more than twice the size of ours
NONCE_BYTES = 32
PROOF_BYTES = 32
TOKEN_ID_BYTES = 8
MAX_NAME = 64
MAX_ADDRESSES = 4
MAX_ADDRESS = 60
MAX_PEERS = 16

_certificate = binary(1, MAX_CERTIFICATE_BYTES)
_nonce = binary(NONCE_BYTES, NONCE_BYTES)
_proof = binary(PROOF_BYTES, PROOF_BYTES)
_addresses = texts(MAX_ADDRESSES, MAX_ADDRESS)


class JoinOffer(Message, number=0x38):
    """First frame of the link, from the member."""

    authority: bytes = _f(_certificate)  #: of its cluster
    nonce: bytes = _f(_nonce)
    ask: str = _f(text(MAX_NAME), default="")  #: Macs that can admit others, if this one cannot
    at: tuple[str, ...] = _f(_addresses, default=())  #: of their control ports ("ip:port")


class JoinRequest(Message, number=0x39):
    """Request to join: the joiner's name, its key and the id of its token."""

    token_id: bytes = _f(binary(TOKEN_ID_BYTES, TOKEN_ID_BYTES))
    node_id: bytes = _f(binary(NODE_ID_BYTES, NODE_ID_BYTES))
    name: str = _f(text(MAX_NAME))
    public_key: bytes = _f(binary(POINT_BYTES, POINT_BYTES))
    nonce: bytes = _f(_nonce)
    proof: bytes = _f(_proof)  #: that the joiner has the token
    signature: bytes = _f(binary(8, 80))  #: by its key (ECDSA with SHA-256, DER)


class JoinGrant(Message, number=0x3A):
    """Reply: the joiner is a member."""

    certificate: bytes = _f(_certificate)
    proof: bytes = _f(_proof)  #: that the granting Mac has the token, too
    peers: tuple[str, ...] = _f(texts(MAX_PEERS, MAX_ADDRESS), default=())  #: control ports to dial first


class JoinRefusal(Message, number=0x3B):
    """Reply: the joiner is not admitted. If this Mac lacks its token, `ask` and `at` are as in JoinOffer."""

    detail: str = _f(text(1000, cut=True))
    signature: bytes = _f(binary(8, 80))  #: the authority's, over the exchange and the rest
    ask: str = _f(text(MAX_NAME), default="")
    at: tuple[str, ...] = _f(_addresses, default=())


# --- copying a model, on a connection `mlxtp-models` -----------------------------------------------------
# In the usual frames, with epoch and seq 0. Files are named by their index in the manifest, never by a path.

MAX_FILE_NAME = 400
MAX_MANIFEST = 1 << 20
MAX_FILES = 4096


class FilesWanted(Message, number=0x64):
    """Request for the list of a model's files (OWNER/NAME[@REVISION]). Reply: FilesHeld."""

    model: str = _f(text(MAX_FILE_NAME))


class FilesHeld(Message, number=0x65):
    """Reply to FilesWanted."""

    manifest: bytes = _f(binary(0, MAX_MANIFEST))  #: empty when there is nothing of the model
    complete: bytes = _f(binary(0, MAX_FILES))  #: a byte for each file in their order, 1 if all is here
    held: int = _f(integer(0, U63))  #: bytes of all files that are here


class FileWanted(Message, number=0x68):
    """Request for a file, by its number, from byte `at` to its end. Reply: FileHeld."""

    file: int = _f(integer(0, U32))
    at: int = _f(integer(0, U63))


class FileHeld(Message, number=0x69):
    """Reply: `size` bytes follow, the rest of the file, or none when it is not complete here."""

    size: int = _f(integer(0, U63))
