"""Checks of the doctor: facts in, findings out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from ..discovery.addresses import ALLOW, explain
from ..placement.formation import (
    ADDRESS,
    BRIDGE,
    CABLE,
    POWER,
    RDMA,
    RDMA_SINCE,
    REPLUG,
    THUNDERBOLT_5_GBPS,
    is_scarce,
    notes,
)  # fmt: skip
from ..wire.cluster_messages import Machine, Port
from .facts import (
    Attempt,
    Certificate,
    Finding,
    MachineFacts,
    MemberFacts,
    error,
    info,
    ok,
    warning,
)

# --- the machine itself: programs, cables, memory, power --------------------------------------------------

GB = 10**9
GIB = 2**30
#: Required by MLX.
MACOS_FLOOR = (14, 0)
LITTLE_MEMORY_BYTES = 2 * GIB
_RESTART = "restart this machine"


def of_system(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether the system is new enough for MLX and for RDMA."""
    machine = facts.machine
    if machine.system != "macos":
        yield ok(f"{machine.release or machine.system}, kernel {machine.build}")
        return
    release = version(machine.release)
    if not release:
        yield info("not known: which macOS this is")
    elif release < MACOS_FLOOR:
        yield error(f"macOS {machine.release} is too old; MLX needs macOS 14", "softwareupdate --list")
    elif release < RDMA_SINCE:
        yield info(f"macOS {machine.release}; RDMA over Thunderbolt comes with 26.2", "softwareupdate --list")
    else:
        yield ok(f"macOS {machine.release} ({machine.build}), {machine.model}, {machine.chip}")


# --- Thunderbolt -----------------------------------------------------------------------------------------


