"""Findings about the agent, its identity and its model. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from .check_result import Finding, error, info, ok, warning
from .facts import Certificate, MachineFacts

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
        yield info(
            f"{agent.state}" + (f": {agent.reason or agent.waiting}" if agent.reason or agent.waiting else "")
        )
    for sentence in agent.left_out:
        yield warning(sentence, "fix what it names: it is tried again as soon as cables or ports change")
    if agent.proof:
        yield warning(agent.proof, "try other cables; `mlxtp bench --fabric` proves each collective by value")
    if agent.failures:
        yield info(f"failed groups of which something is kept: {agent.failures}", "mlxtp doctor --postmortem")


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
    elif identity.authority_here:
        yield ok("join tokens are issued here: `mlxtp token`")
    elif not facts.agent.runs_here:
        yield info("not known whether a Mac can join: only an agent knows which Mac issues join tokens")
    elif identity.authority_linked:
        yield ok(f"join tokens are issued by {identity.authority}: `mlxtp token`")
    else:
        who = identity.authority or "the Mac that founded the cluster"
        yield info(f"no Mac can join now: only {who} issues join tokens, and it cannot be reached")


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
