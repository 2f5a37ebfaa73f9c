"""Commands of `/admin`, each declared once: requests, routes, `/openapi.json` and options derive from it.

`admin/handlers.py` carries them out. A command's fields are its body: switches and texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Self, dataclass_transform

from .errors import ConfigError, RequestError
from .settings import BY_KEY
from .values import Parser, parse_keep, parse_macs, parse_replicas, parse_seconds, parse_switch, split_layers


def option(
    flag: str,
    description: str,
    *,
    default: Any = MISSING,
    parse: Parser | None = None,
    metavar: str | None = None,
) -> Any:
    """Return a field that commands offer as this option, or as an argument if `flag` is empty."""
    about = {"description": description, "flag": flag, "parse": parse, "metavar": metavar}
    return field(default=default, metadata=about)


def _as_set(key: str, description: str, *, default: Any) -> Any:
    setting = BY_KEY[key]
    return option(
        setting.option, description, default=default, parse=setting.kind.parse, metavar=setting.kind.metavar
    )


VERBS: dict[str, type[Verb]] = {}  #: By path below `/admin`.


@dataclass_transform(frozen_default=True, field_specifiers=(option, _as_set))
class Verb:
    """One command for a running agent."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    method: ClassVar[str]
    path: ClassVar[str]
    key_scope: ClassVar[str]  #: API keys with this scope may use it too.
    polled: ClassVar[bool]  #: Commands repeat it while they wait.
    reply_s: ClassVar[float]  #: most seconds until the reply

    def __init_subclass__(
        cls, *, get: str = "", post: str = "", key_scope: str = "", polled: bool = False, reply_s: float = 15
    ) -> None:
        cls.method, cls.path = "GET" if get else "POST", get or post
        cls.key_scope, cls.polled, cls.reply_s = key_scope, polled, reply_s
        VERBS[cls.path] = dataclass(frozen=True)(cls)

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Parse a body. A switch may be a text such as "yes"; an empty text stands for the default.

        Raises RequestError for a field that is missing or of another type.
        """
        given: dict[str, Any] = {}
        for each in fields(cls):
            value = body.get(each.name, each.default)
            if type(each.default) is bool:
                try:
                    value = parse_switch(value != "" and value, each.name)
                except ConfigError as error:
                    raise RequestError(error.detail, param=each.name) from None
            elif value is MISSING or not (isinstance(value, str) or value is each.default):
                raise RequestError(f"{each.name}: a string is expected", param=each.name)
            given[each.name] = each.default if value == "" and each.default is not MISSING else value
        return cls(**given)

    def body(self) -> dict[str, Any]:
        return {each.name: value for each in fields(self) if (value := vars(self)[each.name]) != each.default}

    def parsed(self) -> dict[str, Any]:
        """Return the given options that have a parser, parsed. Raises ConfigError."""
        return {
            each.name: parse(vars(self)[each.name], each.metadata["flag"])
            for each in fields(self)
            if (parse := each.metadata.get("parse")) is not None and vars(self)[each.name] is not None
        }


# --- the agent ------------------------------------------------------------------------------------------


class Status(Verb, get="status", polled=True):
    """Snapshot of this agent, and of its cluster as it sees it."""


class StartDrain(Verb, post="drain"):
    """Finish open requests, take no new ones, and end."""

    within: str | None = option(
        "--within",
        "End after that time, even with open requests. Default: no limit.",
        default=None,
        parse=parse_seconds,
        metavar="SECONDS",
    )


class DrainProgress(Verb, get="progress", polled=True):
    """Progress of a drain, once it has changed or a while has passed."""


class KeyUses(Verb, get="keys", key_scope="metrics"):
    """Use of each API key, and the senders of open requests."""


class AgentSettings(Verb, get="settings"):
    """Settings that the agent was started with, and the source of each."""


class PresentMachines(Verb, get="plan"):
    """Machines of the members that are present."""


class PlanNow(Verb, post="plan/now"):
    """Place of a model if it were served now, beside what is, with its files on every Mac."""

    model: str
    #: As `DescribedModel.packed`, in Base64.
    described: str
    nodes: str = _as_set("nodes", "How many Macs to spread it over.", default="auto")
    parallel: str = _as_set(
        "parallel", "How several Macs share it. Default: as the agent is set.", default=""
    )
    split: str = _as_set("split", "Layers of each Mac of a pipeline.", default="auto")


class Diagnose(Verb, get="doctor", reply_s=60):
    """Problems of this machine, as the agent sees them."""


class BenchFabric(Verb, post="bench/fabric", reply_s=60):
    """Measure collectives in a group of a model, by default of the first one.

    Between ranks of one machine the result is not kept.
    """

    model: str = option("--model", "A deployed model. Default: the default one.", default="", metavar="MODEL")


# --- models ---------------------------------------------------------------------------------------------


class ModelsOnDisk(Verb, get="models", key_scope="load"):
    """Models on this Mac's disk that can be named without a path."""


