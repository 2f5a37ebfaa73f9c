"""What JACCL needs to form a group: a file, an environment, and an all-gather of bytes among the ranks.

Its ranks exchange where their RDMA connections are before there are any. MLX would do that over a TCP
connection of its own; given a factory, it asks us, and we send those bytes through the pipe to the agent,
whose links are authenticated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import Code, ConfigError, GroupError, LinkError
from ..wire.messages import Gathered, Message, SideChannel
from ..wire.rdma import Matrix, device_file, fault, square

Gather = Callable[[bytes, int], bytes]
"""`gather(src, n)`: every rank's n bytes, in rank order."""
Factory = Callable[[int, int], Gather]
"""`factory(rank, size)`, called once by `init` in the thread that called it."""

_READ_BY_JACCL = ("JACCL_", "MLX_JACCL_")
"""How the names of variables begin that JACCL reads; its own come before those that begin with MLX_."""


@dataclass(frozen=True, slots=True)
class JacclFabric:
    """What a JACCL group is formed over. With `ring` it joins neighbours only."""

    matrix: Matrix
    ring: bool
    factory: Factory

    @classmethod
    def of(cls, entries: tuple[str, ...], size: int, *, ring: bool, factory: Factory) -> JacclFabric:
        """From the entries of a Bootstrap. Raises ConfigError for a matrix that JACCL would misunderstand."""
        try:
            matrix = square(entries, size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if wrong := fault(matrix, ring=ring):
            raise ConfigError(wrong)
        return cls(matrix, ring, factory)

    def file(self) -> str:
        """The text of the file that `environment` names."""
        return device_file(self.matrix)

    def environment(self, present: Iterable[str], rank: int, path: str) -> dict[str, str | None]:
        """Variables to set, and with None those to take away, of which `present` may have some.

        Nothing is left to what this process was started with: a variable that is merely there prefers the
        ring, a rank that is not there is 0, and JACCL_RANK hides MLX_RANK.
        """
        strangers = [name for name in present if name.startswith(_READ_BY_JACCL)]
        variables: dict[str, str | None] = dict.fromkeys(strangers)
        variables |= {"MLX_RANK": str(rank), "MLX_IBV_DEVICES": path}
        if self.ring:
            variables["MLX_JACCL_RING"] = "1"
        return variables


class SideChannelExchange:
    """One rank's end of the side channel, for one `init`. What is said in it is opaque here.

    `send` hands a message to the agent; `receive` waits so many seconds for its next one and raises LinkError
    (LINK_TIMEOUT) when none comes. `init` holds the GIL but for the time that `receive` waits: only then do
    other threads of this process read links and answer Pings.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        send: Callable[[Message], object],
        receive: Callable[[float], Message],
        round_s: float,
    ) -> None:
        self._rank = rank
        self._size = world_size
        self._send = send
        self._receive = receive
        self._round_s = round_s
        self._round = 0
        self._failure: GroupError | None = None

    def factory(self, rank: int, size: int) -> Gather:
        """Raises GroupError when JACCL takes itself for somebody else."""
        if (rank, size) != (self._rank, self._size):
            raise self._failed(
                f"JACCL takes itself for rank {rank} of {size}; this is rank {self._rank} of {self._size}"
            )
        return self.gather

    def gather(self, src: bytes, n: int) -> bytes:
        """One round. Raises GroupError when it cannot be had, and at once in every later call."""
        if self._failure is not None:
            raise GroupError(self._failure.detail, self._failure.code)
        if len(src) != n:
            raise self._failed(f"JACCL announced {n} bytes and gave {len(src)}")
        self._round += 1
        self._send(SideChannel(self._round, bytes(src)))
        answer = self._answer()
        if not isinstance(answer, Gathered):
            raise self._failed(
                f"the agent said {type(answer).__name__} while JACCL was forming", Code.SHUTTING_DOWN
            )
        if answer.error:
            raise self._failed(answer.error)
        if answer.round != self._round or len(answer.data) != n * self._size:
            raise self._failed(
                f"{len(answer.data)} bytes came for round {answer.round}, "
                f"expected {n * self._size} for round {self._round}"
            )
        return answer.data

    def _answer(self) -> Message:
        try:
            return self._receive(self._round_s)
        except LinkError as error:
            if error.code is not Code.LINK_TIMEOUT:
                raise
            raise self._failed(
                f"rank {self._rank}: round {self._round} of JACCL's side channel was not answered "
                f"within {self._round_s:g} s"
            ) from None

    def _failed(self, detail: str, code: Code = Code.FORM_FAILED) -> GroupError:
        self._failure = GroupError(detail, code)
        return self._failure
