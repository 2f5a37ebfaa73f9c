"""Flight recorder of a rank: memory that the rank writes and its agent reads when the rank is gone.

    0      header: magic, start time on both clocks, phase, last error
    4096   STEPS slots of eight words, used as a ring
    then   output of `faulthandler`, as text

A word is eight bytes, a double or an unsigned integer, in the machine's byte order, because both ends are on
one machine. Times are monotonic, in seconds. Words of a slot: started (double), seq, rows << 8 | kind, queued
(double), forwards, collectives, finished (double), fed << 32 | digest. A time before `started` is left over
from the slot's previous step.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

STEPS = 512
WORD_BYTES = 8
SLOT_WORDS = 8
HEADER_BYTES = 4096
RECORDING_BYTES = HEADER_BYTES + STEPS * SLOT_WORDS * WORD_BYTES
MAX_CRASH_BYTES = 16 * 1024  #: most bytes of `faulthandler`'s output to keep

MAGIC = b"mlxtp-fr"
BEGAN = struct.Struct("=8sdd")  #: At 0: the magic; time.time() and time.monotonic() when the recording began.
PHASE_AT = 32
PHASE = struct.Struct("=dB")  #: start of the phase, and its index in PHASES
PHASES = ("starting", "forming", "proving", "loading", "idle", "prefill", "decode", "measuring", "closing")
GAVE_BACK_AT = 48  #: A byte: 1 once the rank has released its RDMA devices.
WORDS_AT = 64
WORDS = struct.Struct("=dHH")  #: Time of the last error, bytes of its code and of its detail; both follow.
MAX_WORDS_BYTES = 2000
SLOT = struct.Struct("=dQQdQQdQ")

_MOST_S = 1e11  #: beyond the time of any clock

#: Kinds of forwards: a chunk of one prompt, several short prompts, or a step of the running batch.
KINDS = ("", "prompt", "prompts", "step")


@dataclass(frozen=True, slots=True)
class Step:
    """One forward. Times are microseconds since the recording began. Unknown values are 0."""

    seq: int  #: its frame's number
    kind: str
    rows: int
    started_us: int
    queued_us: int
    finished_us: int
    forwards: int  #: total with this one, once it is queued; so are `collectives`
    collectives: int
    digest: int  #: of its chosen tokens, once it is finished
    fed: int  #: digest of its input tokens, once it is finished


@dataclass(frozen=True, slots=True)
class Recording:
    began: float  #: in seconds, as the next one
    began_monotonic: float
    phase: str
    phase_since_us: int
    code: str  #: of the last error that the rank wrote, empty for none
    detail: str
    steps: tuple[Step, ...]
    crash: str


def gave_back(data: bytes) -> bool:
    return data[GAVE_BACK_AT : GAVE_BACK_AT + 1] == b"\1"


def decode(data: bytes) -> Recording | None:
    """Decode a recording; None if the process ended before it began one. Skip wrong values, or use 0."""
    if len(data) < RECORDING_BYTES:
        return None
    magic, began, origin = BEGAN.unpack_from(data, 0)
    if magic != MAGIC or not (0 <= began < _MOST_S and 0 <= origin < _MOST_S):
        return None
    since, phase = PHASE.unpack_from(data, PHASE_AT)
    _, code_bytes, detail_bytes = WORDS.unpack_from(data, WORDS_AT)
    at = WORDS_AT + WORDS.size
    words = data[at : min(at + code_bytes + detail_bytes, HEADER_BYTES)]
    slots = SLOT.iter_unpack(data[HEADER_BYTES:RECORDING_BYTES])
    steps: list[Step] = []
    for slot in sorted(slot for slot in slots if 0 < slot[0] < _MOST_S):
        step = _step(slot, origin)
        if not steps or step.seq > steps[-1].seq:  # else the process ended while writing this step
            steps.append(step)
    since_us = _us(since, origin)
    name = PHASES[phase] if phase < len(PHASES) else ""
    if steps and steps[-1].started_us >= since_us:  # a forward does not write its phase
        name, since_us = "decode" if steps[-1].kind == "step" else "prefill", steps[-1].started_us
    return Recording(
        began,
        origin,
        name,
        since_us,
        words[:code_bytes].decode(errors="replace"),
        words[code_bytes:].decode(errors="replace"),
        tuple(steps),
        data[RECORDING_BYTES : RECORDING_BYTES + MAX_CRASH_BYTES].decode(errors="replace"),
    )


def _step(slot: tuple[float, int, int, float, int, int, float, int], origin: float) -> Step:
    started, seq, what, queued, forwards, collectives, finished, digests = slot
    is_queued, is_finished = queued >= started, finished >= started
    kind = what & 0xFF
    return Step(
        seq,
        KINDS[kind] if kind < len(KINDS) else "",
        what >> 8,
        _us(started, origin),
        _us(queued, origin) if is_queued else 0,
        _us(finished, origin) if is_finished else 0,
        forwards if is_queued else 0,
        collectives if is_queued else 0,
        digests & 0xFFFFFFFF if is_finished else 0,
        digests >> 32 if is_finished else 0,
    )


def _us(at: float, origin: float) -> int:
    return max(int((at - origin) * 1e6), 0) if 0 <= at < _MOST_S else 0
