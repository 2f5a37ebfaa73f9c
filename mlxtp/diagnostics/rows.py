"""The doctor's table: objects of examination, reasons, and remedies. `docs/doctor.md` is made from it."""

from __future__ import annotations

from . import cluster_checks as cluster
from . import machine_checks as machine
from . import network_checks as network
from .check_result import CheckRow

MAC = ("macos",)

ROWS: tuple[CheckRow, ...] = (
    CheckRow(
        "agent", "Agent",
        "whether `mlxtp node` runs with this home and answers",
        "only the agent sees the network as a service does: macOS lets a shell through where it "
        "keeps services out",
        "`mlxtp node`; end an agent that hangs, and start it again",
        cluster.of_agent,
    ),
    CheckRow(
        "serving", "Serving",
        "the state of the group, why there is none, what the user must fix, failures that are kept",
        "requests wait, or get a 503, until a group is ready",
        "what the sentence says; `mlxtp doctor --postmortem` for a group that failed",
        cluster.of_serving,
    ),
    CheckRow(
        "settings", "Settings",
        "config.toml, and variables that begin with `MLXTP_`, as they are now",
        "an agent does not start with a setting that is wrong",
        "the file and line that the finding names; `mlxtp config show --origin`",
        machine.of_settings,
    ),
    CheckRow(
        "checks", "Checks",
        "whether all lookups of the doctor succeeded",
        "the result of a failed lookup is not known",
        "what the error names; else report it, with `mlxtp version --verbose`",
        machine.of_checks,
    ),
    CheckRow(
        "python", "Python",
        "its version, and on a Mac whether it is made for Apple silicon",
        "mlxtp and MLX need both",
        "another Python, then `make setup`",
        machine.of_python,
    ),
    CheckRow(
        "packages", "Packages",
        "MLX, mlx-lm and everything else that mlxtp needs, against the oldest versions that will do",
        "an older one lacks functions, or computes differently from the other Macs",
        "`make setup`",
        machine.of_packages,
    ),
    CheckRow(
        "system", "System",
        "the version of macOS, or of Linux",
        "MLX needs macOS 14, RDMA over Thunderbolt 26.2",
        "`softwareupdate --list`",
        machine.of_system,
    ),
    CheckRow(
        "rdma", "RDMA",
        "`rdma_ctl status`, `ibv_devices`",
        "without it Macs communicate over TCP, and many models are slower on two Macs than on one",
        "in Recovery: `rdma_ctl enable`",
        machine.of_rdma, MAC,
    ),
    CheckRow(
        "cables", "Cables",
        "each Thunderbolt port with a Mac at the other end: its speed, its RDMA port, hubs in between",
        "a cable in a port without RDMA, a slow one, or a hub costs more than any setting",
        "the port or cable that the finding names",
        machine.of_cables, MAC,
    ),
    CheckRow(
        "bridge", "Bridge",
        "whether `bridge0`, the Thunderbolt bridge, holds the ports while RDMA is enabled",
        "RDMA connections fail with errno 22 as long as it does, so a TCP ring is used",
        "`sudo ifconfig bridge0 down`; for good, switch its service off",
        machine.of_bridge, MAC,
    ),
    CheckRow(
        "addresses", "Addresses",
        "whether each cabled port has an IPv4 address that stays; the other networks",
        "neither RDMA nor TCP uses a port without one, and a self-assigned one changes with the next cable",
        "`sudo ifconfig en3 inet ADDRESS netmask 255.255.255.252`, with the pair that the finding proposes",
        machine.of_addresses,
    ),
    CheckRow(
        "local-network", "Local network",
        "whether a packet may leave for the group of multicast DNS and for other members, while "
        "loopback works",
        "since macOS 15 a service may be silently kept from the local network (errno 65): it "
        "finds no other Mac, and none finds it",
        "System Settings > Privacy & Security > Local Network, or a LaunchDaemon, which is exempt",
        network.of_local_network, MAC,
    ),
    CheckRow(
        "firewall", "Firewall",
        "macOS: whether it is on, blocks everything, or blocks this Python. Linux: chains of "
        "netfilter for what comes in, if they may be read",
        "members and clients cannot connect to this machine",
        "`sudo /usr/libexec/ApplicationFirewall/socketfilterfw --unblockapp PYTHON`",
        network.of_firewall,
    ),
    CheckRow(
        "ports", "Ports",
        "the TCP ports of the agent: its own, or whether they are free",
        "an agent that does not get its ports does not start",
        "end the process that has it, or `--control` and `--http`",
        network.of_ports,
    ),
    CheckRow(
        "mdns", "Bonjour",
        "whether multicast DNS can be sent, and which Macs are found",
        "members find each other by it; without it, each has to be named by address",
        "a network without guest isolation or VPN; `--peer HOST:PORT`",
        network.of_mdns,
    ),
    CheckRow(
        "peers", "Other members",
        "each member: whether this machine gets a TCP connection to each of its addresses, and whether the "
        "member has opened one to this machine",
        "a group needs connections in both directions",
        "the firewall or the cable at the end that is not reached",
        network.of_peers,
    ),
    CheckRow(
        "clock", "Clock",
        "against the time server that this Mac asks anyway (Linux: whether the system follows one)",
        "it orders the logs of several Macs, and certificates of the Hub and of HTTPS "
        "depend on it",
        "`sudo sntp -sS time.apple.com`; Linux: `sudo timedatectl set-ntp true`",
        network.of_clock,
    ),
    CheckRow(
        "identity", "Identity",
        "the files of the identity and their permissions, validity of certificates, API keys, which Mac "
        "issues join tokens",
        "a Mac without a valid identity is not a member; clients reject an expired certificate",
        "the command that the finding names",
        cluster.of_identity,
    ),
    CheckRow(
        "models", "Model files",
        "the fingerprint of the wanted model on each member: a hash of `config.json` and, of each file of "
        "weights, of its name, its size and 1 MiB at its beginning, middle and end. Not of all bytes, nor of "
        "the tokenizer: `mlxtp verify` reads all of a model of the Hub",
        "ranks with different files compute different tokens, so no group is formed of them",
        "`mlxtp verify MODEL --repair` on each for a model of the Hub; for a folder, the same files on all",
        cluster.of_models,
    ),
    CheckRow(
        "gpu-memory", "GPU memory",
        "how much the GPU may wire, and whether memory is wired though no model is loaded, or stayed so "
        "after ranks ended",
        "a limit too close to all of the memory freezes a Mac; memory that is not released is lost "
        "to models",
        "`sudo sysctl iogpu.wired_limit_mb=MB` (until the next restart); a restart for memory that is stuck",
        machine.of_gpu_memory, MAC,
    ),
    CheckRow(
        "memory", "Memory",
        "free memory, and on a Mac the kernel's memory pressure",
        "below 256 MiB, this machine and the Macs of its group refuse requests",
        "end other programs, or a smaller model",
        machine.of_memory,
    ),
    CheckRow(
        "disk", "Disk",
        "free room where models and where the agent's own files are",
        "a model takes tens of GB; without room for its own files an agent loses its state",
        "make room",
        machine.of_disk,
    ),
    CheckRow(
        "files", "Open files",
        "how many descriptors the agent may have",
        "each connection takes one; without one, a client is refused",
        "`ulimit -Hn 4096` before the start",
        machine.of_files,
    ),
    CheckRow(
        "power", "Power",
        "mains or battery; on a Mac Low Power Mode, sleep, and what happens after a power cut",
        "a Mac that slows down or sleeps holds up all others",
        "`sudo pmset -a lowpowermode 0`, `sudo pmset -c sleep 0`, `sudo pmset -a autorestart 1`",
        machine.of_power,
    ),
)  # fmt: skip
