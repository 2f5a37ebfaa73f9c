"""Faults that the doctor finds in its facts, except the Macs' faults in `placement/faults.py`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

from ..discovery.addresses import ALLOW, explain
from ..placement.faults import ERROR, INFO, REPLUG, WARNING, Fault, Words, is_older, version
from ..placement.probe_macos import FIREWALL
from .facts import Attempt, Certificate, MachineFacts, MemberFacts

GB = 10**9
GIB = 2**30
MACOS_FLOOR = (14, 0)  #: Required by MLX.
LITTLE_MEMORY_BYTES = 2 * GIB
#: Seconds of each stage before the doctor judges it, and the share of the mean that is too much.
STAGES_S, TOO_BUSY = 30.0, 1.5
SOON = timedelta(days=14)  #: The doctor warns of a certificate that ends within it and is not renewed.
PRIVACY = 65  #: EHOSTUNREACH on macOS. For multicast, which needs no host, it means Local Network Privacy.
MAKE_ROOM = "make room"  #: Begins the remedy in the message that a disk has no room for a model.
SHOWN = 8  #: Digits of a hash, enough to tell two apart.


# --- words ------------------------------------------------------------------------------------------------


def gb(size: int) -> str:
    return f"{size / GB:.1f} GB" if size < 100 * GB else f"{size / GB:.0f} GB"


def names(found: Sequence[str]) -> str:
    return ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")


def tried(tries: Sequence[Attempt]) -> str:
    shown = ", ".join(f"{each.address} ({each.problem})" for each in tries[:3] if each.problem)
    return f"{shown} and {len(tries) - 3} more" if len(tries) > 3 else shown


# --- the agent and its model ------------------------------------------------------------------------------


def _given_up(facts: MachineFacts) -> Iterator[Words]:
    if facts.agent.state == "failed":
        again = f"`mlxtp serve {facts.model.wanted or 'MODEL'}` tries it again; "
        yield {"again": again if facts.identity.cluster_id else ""}


def stage_shares(facts: MachineFacts) -> str:
    """Return each stage's share of time computing, in words; "" if it is too early to judge."""
    all_s = [each.busy_s + each.waiting_s for each in facts.agent.stages]
    if min(all_s, default=0.0) < STAGES_S:
        return ""
    shares = (
        f"rank {each.rank} with {each.layers} layers computes {each.busy_s / of_s:.0%}"
        for each, of_s in zip(facts.agent.stages, all_s, strict=True)
    )
    return f"of the time with requests, {', '.join(shares)}"


def _slow_stage(facts: MachineFacts) -> Iterator[Words]:
    if shares := stage_shares(facts):
        stages = facts.agent.stages
        busiest = max(stages, key=lambda each: each.busy_s)
        if busiest.busy_s > TOO_BUSY * sum(each.busy_s for each in stages) / len(stages):
            yield {"shares": shares, "rank": busiest.rank, "model": facts.model.wanted or "MODEL"}


def _lacking(facts: MachineFacts, *, here: bool) -> Iterator[Words]:
    own = [("", "", facts.model.problem)]
    others = [(f"{each.name} lacks ", f", on {each.name}", each.model_problem) for each in facts.members]
    for who, where, problem in own if here else others:
        what, room, todo = problem.partition(f": {MAKE_ROOM}")
        if problem and facts.identity.cluster_id and facts.model.wanted:
            yield {
                "model_and_reason": f"{who}{facts.model.wanted}: {what}",
                "what_it_says": (f"{MAKE_ROOM}{todo}" if room else "as it says") + where,
                "why": _ROOM if room else "a Mac that has not got the model takes no part in its group",
            }


_ROOM = "a model comes only where all of it has room, and 1 GiB more"


def fingerprints(facts: MachineFacts) -> dict[str, str]:
    """Return the wanted model's fingerprint on each machine, "" if unknown."""
    told = {each.name: each.fingerprint for each in facts.members if each.linked}
    return {"this machine": facts.model.fingerprint} | told


def _unlike_files(facts: MachineFacts) -> Iterator[Words]:
    known = {name: each[:SHOWN] for name, each in fingerprints(facts).items() if each}
    wanted = facts.model.wanted
    if facts.identity.cluster_id and wanted and len(set(known.values())) > 1:
        of_hub = "/" in wanted and not wanted.startswith("/")
        repair = f"`mlxtp verify {wanted} --repair` on each of them downloads damaged files again"
        copy = "bring the same files to all: copy the folder from one"
        told = ", ".join(f"{name} {each}" for name, each in known.items())
        yield {"fingerprints": told, "bring_the_same": repair if of_hub else copy}


