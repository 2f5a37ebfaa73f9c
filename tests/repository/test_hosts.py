"""The hosts that other tests use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ..hosts import Host, Hosts, requires_namespaces
from ..live_cluster import WAIT_S, until

pytestmark = [pytest.mark.slow, requires_namespaces]

TRIES = 3
TRY_S = 0.2


def udp(host: Host) -> socket.socket:
    return host.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))


def reaches(one: Host, other: Host, address: str = "") -> bool:
    """Return whether datagrams of one host get to an address of the other."""
    with udp(other) as target, udp(one) as source:
        target.bind((address or other.address, 0))
        target.settimeout(TRY_S)
        for _ in range(TRIES):
            try:
                source.sendto(b"x", target.getsockname())
                return target.recv(1) == b"x"
            except OSError:
                continue
    return False


def assert_reaches(one: Host, other: Host, address: str = "") -> None:
    """A new carrier may take a second to be noticed."""
    until(lambda: reaches(one, other, address), f"{one} reaches {address or other}", WAIT_S)


def carrier(host: Host, interface: str = "eth0") -> bool:
    return "LOWER_UP" in host.run(["ip", "link", "show", interface]).stdout


def test_hosts_reach_each_other_and_nothing_else() -> None:
    with Hosts(3) as net:
        a, b, c = net.hosts
        assert [host.address for host in net.hosts] == ["10.87.0.1", "10.87.0.2", "10.87.0.3"]
        assert_reaches(a, b)
        assert_reaches(c, a)
        with pytest.raises(OSError, match="unreachable"), udp(a) as source:
            source.sendto(b"x", ("192.0.2.1", 9))
        # Loopbacks are their own: no one listens on this machine's.
        with socket.create_server(("127.0.0.1", 0)) as here, pytest.raises(ConnectionRefusedError):
            a.inside(lambda: socket.create_connection(here.getsockname(), 1))


def test_what_processes_started_ends_with_the_host() -> None:
    script = (
        "import subprocess\n"
        "null = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "child = subprocess.Popen(['sleep', '1000'], start_new_session=True, **null)\n"
        "print(child.pid, flush=True)"
    )
    with Hosts(1) as net:
        orphan = int(net.hosts[0].run([sys.executable, "-c", script]).stdout)
        assert Path(f"/proc/{orphan}").exists()
    until(lambda: is_gone(orphan), "the orphan ends", WAIT_S)


def is_gone(pid: int) -> bool:
    """Return whether it ended, even if its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_cable_can_be_cut_and_mended() -> None:
    with Hosts(2) as net:
        a, b = net.hosts
        net.cut(a)
        assert not carrier(a)
        assert carrier(b)
        assert "10.87.0.1/24" in a.run(["ip", "addr"]).stdout
        assert not reaches(a, b)
        net.mend(a)
        assert_reaches(a, b)
        cable = net.cable(a, b)
        assert cable.addresses == ("10.87.100.1", "10.87.100.2")
        net.cut(a)
        assert_reaches(a, b, cable.addresses[1])
        cable.cut()
        assert not carrier(b, cable.interface)
        assert not reaches(a, b, cable.addresses[1])
        cable.mend()
        assert_reaches(a, b, cable.addresses[1])
        assert net.cable(a, b).addresses == ("10.87.101.1", "10.87.101.2")


def test_a_capture_has_what_was_sent_once() -> None:
    with Hosts(3) as net:
        a, b, c = net.hosts
        cable = net.cable(a, b)
        assert_reaches(c, a)
        server = b.inside(lambda: socket.create_server(("0.0.0.0", 0)))
        port = server.getsockname()[1]
        with net.capture() as capture, server, udp(c) as shout:
            for address in (b.address, cable.addresses[1]):
                with a.inside(lambda address=address: socket.create_connection((address, port), 5)) as one:  # type: ignore[misc]
                    source = "{}:{}".format(*one.getsockname())
                    other, _ = server.accept()
                    with other:
                        one.sendall(b"question" * 1000)
                        assert other.recv(8000, socket.MSG_WAITALL) == b"question" * 1000
                        other.sendall(b"answer")
                        one.recv(6, socket.MSG_WAITALL)
                last = (source, f"{address}:{port}")
            shout.bind((c.address, 0))
            shout.connect(("10.87.0.1", 9))
            shout.send(b"datagram")
            shouted = "{}:{}".format(*shout.getsockname())
        streams = capture.streams()
        assert streams[last] == b"question" * 1000
        assert streams[last[1], last[0]] == b"answer"
        assert streams[shouted, "10.87.0.1:9"] == b"datagram"
        assert sum(stream == b"question" * 1000 for stream in streams.values()) == 2


def test_hosts_of_a_run_that_was_killed_are_cleared_away_by_the_next() -> None:
    script = (
        "import os\n"
        "from tests.hosts import Hosts\n"
        "net = Hosts(2).__enter__()\n"
        "net.hosts[0].start(['sleep', '1000'])\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert killed.returncode == -9
    left = [path for path in Path("/run/netns").iterdir() if "mlxtp-" in path.name]
    dead = [path for path in left if not Path(f"/proc/{path.name.split('-')[1]}").exists()]
    assert len(dead) == 3
    with Hosts(1) as net:
        assert not any(path.exists() for path in dead)
        mine = [path.name for path in Path("/run/netns").iterdir() if f"mlxtp-{os.getpid()}-" in path.name]
        assert len(mine) == 2
    assert not any((Path("/run/netns") / name).exists() for name in mine)
    assert net.hosts[0].address == "10.87.0.1"
