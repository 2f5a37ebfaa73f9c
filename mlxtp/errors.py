"""All errors that this project raises on purpose, below `MlxtpError`.

Each has a `Code`, which appears in Error frames, HTTP bodies and logs. `docs/doctor.md` explains the codes. A
rank process that ends because of a code exits with `exit_status(code)`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Code(StrEnum):
    """Stable names of all errors, grouped by who can fix them."""

    # the user
    CONFIG = "config_invalid"
    MODEL_NOT_FOUND = "model_not_found"
    MODEL_INVALID = "model_invalid"
    MODEL_NOT_DIVISIBLE = "model_not_divisible"
    MODEL_UNSUPPORTED = "model_unsupported"
    BAD_REQUEST = "invalid_request"
    NOT_SUPPORTED = "not_supported"
    CONTEXT_OVERFLOW = "context_length_exceeded"
    NOT_READY = "not_ready"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline_exceeded"
    CLIENT_TOO_SLOW = "client_too_slow"
    GRAMMAR_STUCK = "grammar_stuck"
    JOIN_REFUSED = "join_refused"
    SAME_NODE = "same_node"
    DUPLICATE_NODE = "duplicate_node"
    REMOVED_NODE = "removed_node"
    MISMATCH = "build_mismatch"
    # the wire
    FRAME_OVERSIZE = "frame_oversize"
    FRAME_MALFORMED = "frame_malformed"
    UNKNOWN_TYPE = "unknown_type"
    FIELD_INVALID = "field_invalid"
    WRONG_SEQ = "wrong_seq"
    OUT_OF_ORDER = "out_of_order"
    WRONG_UID = "wrong_uid"
    NOT_AUTHENTIC = "not_authentic"
    LINK_LOST = "link_lost"
    LINK_TIMEOUT = "link_timeout"
    # the group
    FORM_FAILED = "group_form_failed"
    PROOF_FAILED = "group_proof_failed"
    FORWARD_FAILED = "forward_failed"
    ACK_MISSING = "ack_missing"
    DESYNC = "ranks_disagree"
    RANK_LOST = "rank_lost"
    RANK_STALLED = "rank_stalled"
    OUT_OF_MEMORY = "out_of_memory"
    GPU_TIMEOUT = "gpu_timeout"
    REQUEST_FATAL = "request_fatal"
    SHUTTING_DOWN = "shutting_down"
    REPLANNED = "group_replanned"
    INTERNAL = "internal"
    # HTTP alone
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    HOST_NOT_ALLOWED = "host_not_allowed"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    KEY_INVALID = "invalid_api_key"
    RATE_LIMITED = "rate_limit_exceeded"
    QUOTA = "insufficient_quota"
    NOT_PERMITTED = "insufficient_permissions"
    # the user: at the end, because exit statuses count from the first code


class Exit(IntEnum):
    """Exit statuses of the `mlxtp` command; `docs/commands.md` explains them."""

    DONE = 0
    REFUSED = 1
    MISTYPED = 2
    INTERRUPTED = 130


_EXIT_STATUS_BASE = 64
#: Exit status of a rank process that handled SIGTERM, as shells report it.
TERMINATED_STATUS = 128 + 15
#: Exit status of a rank whose hung main thread made another thread end it: 137, as after SIGKILL.
WEDGED_STATUS = 128 + 9


def exit_status(code: Code) -> int:
    """Return the exit status of a rank that ends because of `code`: 64 + its position in `Code`."""
    return _EXIT_STATUS_BASE + list(Code).index(code)


def code_of_exit(status: int) -> Code | None:
    codes = list(Code)
    position = status - _EXIT_STATUS_BASE
    return codes[position] if 0 <= position < len(codes) else None


#: MLX's text in a forward or a proof after a neighbor's process has ended.
_RING_LOST = "[ring] connection to a peer was lost"


def is_consequence(code: str, detail: str) -> bool:
    """Return True if an error only reports that a rank is gone, so that its cause may still arrive."""
    if code in (Code.FORWARD_FAILED, Code.PROOF_FAILED):
        return _RING_LOST in detail
    return code in (Code.RANK_LOST, Code.LINK_LOST, Code.NOT_READY)


#: In the text of a stall that has all ranks at the same place.
NOBODY_BEHIND = "no rank is behind"


def is_library_error(error: BaseException) -> bool:
    """Return True for errors of Rust libraries: any Exception, and their panics, which are not Exceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


#: Open files that an agent and each of its ranks may have. `import mlx_lm` sets it as its hard limit.
MANY_FILES = 4096
#: Remedy for a lower limit.
RAISE_FILES = (
    "raise the hard limit where it was lowered: by `ulimit` in a shell's profile, on Linux also by `nofile` "
    "in /etc/security/limits.conf; a service of `mlxtp service install` has its own"
)


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def why_not_written(error: OSError, folder: object) -> str:
    if is_disk_full(error):
        return f"the disk is full, nothing can be written in {folder}"
    return f"nothing can be written in {folder}: {error.strerror or error}"


class MlxtpError(Exception):
    """Base of all errors. `code` is the kind; the text explains it to the user."""

    code: Code = Code.INTERNAL
    #: Exit status of a command that it ends.
    exit_status = Exit.REFUSED

    def __init__(self, detail: str, code: Code | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        if code is not None:
            self.code = code


class UserError(MlxtpError):
    """The user's request cannot be met; the text says what to change."""

    code = Code.CONFIG


@contextmanager
def in_words(kind: type[UserError], words: str) -> Iterator[None]:
    """Turn an OSError of the context into this kind of error, with these words before the system's."""
    try:
        yield
    except OSError as error:
        raise kind(f"{words}: {error.strerror or error}") from None


class ConfigError(UserError):
    """A flag, an environment variable or a line of the configuration file is wrong."""


class ModelError(UserError):
    """The model is missing, broken, of an unknown kind, or does not divide among the ranks."""

    code = Code.MODEL_INVALID


class RequestError(UserError):
    """A request refused before it reaches a rank. `status`: HTTP status. `state`: of a cluster not ready."""

    code = Code.BAD_REQUEST

    def __init__(
        self,
        detail: str,
        code: Code | None = None,
        *,
        status: int = 400,
        param: str | None = None,
        state: str = "",
    ) -> None:
        super().__init__(detail, code)
        self.status = status
        self.param = param
        self.state = state


class ProtocolError(MlxtpError):
    """A peer or this process broke the wire's rules. The link that raised it stays closed."""

    code = Code.OUT_OF_ORDER


class LocalProtocolError(ProtocolError):
    """This process tried to send a forbidden frame, which is a bug here. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer sent a forbidden frame. None of it was used."""


class LinkError(MlxtpError):
    """The link's other end is gone, or did not reply in time."""

    code = Code.LINK_LOST


class GroupError(MlxtpError):
    """The group of ranks cannot go on; the rank process reports and ends."""

    code = Code.RANK_LOST


@dataclass(frozen=True, slots=True)
class FailureReport:
    """A rank's own Error, or an agent's observation of the rank."""

    rank: int
    error: MlxtpError
    seen_from_outside: bool = False