# --- this machine -----------------------------------------------------------------------------------------


def _gpu_limit(facts: MachineFacts) -> Iterator[Words]:
    total, limit = facts.machine.memory_bytes, facts.machine.gpu_bytes
    left = max(4 * GIB, total // 16)
    if total and limit and total - limit < left:
        yield {"limit": gb(limit), "total": gb(total), "rest": gb(total - limit), "mb": (total - left) >> 20}


def _wired(facts: MachineFacts) -> Iterator[Words]:
    machine, agent = facts.machine, facts.agent
    ours = bool(agent.left_wired) or agent.has_rank
    if not ours and machine.gpu_bytes and machine.wired_bytes > machine.memory_bytes // 4 + 4 * GIB:
        yield {"wired": gb(machine.wired_bytes)}


def _memory(facts: MachineFacts, *, refuses: bool) -> Iterator[Words]:
    machine, critical = facts.machine, facts.pressure_critical
    low = machine.free_bytes < facts.min_free_bytes or critical
    if machine.free_bytes and low is refuses and (low or machine.free_bytes < LITTLE_MEMORY_BYTES):
        how = "macOS calls the pressure critical" if critical else f"below {gb(facts.min_free_bytes)}"
        yield {"free": gb(machine.free_bytes), "total": gb(machine.memory_bytes), "how": how}


_CLOSE = "end programs, or serve a smaller model (`mlxtp plan M` shows what fits)"


def _sleeps(facts: MachineFacts, *, kept_awake: bool) -> bool:
    settings = facts.power.settings
    sleeps = bool(settings.get("sleep")) and not settings.get("SleepDisabled")
    return sleeps and facts.agent.keep_awake is kept_awake


def _no_network(facts: MachineFacts) -> bool:
    up = [each for each in facts.machine.interfaces if each.up]
    return bool(facts.machine.interfaces) and facts.among_others and all(e.kind == "loopback" for e in up)


# --- the network ------------------------------------------------------------------------------------------

_FIREWALL = f"sudo {FIREWALL}"


def _kept_out(facts: MachineFacts) -> Iterator[Words]:
    network = facts.network
    denied = [each for each in network.unicast if each.errno == PRIVACY]
    if network.loopback and network.multicast == PRIVACY:
        yield {"where": "the multicast of Bonjour"}
    elif network.loopback and denied and len(denied) == len(network.unicast):
        yield {"where": denied[0].address}


def _firewall(facts: MachineFacts, app: str) -> bool:
    wall = facts.firewall
    return facts.among_others and wall.enabled is True and app == ("all" if wall.blocks_all else wall.app)


def _taken(facts: MachineFacts, *, by_mlxtp: bool) -> list[Words]:
    return [{"port": each} for each in facts.network.ports if each.problem and each.by_mlxtp is by_mlxtp]


def _multicast(facts: MachineFacts, *, denied: bool) -> Iterator[Words]:
    network = facts.network
    said = network.multicast_problem
    if not said and network.multicast:
        said = explain(network.multicast, "nothing can be sent to its group")
    if facts.discovery and facts.among_others and said and ("errno 65" in said) is denied:
        yield {"reason": said}


def _unheard(facts: MachineFacts) -> Iterator[Words]:
    network, missed = facts.network, [each.name for each in facts.members if each.linked and not each.heard]
    sent = network.listened and not (network.multicast_problem or network.multicast)
    if facts.discovery and sent and missed and not network.heard:
        yield {"missed": names(missed), "are": "is" if len(missed) == 1 else "are"}


# --- other members ----------------------------------------------------------------------------------------

_ABSENT = {"left": "has stopped", "dead": "is gone", "suspect": "is silent"}
_START = "if it should be here: start mlxtp on {m.name}, and run `mlxtp doctor` there"


def absence(member: MemberFacts) -> str:
    """Describe a member without a link. An empty `state` means that no agent runs here to have one."""
    state = _ABSENT.get(member.state, "is away") if member.state else "is not reached"
    return f"{member.name} {state}" + (f": {tried(member.ours)}" if member.ours else "")


def _absent(facts: MachineFacts) -> list[MemberFacts]:
    return [each for each in facts.members if not (each.linked or each.refused)]


def _away(facts: MachineFacts, *, expected: bool) -> Iterator[Words]:
    for each in _absent(facts):
        if not each.answering and (each.state in ("dead", "suspect")) is expected:
            yield {"m": each, "member_and_state": absence(each)}


def _answers(facts: MachineFacts) -> Iterator[Words]:
    for each in _absent(facts):
        if each.state and each.answering:
            state = _ABSENT.get(each.state, "is away")
            yield {"m": each, "state": state, "address": each.answering[0]}


def _unreached(facts: MachineFacts, *, at_all: bool) -> Iterator[Words]:
    for each in facts.members:
        lost = [x for x in each.ours if x.problem and (x.shared or not each.answering)]
        if each.linked and lost and at_all is (not each.answering):
            yield {"m": each, "tried": tried(lost)}


# --- the identity -----------------------------------------------------------------------------------------


def _certificates(facts: MachineFacts, state: str) -> Iterator[Words]:
    for each in facts.identity.certificates:
        if certificate_state(each, facts) == state:
            renew = "restart mlxtp: it makes another one" if each.renews else "renew it, and restart mlxtp"
            yield {"c": each, "ended": "ended" if facts.now > each.ends else "ends", "renew": renew}


def certificate_state(certificate: Certificate, facts: MachineFacts) -> str:
    """Return "ended", "early" or "soon", or "" for a valid certificate."""
    if facts.now > certificate.ends:
        return "ended"
    if facts.now < certificate.begins:
        return "early"
    return "soon" if certificate.ends - facts.now < SOON and not certificate.renews else ""


def _lost_authority(facts: MachineFacts) -> Iterator[Words]:
    others = " and ".join(facts.identity.holders)
    if facts.identity.authority_lost and not facts.identity.problem and facts.identity.cluster_id:
        yield {"or_add": f", or on {others}: mlxtp cluster authority add {facts.name}" if others else ""}


def _only_authority(facts: MachineFacts) -> bool:
    identity = facts.identity
    member = bool(identity.cluster_id) and not identity.problem and facts.agent.runs_here
    return member and identity.authority_here and not identity.holders and not identity.alone


def _no_keys(facts: MachineFacts) -> bool:
    identity = facts.identity
    asked = facts.network.beyond_loopback and identity.keys_asked
    return asked and not identity.keys and not identity.keys_problem


# --- the table --------------------------------------------------------------------------------------------

OF_FACTS: tuple[Fault[MachineFacts], ...] = (
    Fault("agent-silent", "agent", ERROR, lambda f: bool(f.agent.problem) and not f.agent.runs_here,
        "an agent holds this home, but did not answer: {at.agent.problem}",
        "read its log; if it hangs, end it and start it again"),
    Fault("agent-absent", "agent", INFO, lambda f: not f.agent.problem and not f.agent.runs_here,
        "no agent runs: these findings are this command's own, and a service's may differ",
        "mlxtp node"),
    Fault("cluster-problem", "serving", ERROR,
        lambda f: f.agent.runs_here and bool(f.agent.problem_of_cluster),
        "{at.agent.problem_of_cluster}",
        "as it says; then look again with `mlxtp status`"),
    Fault("given-up", "serving", ERROR, _given_up,
        "given up: {at.agent.reason}",
        "fix what it names; {again}`mlxtp doctor --postmortem` shows more"),
    Fault("model-waits", "serving", WARNING,
        lambda f: f.agent.state not in ("failed", "ready") and bool(f.model.wanted and f.agent.waiting),
        "{at.model.wanted} is not served: {at.agent.waiting}",
        "mlxtp status"),
    Fault("golden-proof", "serving", WARNING, lambda f: bool(f.agent.proof),
        "{at.agent.proof}",
        "try other cables; `mlxtp bench --fabric` proves each collective by value"),
    Fault("slow-link", "serving", WARNING, lambda f: bool(f.agent.slow_link),
        "{at.agent.slow_link}",
        REPLUG, "each token waits for its exchanges"),
    Fault("failures-kept", "serving", INFO, lambda f: bool(f.agent.failures),
        "failed groups of which something is kept: {at.agent.failures}",
        "mlxtp doctor --postmortem"),
    Fault("left-out", "fabric", WARNING, lambda f: [{"group_and_reason": each} for each in f.agent.left_out],
        "{group_and_reason}",
        "fix what it names: it is tried again as soon as cables or ports change"),
    Fault("slow-stage", "stages", WARNING, _slow_stage,
        "{shares}: the others wait for rank {rank}",
        "`mlxtp serve {model} --split auto`, or fewer layers for it"),
    Fault("macos-too-old", "system", ERROR,
        lambda f: f.machine.system == "macos" and () < version(f.machine.release) < MACOS_FLOOR,
        "macOS {at.machine.release} is too old; MLX needs macOS 14",
        "softwareupdate --list"),
    Fault("macos-before-rdma", "system", INFO,
        lambda f: is_older(f.machine) and version(f.machine.release) >= MACOS_FLOOR,
        "macOS {at.machine.release}; RDMA over Thunderbolt comes with 26.2",
        "softwareupdate --list"),
    Fault("no-network", "addresses", WARNING, _no_network,
        "no network is up",
        "plug in a cable, or join a network"),
    Fault("no-loopback", "local-network", ERROR, lambda f: not f.network.loopback,
        "this process does not reach itself over loopback",
        "ifconfig lo0: it must have 127.0.0.1"),
    Fault("local-network-denied", "local-network", ERROR, _kept_out,
        "errno 65 (No route to host) to {where}, while loopback works: macOS keeps this process from the "
        "local network",
        ALLOW),
    Fault("tried-from-shell", "local-network", INFO, lambda f: not f.agent.runs_here and f.among_others,
        "this was tried from the shell: macOS may let it through even where it blocks a service",
        "start the service, and run `mlxtp doctor` again: it runs within the service"),
    Fault("firewall-blocks-all", "firewall", ERROR, lambda f: _firewall(f, "all"),
        "the firewall blocks all incoming connections",
        f"{_FIREWALL} --setblockall off"),
    Fault("firewall-blocks-mlxtp", "firewall", ERROR, lambda f: _firewall(f, "blocked"),
        "the firewall blocks connections to {at.program}",
        f"{_FIREWALL} --unblockapp '{{at.program}}'"),
    Fault("firewall-asks", "firewall", WARNING, lambda f: _firewall(f, "unlisted"),
        "the firewall does not know {at.program}, and may wait for a click on its screen",
        f"{_FIREWALL} --add '{{at.program}}' && {_FIREWALL} --unblockapp '{{at.program}}'"),
    Fault("firewall-of-linux", "firewall", INFO, lambda f: bool(f.firewall.drops) and f.among_others,
        "connections without a rule are dropped, and each group opens fresh TCP ports",
        "allow this program on all TCP ports from the other members"),
    Fault("port-taken", "ports", ERROR, lambda f: _taken(f, by_mlxtp=False),
        "{port.name} {port.address} is not available: {port.problem}",
        "find its process: sudo lsof -nP -iTCP:{port.number} -sTCP:LISTEN; or take another with {port.flag}"),
    Fault("port-of-mlxtp", "ports", INFO, lambda f: _taken(f, by_mlxtp=True),
        "{port.name} {port.address} is used by another mlxtp, a demo or an agent with another home",
        "`mlxtp doctor --home` with its home; or another port, with {port.flag}"),
    Fault("multicast-denied", "mdns", WARNING, lambda f: _multicast(f, denied=True),
        "{reason}",
        ALLOW),
    Fault("multicast-fails", "mdns", WARNING, lambda f: _multicast(f, denied=False),
        "{reason}",
        "see that a network is up, or name addresses: --peer HOST:PORT"),
    Fault("multicast-lost", "mdns", WARNING, _unheard,
        "no Mac is found, though {missed} {are} linked: multicast does not get through",
        "use a network without guest isolation, VPN or router, or --peer HOST:PORT"),
    Fault("member-refused", "peers", WARNING,
        lambda f: [{"m": each} for each in f.members if each.refused and not each.linked],
        "{m.name} has no link: the last one was refused: {m.refused}",
        "do what it says, on one of the two Macs"),
    Fault("member-without-link", "peers", WARNING, _answers,
        "{m.name} {state}, though {address} takes connections",
        f"read the last lines of both logs; {_START}"),
    Fault("member-gone", "peers", WARNING, lambda f: _away(f, expected=True),
        "{member_and_state}",
        _START),
    Fault("member-away", "peers", INFO, lambda f: _away(f, expected=False),
        "{member_and_state}",
        _START),
    Fault("member-unlike", "peers", WARNING,
        lambda f: [{"m": each} for each in f.members if each.linked and each.unlike],
        "{m.unlike}",
        "on the Mac with the older one, use a Python whose platform.mac_ver() says 26 or newer: `uv python "
        "install 3.13`, remove .venv, and run `make setup`",
        "ranks with unlike kernels differ in speed and rounding"),
    Fault("member-unreached", "peers", WARNING, lambda f: _unreached(f, at_all=True),
        "this machine does not reach {m.name}: {tried}",
        "run `mlxtp doctor` on {m.name}, and look at its firewall and addresses"),
    Fault("address-unreached", "peers", WARNING, lambda f: _unreached(f, at_all=False),
        "to {m.name}, no way over {tried}",
        "look at the cable and the addresses at both ends; the other ways work"),
    Fault("identity-broken", "identity", ERROR, lambda f: bool(f.identity.problem),
        "{at.identity.problem}",
        "as it says"),
    Fault("certificate-ended", "identity", ERROR, lambda f: _certificates(f, "ended"),
        "the certificate of {c.name} ended on {c.ends:%Y-%m-%d}",
        "{renew}"),
    Fault("certificate-early", "identity", ERROR, lambda f: _certificates(f, "early"),
        "the certificate of {c.name} holds from {c.begins:%Y-%m-%d} on",
        "set this machine's clock, if that is behind"),
    Fault("certificate-ends", "identity", WARNING, lambda f: _certificates(f, "soon"),
        "the certificate of {c.name} ends on {c.ends:%Y-%m-%d}",
        "{renew}"),
    Fault("https-broken", "identity", ERROR, lambda f: bool(f.identity.https_problem),
        "{at.identity.https_problem}",
        "as it says"),
    Fault("keys-broken", "identity", ERROR, lambda f: bool(f.identity.keys_problem),
        "{at.identity.keys_problem}",
        "as it says", "until then no API key is accepted"),
    Fault("no-keys", "identity", WARNING, _no_keys,
        "the endpoint is open to other machines, but there is no API key: every client is refused",
        "mlxtp key create NAME"),
    Fault("no-cluster", "identity", INFO, lambda f: not f.identity.problem and not f.identity.cluster_id,
        "this machine belongs to no cluster",
        "mlxtp node founds one, mlxtp node --join TOKEN joins one"),
    Fault("authority-lost", "identity", WARNING, _lost_authority,
        "this Mac should hold the cluster's authority, but authority.pem is missing",
        "restore the folder identity from a backup{or_add}"),
    Fault("authority-alone", "identity", INFO, _only_authority,
        "only this Mac can let others in: without it and without a backup no Mac can ever join",
        "mlxtp cluster authority add NODE"),
    Fault("no-model", "models", ERROR, lambda f: _lacking(f, here=True),
        "{model_and_reason}", "{what_it_says}", "{why}"),
    Fault("no-model-there", "models", WARNING, lambda f: _lacking(f, here=False),
        "{model_and_reason}", "{what_it_says}", "{why}"),
    Fault("unlike-files", "models", ERROR, _unlike_files,
        "the files of {at.model.wanted} differ: {fingerprints}",
        "{bring_the_same}"),
    Fault("gpu-limit", "gpu-memory", WARNING, _gpu_limit,
        "the GPU may wire {limit} of {total}, which leaves macOS {rest}",
        "sudo sysctl iogpu.wired_limit_mb={mb}, or =0 for macOS's own limit"),
    Fault("memory-left-wired", "gpu-memory", WARNING, lambda f: bool(f.agent.left_wired),
        "{at.agent.left_wired}",
        "restart this machine", "the next model cannot use it"),
    Fault("memory-wired", "gpu-memory", WARNING, _wired,
        "{wired} are wired although no model of this agent is loaded",
        "end other programs that use the GPU; if it stays, it was a killed model's: restart this machine",
        "the next model cannot use it"),
    Fault("memory-short", "memory", ERROR, lambda f: _memory(f, refuses=True),
        "{free} of {total} are free, {how}: requests are refused",
        _CLOSE),
    Fault("memory-little", "memory", WARNING, lambda f: _memory(f, refuses=False),
        "{free} of {total} are free",
        _CLOSE),
    Fault("low-power", "power", WARNING,
        lambda f: 1 in map(f.power.settings.get, ("lowpowermode", "powermode")),
        "Low Power Mode is on, which slows this Mac and all Macs of its group",
        "sudo pmset -a lowpowermode 0"),
    Fault("sleeps", "power", WARNING, lambda f: _sleeps(f, kept_awake=False),
        "this Mac falls asleep after {at.power.settings[sleep]} idle min",
        "sudo pmset -c sleep 0, or omit --no-keep-awake"),
    Fault("kept-awake", "power", INFO, lambda f: _sleeps(f, kept_awake=True),
        "this Mac falls asleep after {at.power.settings[sleep]} idle min, but not while mlxtp serves",
        "sudo pmset -c sleep 0"),
    Fault("stays-off", "power", INFO, lambda f: f.power.settings.get("autorestart") == 0,
        "after a power cut this Mac stays off",
        "sudo pmset -a autorestart 1"),
)  # fmt: skip
