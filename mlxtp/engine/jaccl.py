"""Setup of a JACCL group: a file, an environment, and an all-gather of bytes among the ranks.

Before RDMA connections exist, ranks exchange their addresses over this side channel. MLX calls the factory,
and the bytes go through the pipe to the agent, whose links are authenticated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import Code, ConfigError, GroupError, LinkError
from ..wire.messages import Gathered, Message, SideChannel
from ..wire.rdma import Matrix, fault, square

Gather = Callable[[bytes, int], bytes]  # `gather(src, n)` returns every rank's n bytes, in rank order
#: `factory(rank, size)`, called once by `init` in the thread that called it.
Factory = Callable[[int, int], Gather]

#: Prefixes of the variables that JACCL reads; JACCL_ takes precedence.
_READ_BY_JACCL = ("JACCL_", "MLX_JACCL_")


@dataclass(frozen=True, slots=True)
class JacclFabric:
    matrix: Matrix
    ring: bool
    factory: Factory

    @classmethod
    def of(cls, entries: tuple[str, ...], size: int, *, ring: bool, factory: Factory) -> JacclFabric:
        """Read a Bootstrap's entries. Raises ConfigError for a matrix that JACCL would misread."""
        try:
            matrix = square(entries, size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if wrong := fault(matrix, ring=ring):
            raise ConfigError(wrong)
        return cls(matrix, ring, factory)

    def environment(self, present: Iterable[str], rank: int, path: str) -> dict[str, str | None]:
        """Return variables to set; None removes one of `present`. `path`: of a `device_file`."""
        # A RING variable counts even if it is empty, a missing rank means 0, and JACCL_RANK hides MLX_RANK.
        strangers = [name for name in present if name.startswith(_READ_BY_JACCL)]
        variables: dict[str, str | None] = dict.fromkeys(strangers)
        variables |= {"MLX_RANK": str(rank), "MLX_IBV_DEVICES": path}
        if self.ring:
            variables["MLX_JACCL_RING"] = "1"
        return variables


@dataclass(eq=False, repr=False)
class SideChannelExchange:
    """One rank's end of the side channel, for one `init`. `receive(seconds)` waits and raises LinkError.

    `init` holds the GIL except during `receive`: only then can other threads read links and reply to Pings.
    """

    rank: int
    size: int
    send: Callable[[Message], object]
    receive: Callable[[float], Message]
    round_s: float
    _round: int = 0
    _failure: GroupError | None = None

    def factory(self, rank: int, size: int) -> Gather:
        """Return `gather` for JACCL. Raises GroupError when JACCL reports another rank or size."""
        if (rank, size) != (self.rank, self.size):
            raise self._failed(
                f"JACCL reports rank {rank} of {size}; this is rank {self.rank} of {self.size}"
            )
        return self.gather

    def gather(self, src: bytes, n: int) -> bytes:
        """Run one round. Raises GroupError when it fails, and then in every later call."""
        if self._failure is not None:
            raise GroupError(self._failure.detail, self._failure.code)
        if len(src) != n:
            raise self._failed(f"JACCL announced {n} bytes and gave {len(src)}")
        self._round += 1
        self.send(SideChannel(self._round, bytes(src)))
        try:
            answer = self.receive(self.round_s)
        except LinkError as error:
            if error.code is not Code.LINK_TIMEOUT:
                raise
            reply = f"got no reply within {self.round_s:g} s"
            detail = f"rank {self.rank}: round {self._round} of JACCL's side channel {reply}"
            raise self._failed(detail) from None
        if not isinstance(answer, Gathered):
            detail = f"the agent sent {type(answer).__name__} while JACCL was forming"
            raise self._failed(detail, Code.SHUTTING_DOWN)
        if answer.error:
            raise self._failed(answer.error)
        if answer.round != self._round or len(answer.data) != n * self.size:
            expected = f"expected {n * self.size} for round {self._round}"
            raise self._failed(f"{len(answer.data)} bytes arrived for round {answer.round}, {expected}")
        return answer.data

    def _failed(self, detail: str, code: Code = Code.FORM_FAILED) -> GroupError:
        self._failure = GroupError(detail, code)
        return self._failure