class Serve(Verb, post="serve", key_scope="load", reply_s=60):
    """Add a deployment of a model, or change what is given of it."""

    model: str = option(
        "",
        "An id on the Hugging Face Hub (OWNER/NAME), a short name such as llama3.2:3b, or, if every Mac has "
        "it, a model folder or a plain name in a --model-folder.",
    )
    nodes: str | None = _as_set(
        "nodes",
        "How many Macs to spread it over; auto: the fastest number. Default: unchanged.",
        default=None,
    )
    parallel: str | None = _as_set(
        "parallel",
        "How several Macs share it: by parts of each layer (tensor) or by whole layers (pipeline). "
        "Default: unchanged, at first as `mlxtp node --parallel` has it.",
        default=None,
    )
    split: str | None = _as_set(
        "split",
        "Layers of each Mac of a pipeline, such as 40,24,16, in the order of ranks. Rank 0 has the last "
        "layers. auto: by memory and speed. Default: unchanged, at first auto.",
        default=None,
    )
    replicas: str | None = option(
        "--replicas",
        "How many groups serve it, each with a copy; all: as many as fit. Default: unchanged, at first 1.",
        default=None,
        parse=parse_replicas,
        metavar="N|all",
    )
    on: str | None = option(
        "--on",
        "Macs that may serve it, by name or beginning of node id; any: all of them. Default: unchanged, at "
        "first any.",
        default=None,
        parse=parse_macs,
        metavar="NAME,NAME",
    )
    keep: str | None = option(
        "--keep-alive",
        "How long it stays without requests, such as 10m or 2h; 0: until it has answered. It gives way "
        "earlier if another model needs its memory, unless this is forever, the default.",
        default=None,
        parse=parse_keep,
        metavar="DURATION|forever",
    )
    again: bool = option(
        "--again",
        "Place its groups again, where they are fastest now; open requests go on there.",
        default=False,
    )
    only: bool = option("--replace", "Unload all other models, once this one can be served.", default=False)

    def parsed(self) -> dict[str, Any]:
        """Return the given options, parsed. Raises ConfigError, also if they contradict each other."""
        found = super().parsed()
        split_layers(*(found.get(name, "auto") for name in ("split", "parallel", "nodes")))
        return found


class UnloadModel(Verb, post="unload", key_scope="load"):
    """Remove the deployment of a model, or one on its way; without a name the only one, or all."""

    model: str = option("", "Name of the model. Default: the only one.", default="")
    everything: bool = option("--all", "Unload every model.", default=False)


class PullModel(Verb, post="pull", key_scope="load", reply_s=60):
    """Begin to download a model of the Hub, here or on all members that are present."""

    model: str
    everywhere: bool = False


class PullProgress(Verb, post="pulling", key_scope="load", polled=True, reply_s=60):
    """Progress of a download on each member that is to have the model."""

    model: str


class ModelsStored(Verb, get="stored"):
    """Folder of models here, and the models on other members' disks."""


class CheckRemovable(Verb, post="removable", reply_s=60):
    """Check that OWNER/NAME may be removed from this Mac's disk, or its damaged files (`repair`)."""

    model: str
    repair: bool = False


class FilesRemoved(Verb, post="removed"):
    """Look at the files of OWNER/NAME again, which a command has changed."""

    model: str


# --- members --------------------------------------------------------------------------------------------

MEMBER = "A Mac's name, or the beginning of its node id: see `mlxtp cluster members`."


class ListMembers(Verb, get="members"):
    """All members of the cluster."""


class MakeToken(Verb, post="token"):
    """Make a join token."""


class LetIn(Verb, post="let_in"):
    """Members that `node` admitted by a token, and in turn those that they admitted."""

    node: str


class RemoveMember(Verb, post="remove"):
    """Remove a member, present or away, and on request those that it admitted."""

    node: str = option("", MEMBER)
    with_admitted: bool = False


class LeaveCluster(Verb, post="leave"):
    """Leave the cluster; the agent ends."""

    force: bool = option(
        "--force",
        "Also if no other Mac holds the cluster's authority: no Mac can join it afterwards.",
        default=False,
    )


class HandOver(Verb, post="authority", reply_s=30):
    """Hand the authority's key to another member, with `move` forget it here; unless `sure`, only check."""

    node: str = option("", MEMBER)
    move: bool = False
    sure: bool = option("--yes", "Do it without a question.", default=False)


# --- caches of earlier prompts --------------------------------------------------------------------------


class ListCaches(Verb, get="caches"):
    """Caches of earlier prompts: of each group whose rank 0 is here, and on this disk."""


class ClearCaches(Verb, post="caches/clear"):
    """Drop the caches of a model, or of all, in memory and on this disk; `where`: memory or disk alone."""

    model: str = option("", "Name of a model. Default: all.", default="")
    where: str = ""