def of_rdma(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether ranks can communicate by RDMA."""
    machine = facts.machine
    found = list(_noted(machine, RDMA))
    yield from found
    if unread := _unread(machine, ("rdma_ctl", "ibv_devices", "ibv_devinfo")):
        yield info(unread)
    elif not found:
        yield _rdma_as_it_should_be(machine)
    if formations := facts.agent.formations:
        each = ", ".join(f"{count} over {device}" for device, count in formations.items())
        said = f"RDMA groups that serve, or whose ranks were killed since this Mac started: {each}"
        if any(map(is_scarce, formations.values())):
            fix = "restart this Mac when that suits you; where RDMA no longer forms, mlxtp uses the TCP ring"
            yield warning(f"{said}; owners report room for two or three on each device", fix)
        else:
            yield info(said)


def _rdma_as_it_should_be(machine: Machine) -> Finding:
    if machine.rdma == "enabled":
        devices = [port.rdma for port in machine.ports if port.rdma]
        return ok(f"enabled; devices: {', '.join(devices) or 'none'}")
    fast = any(port.gbps >= THUNDERBOLT_5_GBPS for port in machine.ports)
    why = (
        "macOS is older than 26.2" if () < version(machine.release) < RDMA_SINCE else "it takes Thunderbolt 5"
    )
    return info(f"this Mac has none{'' if fast else f': {why}'}")


def of_cables(facts: MachineFacts) -> Iterator[Finding]:
    """Report cables between Macs, and whether their ports carry RDMA."""
    machine = facts.machine
    yield from _noted(machine, CABLE)
    if unread := _unread(machine, ("system_profiler", "networksetup")):
        yield info(unread)
        return
    cabled = [port for port in machine.ports if port.peer_domain]
    if not cabled:
        yield info(f"none of {len(machine.ports)} Thunderbolt ports leads to another Mac")
    for port in cabled:
        yield ok(f"{place(port)} leads to another Mac, {port.gbps or '?'} Gb/s")


def of_bridge(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether the Thunderbolt bridge blocks RDMA."""
    machine = facts.machine
    found = list(_noted(machine, BRIDGE))
    yield from found
    if unread := _unread(machine, ("ifconfig",)):
        yield info(unread)
    elif not found:
        yield ok(
            "bridge0 is up, and not in the way: there is no RDMA" if machine.bridge_up else "bridge0 is down"
        )


def of_addresses(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether each cable has permanent addresses."""
    machine = facts.machine
    yield from _noted(machine, ADDRESS)
    for port in machine.ports:
        own = [each.address for each in machine.interfaces if each.name == port.interface and each.up]
        if port.peer_domain and own:
            yield ok(f"{place(port)} has {', '.join(own)}")
    up = [each for each in machine.interfaces if each.up]
    if machine.interfaces and facts.among_others and all(each.kind == "loopback" for each in up):
        yield warning("no network is up", "plug in a cable, or join a network")
        return
    networks = [f"{each.address} ({each.name})" for each in up if each.kind != "thunderbolt"]
    yield ok(f"networks: {', '.join(networks[:6]) or 'none but cables'}")


def place(port: Port) -> str:
    """Return the name of a port as printed on the Mac."""
    return f"Thunderbolt {port.receptacle}" + (f" ({port.interface})" if port.interface else "")


def _noted(machine: Machine, about: str) -> Iterator[Finding]:
    return (warning(note.what, note.fix) for note in notes(machine) if note.about == about)


def _unread(machine: Machine, commands: tuple[str, ...]) -> str:
    """Return the notes of these commands about what they left unknown; "" if there are none."""
    return "; ".join([each for each in machine.notes if each.partition(": ")[0] in commands])


# --- memory ------------------------------------------------------------------------------


def of_gpu_memory(facts: MachineFacts) -> Iterator[Finding]:
    """Report how much memory the GPU may wire, and memory that ended processes left wired."""
    machine = facts.machine
    total, limit = machine.memory_bytes, machine.gpu_bytes
    if not total or not limit:
        yield info("not known: how much memory the GPU may wire")
        return
    left = max(4 * GIB, total // 16)
    if total - limit < left:
        yield warning(
            f"the GPU may wire {gb(limit)} of {gb(total)}, which leaves macOS {gb(total - limit)}",
            f"sudo sysctl iogpu.wired_limit_mb={(total - left) >> 20}, or =0 for macOS's own limit",
        )
    if facts.agent.left_wired:
        yield warning(facts.agent.left_wired, _RESTART, "wired memory is not there for the next model")
    elif not facts.agent.has_rank and machine.wired_bytes > total // 4 + 4 * GIB:
        yield warning(
            f"{gb(machine.wired_bytes)} are wired although no model of this agent is loaded",
            f"end other programs that use the GPU; if it stays, a model was killed, and only a restart "
            f"gives its memory back: {_RESTART}",
            "wired memory is not there for the next model",
        )
    yield ok(f"the GPU may wire {gb(limit)} of {gb(total)}; wired now: {gb(machine.wired_bytes)}")


def of_memory(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether there is memory for requests."""
    machine, room = facts.machine, facts.room
    free = machine.free_bytes
    close = "end programs that are not needed, or serve a smaller model (`mlxtp plan M` shows what fits)"
    if not free:
        yield info("not known: how much memory is free")
    elif free < room.min_free_bytes or room.critical:
        how = "macOS calls the pressure critical" if room.critical else f"below {gb(room.min_free_bytes)}"
        yield error(f"{gb(free)} of {gb(machine.memory_bytes)} are free, {how}: requests are refused", close)
    elif free < LITTLE_MEMORY_BYTES:
        yield warning(f"{gb(free)} of {gb(machine.memory_bytes)} are free", close)
    else:
        yield ok(f"{gb(free)} of {gb(machine.memory_bytes)} are free")


# --- power -----------------------------------------------------------------------------------------------


def of_power(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether this machine stays awake, runs at full speed, and restarts after a power cut."""
    machine, power = facts.machine, facts.power
    yield from _noted(machine, POWER)
    if machine.system != "macos":
        if machine.power != "battery":
            yield ok("mains")
        return
    if power.problem:
        yield info(f"not known: {power.problem}")
    yield from _of_settings(power.settings, keeps_awake=facts.agent.keep_awake)
    if machine.power == "ac":
        yield ok("mains")


def _of_settings(settings: Mapping[str, int], *, keeps_awake: bool) -> Iterator[Finding]:
    if 1 in (settings.get("lowpowermode"), settings.get("powermode")):
        yield warning(
            "Low Power Mode is on, which slows this Mac and all Macs of its group",
            "sudo pmset -a lowpowermode 0",
        )
    minutes = settings.get("sleep", 0)
    if minutes and not settings.get("SleepDisabled"):
        said = f"this Mac falls asleep after {minutes} idle min"
        if keeps_awake:
            yield info(f"{said}, but mlxtp keeps it awake while it serves", "sudo pmset -c sleep 0")
        else:
            yield warning(said, "sudo pmset -c sleep 0, or omit --no-keep-awake")
    if settings.get("autorestart") == 0:
        yield info("after a power cut this Mac stays off", "sudo pmset -a autorestart 1")


# --- words -----------------------------------------------------------------------------------------------


def gb(size: int) -> str:
    """Return bytes as people read them."""
    return f"{size / GB:.1f} GB" if size < 100 * GB else f"{size / GB:.0f} GB"


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 32, 4) for 0.32.4.dev2, () if there are none."""
    found = re.match(r"\d{1,9}(?:\.\d{1,9})*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


# --- the agent, its identity and model --------------------------------------------------------------------

#: A certificate that ends within this time, and is not renewed, is worth a warning.
SOON = timedelta(days=14)
#: First words of the remedy in the message that a disk has no room for a model.
MAKE_ROOM = "make room"
#: Digits of a hash: enough to distinguish two.
SHOWN = 8


def of_agent(facts: MachineFacts) -> Iterator[Finding]:
    """Report the agent, and thereby the process that collected the facts."""
    agent = facts.agent
    if agent.runs_here:
        yield ok(f"runs as process {agent.pid}, answers at {agent.url}; the findings below are its own")
    elif agent.problem:
        yield error(
            f"an agent holds this home, but did not answer: {agent.problem}",
            "read its log; if it hangs, end it and start it again",
        )
    else:
        yield info(
            "no agent runs, so the findings below are this command's own; those of a service may differ",
            "mlxtp node",
        )


def of_serving(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether a model is being served."""
    agent = facts.agent
    if not agent.runs_here:
        return
    if agent.problem_of_cluster:
        yield error(agent.problem_of_cluster, "as it says; then look again with `mlxtp status`")
    if agent.state == "failed":
        again = (
            f"`mlxtp serve {facts.model.wanted or 'MODEL'}` tries it again; "
            if facts.identity.cluster_id
            else ""
        )
        yield error(
            f"given up: {agent.reason}", f"fix what it names; {again}`mlxtp doctor --postmortem` shows more"
        )
    elif agent.state == "ready":
        yield ok(f"{agent.model or 'a model'} is served")
    elif facts.model.wanted and agent.waiting:
        yield warning(f"{facts.model.wanted} is not served: {agent.waiting}", "mlxtp status")
    else:
        why = agent.reason or agent.waiting
        yield info(agent.state + (f": {why}" if why not in ("", agent.problem_of_cluster) else ""))
    if agent.proof:
        yield warning(agent.proof, "try other cables; `mlxtp bench --fabric` proves each collective by value")
    if agent.slow_link:
        yield warning(agent.slow_link, REPLUG, "each token waits for its exchanges")
    if agent.failures:
        yield info(f"failed groups of which something is kept: {agent.failures}", "mlxtp doctor --postmortem")


def of_fabric(facts: MachineFacts) -> Iterator[Finding]:
    """Report how the Macs of the shown group exchange, and the groups that planning leaves out."""
    agent = facts.agent
    for sentence in agent.left_out:
        yield warning(sentence, "fix what it names: it is tried again as soon as cables or ports change")
    if agent.fabric and agent.state == "ready":
        yield ok(f"{agent.fabric} serves")


#: Seconds of each stage from which on the doctor judges, and the share of the mean that is too much.
STAGES_S, TOO_BUSY = 30.0, 1.5


def of_stages(facts: MachineFacts) -> Iterator[Finding]:
    """Report how long each stage of a pipeline computes, and whether one keeps the others waiting."""
    stages = facts.agent.stages
    if not stages:
        return
    if min(each.busy_s + each.waiting_s for each in stages) < STAGES_S:
        yield info("too little work since the model was loaded to judge them")
        return
    shares = [
        f"rank {each.rank} with {each.layers} layers computes "
        f"{each.busy_s / (each.busy_s + each.waiting_s):.0%}"
        for each in stages
    ]
    words = f"of the time with requests, {', '.join(shares)}"
    mean_s = sum(each.busy_s for each in stages) / len(stages)
    busiest = max(stages, key=lambda each: each.busy_s)
    if busiest.busy_s > TOO_BUSY * mean_s:
        yield warning(
            f"{words}: the others wait for rank {busiest.rank}",
            f"`mlxtp serve {facts.model.wanted or 'MODEL'} --split auto`, or fewer layers for it",
        )
    else:
        yield ok(words)


def of_identity(facts: MachineFacts) -> Iterator[Finding]:
    """Report this machine's certificates and keys, and whether the cluster can admit new members."""
    identity = facts.identity
    if identity.problem:
        yield error(identity.problem, "as it says")
    for certificate in identity.certificates:
        yield _of_certificate(certificate, facts)
    if identity.https_problem:
        yield error(identity.https_problem, "as it says")
    if identity.keys_problem:
        yield error(identity.keys_problem, "as it says", "until then no API key is accepted")
    elif identity.keys:
        yield ok(f"API keys: {identity.keys}")
    elif facts.network.beyond_loopback and identity.keys_asked:
        yield warning(
            "the endpoint is open to other machines, but there is no API key: every client is refused",
            "mlxtp key create NAME",
        )
    if identity.problem:
        return
    if not identity.cluster_id:
        yield info(
            "this machine belongs to no cluster", "mlxtp node founds one, mlxtp node --join TOKEN joins one"
        )
    else:
        yield from _of_authority(facts)


def _of_authority(facts: MachineFacts) -> Iterator[Finding]:
    """Yield which Macs can let others in."""
    identity = facts.identity
    others = " and ".join(identity.holders)
    if identity.authority_lost:
        yield warning(
            "this Mac should hold the cluster's authority, but authority.pem is missing",
            "restore the folder identity from a backup"
            + (f", or on {others}: mlxtp cluster authority add {facts.name}" if others else ""),
        )
    if identity.authority_here:
        yield ok(f"join tokens are issued {f'here and by {others}' if others else 'here'}: `mlxtp token`")
        if facts.agent.runs_here and not others and not identity.alone:
            yield info(
                "only this Mac can let others in: without it and without a backup no Mac can ever join",
                "mlxtp cluster authority add NODE",
            )
    elif not facts.agent.runs_here:
        yield info("not known whether a Mac can join: only an agent knows which Macs issue join tokens")
    elif identity.holders_here:
        yield ok(f"join tokens are issued by {' and '.join(identity.holders_here)}: `mlxtp token`")
    else:
        who = others or "the Mac that founded the cluster"
        yield info(f"no Mac can join now: only {who} issues join tokens, and cannot be reached")


def _of_certificate(certificate: Certificate, facts: MachineFacts) -> Finding:
    until = f"{certificate.ends:%Y-%m-%d}"
    renew = "renew it, and restart mlxtp" if not certificate.renews else "restart mlxtp: it makes another one"
    if facts.now > certificate.ends:
        return error(f"the certificate of {certificate.name} ended on {until}", renew)
    if facts.now < certificate.begins:
        return error(
            f"the certificate of {certificate.name} holds from {certificate.begins:%Y-%m-%d} on",
            "set this machine's clock, if that is behind",
        )
    if certificate.ends - facts.now < SOON and not certificate.renews:
        return warning(f"the certificate of {certificate.name} ends on {until}", renew)
    return ok(
        f"the certificate of {certificate.name} holds"
        + ("" if certificate.ends.year == 9999 else f" until {until}")
    )


def _of_lacking(problem: str) -> tuple[str, str, str]:
    """Return why a machine lacks the model, the remedy, and the reason it matters."""
    what, room, todo = problem.partition(f": {MAKE_ROOM}")
    if room:
        return what, f"{MAKE_ROOM}{todo}", "a model comes only where all of it has room, and 1 GB more"
    return problem, "as it says", "a Mac that has not got the model takes no part in its group"


def of_models(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether all members have the same files of the model."""
    model = facts.model
    if not facts.identity.cluster_id:
        yield info("there is no other member to compare with")
        return
    if not model.wanted:
        yield info("no model is wanted" if facts.agent.runs_here else "not known: only an agent knows")
        return
    if model.problem:
        what, todo, why = _of_lacking(model.problem)
        yield error(f"{model.wanted}: {what}", todo, why)
    for member in facts.members:
        if member.model_problem:
            what, todo, why = _of_lacking(member.model_problem)
            yield warning(f"{member.name} lacks {model.wanted}: {what}", f"{todo}, on {member.name}", why)
    told = {"this machine": model.fingerprint} | {
        each.name: each.fingerprint for each in facts.members if each.linked
    }
    waiting = [name for name, fingerprint in told.items() if not fingerprint]
    found = {name: fingerprint for name, fingerprint in told.items() if fingerprint}
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name} {fingerprint[:SHOWN]}" for name, fingerprint in found.items())
        of_hub = "/" in model.wanted and not model.wanted.startswith("/")
        yield error(
            f"the files of {model.wanted} differ: {shown}",
            f"`mlxtp verify {model.wanted} --repair` on each of them downloads damaged files again"
            if of_hub
            else "bring the same files to all: copy the folder from one",
        )
    elif found:
        (fingerprint,) = set(found.values())
        where = "" if len(found) == 1 else f", the same on {len(found)} machines"
        yield ok(f"{model.wanted}: {fingerprint[:SHOWN]}{where}")
    late = [name for name in waiting if name != "this machine" or not model.problem]
    late = [
        name for name in late if not any(each.name == name and each.model_problem for each in facts.members)
    ]
    if late:
        yield info(f"still looked for or downloaded, or unknown, on {', '.join(late)}")


# --- the network ----------------------------------------------------------------------------------------


#: EHOSTUNREACH on macOS. For multicast, which needs no host, it means Local Network Privacy.
PRIVACY = 65
_FIREWALL = "sudo /usr/libexec/ApplicationFirewall/socketfilterfw"


def of_local_network(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether macOS lets this process use the local network."""
    network = facts.network
    denied = [each for each in network.unicast if each.errno == PRIVACY]
    if not network.loopback:
        yield error(
            "this process does not reach itself over loopback", "ifconfig lo0: it must have 127.0.0.1"
        )
    elif network.multicast == PRIVACY or (denied and len(denied) == len(network.unicast)):
        where = "the multicast of Bonjour" if network.multicast == PRIVACY else denied[0].address
        yield error(
            f"errno 65 (No route to host) to {where}, while loopback works: macOS keeps this process "
            "from the local network",
            ALLOW,
        )
    elif network.multicast is None and not network.unicast:
        yield info("not known: no network is up that could be tried")
    else:
        yield ok("this process may send into the local network")
    if not facts.agent.runs_here and facts.among_others:
        yield info(
            "this was tried from the shell: macOS may let it through even where it blocks a service",
            "start the service, and run `mlxtp doctor` again: it runs within the service",
        )


def of_firewall(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether a firewall of this machine blocks incoming connections."""
    wall = facts.firewall
    if wall.problem:
        yield info(f"not known: {wall.problem}")
    found = list(_of_macos(facts) if facts.machine.system == "macos" else _of_linux(facts))
    if facts.among_others:
        yield from found
        return
    for each in found:  # no other machine must connect
        yield Finding(each.level, each.what) if not each.fix else info(each.what)


def _of_macos(facts: MachineFacts) -> Iterator[Finding]:
    wall, program = facts.firewall, facts.program
    if wall.enabled is False:
        yield ok("off")
    elif wall.blocks_all:
        yield error("the firewall blocks all incoming connections", f"{_FIREWALL} --setblockall off")
    elif wall.enabled and wall.app == "blocked":
        yield error(f"the firewall blocks connections to {program}", f"{_FIREWALL} --unblockapp '{program}'")
    elif wall.enabled and wall.app == "unlisted":
        yield warning(
            f"the firewall does not know {program}, and may wait for a click on its screen",
            f"{_FIREWALL} --add '{program}' && {_FIREWALL} --unblockapp '{program}'",
        )
    elif wall.enabled and wall.app == "allowed":
        yield ok(f"on, and lets others in to {program}")


def _of_linux(facts: MachineFacts) -> Iterator[Finding]:
    if facts.firewall.drops:
        yield info(
            "connections without a rule are dropped; each group opens fresh TCP ports, so one rule for the "
            "control port is too little",
            "allow this program on all TCP ports from the other members",
        )
    elif facts.firewall.drops is False:
        yield ok("no rule keeps connections out")


def of_ports(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether the agent has its ports or could get them."""
    for port in facts.network.ports:
        if port.by_mlxtp:
            yield info(
                f"{port.name} {port.address} is that of another mlxtp, a demo or an agent with another home",
                f"`mlxtp doctor --home` with its home; or for one more agent another port, with {port.flag}",
            )
        elif port.problem:
            yield error(
                f"{port.name} {port.address} is not available: {port.problem}",
                f"find its process: sudo lsof -nP -iTCP:{port.address.rpartition(':')[2]} -sTCP:LISTEN; "
                f"or take another with {port.flag}",
            )
        else:
            yield ok(f"{port.name} {port.address} {'is ours' if port.ours else 'is free'}")


def of_mdns(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether this machine finds others by multicast DNS (Bonjour)."""
    network = facts.network
    linked = [each for each in facts.members if each.linked]
    missed = [each.name for each in linked if not each.heard]
    if not facts.discovery:
        yield info("switched off (--no-discovery, --alone): others are found by address only")
    elif network.multicast_problem:
        yield _multicast_problem(facts)
    elif network.multicast:
        yield _multicast_problem(facts, explain(network.multicast, "nothing can be sent to its group"))
    elif not network.listened:
        yield info("not known: discovery was not tried")
    elif missed and not network.heard:
        yield warning(
            f"no Mac is found, though {names(missed)} {'is' if len(missed) == 1 else 'are'} linked: "
            "multicast does not get through",
            "use a network without guest isolation, VPN or router in between, or name addresses: "
            "--peer HOST:PORT",
        )
    else:
        yield ok(f"found: {names(network.heard) or 'no other Mac'}")
        if missed:
            yield info(f"not found by multicast, but reached by address: {names(missed)}")


def _multicast_problem(facts: MachineFacts, said: str = "") -> Finding:
    words = said or facts.network.multicast_problem
    up = "see that a network is up, or name addresses: --peer HOST:PORT"
    fix = ALLOW if "errno 65" in words else up
    return warning(words, fix) if facts.among_others else info(words, fix)


# --- members ---------------------------------------------------------------------------------------------


def of_peers(facts: MachineFacts) -> Iterator[Finding]:
    """Report whether this machine reaches each member."""
    if not facts.members:
        yield info("there are none" if facts.identity.cluster_id else "this machine belongs to no cluster")
    for member in facts.members:
        yield from _of_member(member)


def _of_member(member: MemberFacts) -> Iterator[Finding]:
    if not member.linked:
        yield _absent(member)
        return
    if member.unlike:
        yield warning(
            member.unlike,
            "on the Mac with the older one use a Python whose platform.mac_ver() says 26 or newer (one made"
            " with an old SDK says 16.0): `uv python install 3.13`, remove .venv, and run `make setup`",
            "ranks with unlike kernels differ in speed and rounding",
        )
    if not member.ours:
        yield ok(f"{member.name} has a link")
        return
    reached = any(not each.problem for each in member.ours)
    if not reached:
        yield warning(
            f"this machine does not reach {member.name}: {_tried(member.ours)}",
            f"run `mlxtp doctor` on {member.name}, and look at its firewall and addresses",
        )
        return
    lost = [each for each in member.ours if each.problem and each.shared]
    if lost:
        yield warning(
            f"to {member.name}, no way over {_tried(lost)}",
            "look at the cable, and at the addresses at both of its ends; the other ways work",
        )
    back = "both ways" if member.called else f"reached; `mlxtp doctor` on {member.name} shows the way back"
    yield ok(f"{member.name}: {back}")


_EITHER = "do what it says, on one of the two Macs"
_ABSENT = {"left": "has stopped", "dead": "is gone", "suspect": "is silent"}


def _absent(member: MemberFacts) -> Finding:
    """Describe a member without a link. With an empty `state` no agent runs here that could have one."""
    start = f"if it should be here: start mlxtp on {member.name}, and run `mlxtp doctor` there"
    answering = [each.address for each in member.ours if not each.problem]
    words = f"{member.name} {_ABSENT.get(member.state, 'is away')}"
    if member.refused:
        return warning(f"{member.name} has no link: the last one was refused: {member.refused}", _EITHER)
    if answering and not member.state:
        return ok(f"{member.name} takes connections at {names(answering)}; only an agent knows the way back")
    if answering:
        return warning(
            f"{words}, though {answering[0]} takes connections", f"read the last lines of both logs; {start}"
        )
    if not member.state:
        words = f"{member.name} is not reached"
    what = words + (f": {_tried(member.ours)}" if member.ours else "")
    return warning(what, start) if member.state in ("dead", "suspect") else info(what, start)


def _tried(tries: Sequence[Attempt]) -> str:
    shown = ", ".join(f"{each.address} ({each.problem})" for each in tries[:3] if each.problem)
    return f"{shown} and {len(tries) - 3} more" if len(tries) > 3 else shown


def names(found: tuple[str, ...] | list[str]) -> str:
    """Return some names and the number of the others."""
    return ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
