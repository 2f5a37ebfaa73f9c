"""Several hosts on one machine, for tests: network namespaces whose ports stand in one switch.

    with Hosts(3) as net:
        a, b, c = net.hosts
        agent = a.start([sys.executable, "-m", "mlxtp", "node"], env=...)
        a.inside(lambda: httpx.get("http://127.0.0.1:52415/health"))
        net.cut(b)

Each host has a loopback of its own and `eth0` with 10.87.0.1, 10.87.0.2, ... The bridges live in a namespace
too, so that neither addresses, interface names nor firewall rules of the machine matter, and test runs
beside each other do not meet. Everything is gone at the end, processes included; what a run left behind
that was killed is cleared away by the next.

It takes root, and iproute2 on Linux. Tests that use it are marked `@requires_namespaces`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

NETWORK = "10.87.0"
_NAMESPACES = Path("/run/netns")
_COMMAND_S = 20.0
_END_S = 20.0
_CLONE_NEWNET = 0x40000000
_PACKET_OUTGOING = 4
_ETH_P_ALL = 3
_ETH_P_IP = 0x0800
_numbers = itertools.count()


class Host:
    """One host: a network namespace with `eth0` on the switch."""

    def __init__(self, number: int, namespace: str) -> None:
        self.number = number
        self.namespace = namespace
        self.address = f"{NETWORK}.{number}"
        self._processes: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"Host({self.address})"

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process on this host; `options` are those of `Popen`. Its pid is the command's own."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command], **{"start_new_session": True, **options}
        )
        self._processes.append(process)
        return process

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command on this host to its end; `options` are those of `subprocess.run`."""
        options = {"text": True, "capture_output": True, "timeout": _COMMAND_S, **options}
        return subprocess.run(["ip", "netns", "exec", self.namespace, *command], **options)  # noqa: PLW1510

    def enter(self) -> None:
        """Moves the calling thread to this host, for good: the sockets it opens are the host's.

        The initializer of an executor, say. Threads that this one starts are on the host as well.
        """
        _enter(self.namespace)

    def inside(self, function: Callable[[], T]) -> T:
        """Return, or raise, what `function` does when a thread on this host calls it."""
        return _in_thread(self.enter, function)

    def ip(self, *commands: str) -> None:
        """Runs commands of `ip` on this host, such as "addr add 10.0.0.1/24 dev eth0"."""
        _ip(*commands, namespace=self.namespace)

    def end(self) -> None:
        """Kills what runs on this host."""
        for pid in _pids(self.namespace):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(_END_S)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@dataclass(frozen=True)
class Cable:
    """A cable between two hosts that goes past the switch. `interface` is its name at both ends."""

    interface: str
    addresses: tuple[str, str]
    _switch: str
    _ports: tuple[str, str]

    def cut(self) -> None:
        """Pulls it out: both ends lose their carrier and keep their addresses."""
        _ip(*(f"link set {port} down" for port in self._ports), namespace=self._switch)

    def mend(self) -> None:
        """Puts it back."""
        _ip(*(f"link set {port} up" for port in self._ports), namespace=self._switch)


class Hosts:
    """`count` hosts on one switch, for as long as the context lasts. Raises OSError where that cannot be."""

    def __init__(self, count: int) -> None:
        prefix = f"mlxtp-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{prefix}-switch"
        self.hosts = tuple(Host(number, f"{prefix}-{number}") for number in range(1, count + 1))
        self._bridges = 1
        self._cables = 0

    def __enter__(self) -> Hosts:
        _clear_away_the_dead()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        _ip(*(f"netns add {name}" for name in self._namespaces()))
        _ip("link set lo up", *_bridge("br0"), namespace=self._switch)
        for host in self.hosts:
            _ip(*_port(host, "eth0", _port_of(host), "br0"), namespace=self._switch)
            host.ip(
                "link set lo up",
                f"addr add {host.address}/24 broadcast + dev eth0",
                "link set eth0 up",
                "route add 224.0.0.0/4 dev eth0",
            )

    def close(self) -> None:
        """Ends what runs on the hosts, and takes them away."""
        for host in self.hosts:
            if (_NAMESPACES / host.namespace).exists():
                host.end()
        for name in self._namespaces():
            if (_NAMESPACES / name).exists():
                _ip(f"netns del {name}")

    def _namespaces(self) -> list[str]:
        return [self._switch, *(host.namespace for host in self.hosts)]

    def cut(self, host: Host) -> None:
        """Pulls a host's cable to the switch: `eth0` loses its carrier and keeps its address."""
        _ip(f"link set {_port_of(host)} down", namespace=self._switch)

    def mend(self, host: Host) -> None:
        """Puts its cable back."""
        _ip(f"link set {_port_of(host)} up", namespace=self._switch)

    def partition(self, *groups: Sequence[Host]) -> None:
        """Hosts hear those of their own group only; no carrier changes. A host that is not named stays with
        those who are not named.
        """
        for number, group in enumerate(groups, 1):
            if number >= self._bridges:
                _ip(*_bridge(f"br{number}"), namespace=self._switch)
                self._bridges += 1
            self._attach(group, f"br{number}")

    def heal(self) -> None:
        """All hosts hear each other again."""
        self._attach(self.hosts, "br0")

    def _attach(self, hosts: Sequence[Host], bridge: str) -> None:
        _ip(*(f"link set {_port_of(host)} master {bridge}" for host in hosts), namespace=self._switch)

    def cable(self, one: Host, other: Host) -> Cable:
        """A second way between two hosts, like a Thunderbolt cable: a /30 of its own on `tb0`, `tb1`, ..."""
        number = self._cables
        self._cables += 1
        interface, bridge = f"tb{number}", f"cable{number}"
        addresses = (f"10.87.{100 + number}.1", f"10.87.{100 + number}.2")
        ports = (f"{bridge}a", f"{bridge}b")
        commands = [*_bridge(bridge)]
        for host, port in zip((one, other), ports, strict=True):
            commands += _port(host, interface, port, bridge)
        _ip(*commands, namespace=self._switch)
        for host, address in zip((one, other), addresses, strict=True):
            host.ip(f"addr add {address}/30 dev {interface}", f"link set {interface} up")
        return Cable(interface, addresses, self._switch, ports)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Capture]:
        """Everything that hosts send while the context lasts, on the switch and on cables."""
        capture = Capture(_in_thread(lambda: _enter(self._switch), _packet_socket))
        try:
            yield capture
        finally:
            capture.close()


class Capture:
    """Frames that hosts sent, each once."""

    def __init__(self, listening: socket.socket) -> None:
        self.frames: list[bytes] = []
        self._socket = listening
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._read, name="capture", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        import select

        while True:
            ready, _, _ = select.select([self._socket, self._stopped], [], [])
            if self._socket in ready:
                frame, (port, _, direction, *_) = self._socket.recvfrom(1 << 17)
                # A frame comes in at one port and leaves by others; bridges see it once more.
                if direction != _PACKET_OUTGOING and not re.fullmatch(r"br\d+|cable\d+|lo", port):
                    self.frames.append(frame)
            elif self._stopped in ready:
                return

    def close(self) -> None:
        """Takes what is still in the socket, and ends."""
        self._stop.send(b"x")
        self._thread.join(_END_S)
        for each in (self._socket, self._stop, self._stopped):
            each.close()

    def streams(self) -> Mapping[tuple[str, str], bytes]:
        """Return the bytes that each "ip:port" sent to each, over TCP or UDP over IPv4, in their order.

        What TCP sent twice is in it twice.
        """
        found: dict[tuple[str, str], bytearray] = {}
        for frame in self.frames:
            packet = _parse(frame)
            if packet is not None:
                source, target, payload = packet
                found.setdefault((source, target), bytearray()).extend(payload)
        return {ends: bytes(payload) for ends, payload in found.items()}


def _parse(frame: bytes) -> tuple[str, str, bytes] | None:
    """Source, target and payload of an Ethernet frame with TCP or UDP in it."""
    if struct.unpack_from("!H", frame, 12)[0] != _ETH_P_IP:
        return None
    packet = frame[14:]
    packet = packet[: struct.unpack_from("!H", packet, 2)[0]]
    protocol, segment = packet[9], packet[4 * (packet[0] & 15) :]
    if protocol not in (socket.IPPROTO_TCP, socket.IPPROTO_UDP):
        return None
    source, target = struct.unpack_from("!HH", segment)
    header = 8 if protocol == socket.IPPROTO_UDP else 4 * (segment[12] >> 4)
    names = (socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20]))
    return f"{names[0]}:{source}", f"{names[1]}:{target}", segment[header:]


def _packet_socket() -> socket.socket:
    listening = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    listening.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: nothing may be lost
    return listening


def _bridge(name: str) -> list[str]:
    return [f"link add {name} type bridge mcast_snooping 0", f"link set {name} addrgenmode none up"]


def _port(host: Host, interface: str, port: str, bridge: str) -> list[str]:
    return [
        f"link add {port} type veth peer name {interface} netns {host.namespace}",
        f"link set {port} addrgenmode none",
        f"link set {port} master {bridge} up",
    ]


def _port_of(host: Host) -> str:
    return f"port{host.number}"


def _ip(*commands: str, namespace: str | None = None) -> None:
    """Runs commands of `ip`, one after the other. Raises OSError with what it said."""
    within = [] if namespace is None else ["-n", namespace]
    done = subprocess.run(
        ["ip", *within, "-batch", "-"],
        input="\n".join(commands) + "\n",
        text=True,
        capture_output=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(f"ip {'; '.join(commands)}: {done.stderr.strip()}")


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / namespace).open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)


def _in_thread(prepare: Callable[[], None], function: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            prepare()
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - it is raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=work, name="host", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _pids(namespace: str) -> list[int]:
    done = subprocess.run(
        ["ip", "netns", "pids", namespace], text=True, capture_output=True, timeout=_COMMAND_S, check=False
    )
    # A thread of ours that has entered it counts as us.
    return [int(pid) for pid in done.stdout.split() if int(pid) != os.getpid()]


def _clear_away_the_dead() -> None:
    """Ends and removes the hosts of test runs that are over."""
    for path in _NAMESPACES.iterdir() if _NAMESPACES.is_dir() else ():
        match = re.fullmatch(r"mlxtp-(\d+)-\d+-(\d+|switch)", path.name)
        if match is None or Path(f"/proc/{match[1]}").exists():
            continue
        for pid in _pids(path.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # another run may be clearing away too
            _ip(f"netns del {path.name}")


@functools.cache
def why_no_namespaces() -> str:
    """Return why hosts cannot be made here, found out by making one; empty where they can."""
    try:
        with Hosts(1) as net:
            net.hosts[0].inside(lambda: None)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


requires_namespaces = pytest.mark.skipif(
    bool(why_no_namespaces()),
    reason=f"it takes Linux, root and network namespaces to have several hosts here: {why_no_namespaces()}",
)
