"""Settings of an agent: each is one field of `Settings` or `Limits`, with all facts about it.

Flags (`cli.options`), variables, keys of the file (`config`), defaults and docs/settings.md derive from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from . import values
from .values import DEFAULT_CONTROL_PORT, DEFAULT_HTTP, Parser

EMBEDDED_MODEL = "tiny"
#: Bytes of a log file until the next one begins; the last `KEPT_LOGS` are kept.
MAX_LOG_BYTES = 10 * 1024**2
KEPT_LOGS = 5
AUDIT_LOG = "audit.jsonl"  #: In the home.
GENERAL, CLUSTER, ENDPOINT, TUNING, LIMITS = "General", "Cluster", "Endpoint", "Engine", "Limits"


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Kind of value. Flags and variables are strings; the file has types."""

    parse: Parser
    metavar: str = ""  #: its name in the help
    types: tuple[type, ...] = (str,)  #: in the file
    expected: str = "a string in quotes"  #: words for `types`


def _choice(*words: str) -> ValueKind:
    return ValueKind(values.one_of(*words), "|".join(words))


def _list(parse: Callable[[str, str], str], metavar: str, example: str) -> ValueKind:
    return ValueKind(values.each_of(parse), metavar, (list,), f'a list of strings, such as ["{example}"]')


def _number(parse: Parser, metavar: str = "") -> ValueKind:
    return ValueKind(parse, metavar, (int,), "a whole number")


SWITCH = ValueKind(values.parse_switch, "", (bool,), "true or false")
MODEL = ValueKind(values.parse_model, "MODEL")
FILE = ValueKind(values.parse_path, "FILE")
SECONDS = ValueKind(values.parse_seconds, "SECONDS", (int, float), "a number of seconds")
LIMIT = replace(SECONDS, parse=values.parse_limit)
BYTES = ValueKind(values.parse_bytes, "AMOUNT", (int, str), 'a whole number, or a string such as "500MB"')
NODES = ValueKind(values.parse_nodes, "auto|all|N", (int, str), '"auto", "all", or a whole number')
_TABLE = 'a table of strings, such as studio = "rdma_en5", or a list of strings'
RDMA = ValueKind(values.each_of(values.parse_rdma), "NODE=DEVICE", (dict, list), _TABLE)


@dataclass(frozen=True, slots=True)
class Setting:
    """All facts about one setting but its type."""

    panel: str
    kind: ValueKind
    default: object  #: in the form of the file
    help: str  #: ends with a full stop
    unset: str = ""  #: words for a default that needs them
    same_on_all: bool = False  #: It must be the same on all Macs of a cluster.
    key: str = ""  #: its name in the file; with a dot it is in a table, and has no flag
    names: tuple[str, ...] = ()  #: fields of `Settings` or `Limits`

    @property
    def option(self) -> str:
        """Its flag, such as --max-context, "" without one. A flag of a list takes one item."""
        if "." in self.key:
            return ""
        return f"--{(self.key.removesuffix('s') if self.repeatable else self.key).replace('_', '-')}"

    def typed(self, value: object) -> str:
        return f"--no-{self.option[2:]}" if value is False else self.option

    @property
    def repeatable(self) -> bool:
        return list in self.kind.types

    @property
    def default_words(self) -> str:
        if self.unset:
            return self.unset
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return "none" if self.default in ((), "") else str(self.default)


def variable_of(key: str) -> str:
    return f"MLXTP_{key.upper().replace('.', '_')}"


def _told(panel: str, kind: ValueKind, default: object, help: str, **more: Any) -> Any:
    """Return a setting's field. Its key and names default to the field's name."""
    setting = Setting(panel, kind, default, help, **more)
    parsed: Any = None if default is None else kind.parse(default, "")
    return field(default=parsed[0] if setting.names else parsed, metadata={"setting": setting})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of time, in seconds, and of open requests; some are settings."""

    # fmt: off
    deadline_s: float = _told(
        LIMITS, LIMIT, 3600,
        "A request's time from the arrival of its body to its last token; a client may set less.",
        key="limits.deadline",
    )
    queue_s: float = _told(
        LIMITS, LIMIT, 300, "A request's wait for its first forward, or for the model that it names.",
        key="limits.queue",
    )
    load_stall_s: float = _told(
        LIMITS, LIMIT, 60,
        "Loading without progress, after which the group forms again; more for a slow disk.",
        key="limits.load_stall",
    )
    max_open_requests: int = _told(
        LIMITS, _number(values.up_to(2048)), 0,
        "Open requests; 0: as many as their tokens allow. One client may have 7 of 8.",
        key="limits.open_requests",
    )
    # fmt: on
    spawn_s: float = 60.0
    form_s: float = 45.0  #: to form a group
    proof_s: float = 15.0  #: for its first small sums, which hang without a cable
    warm_up_s: float = 300.0
    prefill_stall_s: float = 30.0  #: without progress, beyond 4 times the expected time of a forward
    decode_stall_s: float = 10.0  #: without progress, beyond 20 times the expected time of a forward
    heartbeat_s: float = 0.5
    silence_s: float = 3.0
    ack_s: float = 8.0
    recovery_s: float = 60.0  #: to wait for another group, or three loads of the model if that is longer
    canary_s: float = 60.0  #: between two proofs of an idle group
    shutdown_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of `mlxtp node`."""

    home: Path
    # fmt: off
    http_host: str = _told(
        GENERAL, ValueKind(values.parse_address, "HOST:PORT"), DEFAULT_HTTP,
        "Address of the endpoint; port 0 takes a free one. 0.0.0.0:52415 is for other machines too; those "
        "need an API key: `mlxtp key create`.",
        unset=f"{DEFAULT_HTTP}, for apps on this machine", key="http", names=("http_host", "http_port"),
    )
    http_port: int = values.parse_address(DEFAULT_HTTP, "")[1]
    ranks: int = _told(
        GENERAL, _number(values.parse_ranks, "1|2|3|4"), 1,
        "Processes that share the model on this machine. Several are for experiments on one machine, "
        "and imply --alone.",
        unset="1, for the demo 2",
    )
    model: str = _told(
        GENERAL, MODEL, EMBEDDED_MODEL, "A model folder, or an id on the Hugging Face Hub (OWNER/NAME).",
        unset=f"{EMBEDDED_MODEL}, a toy that comes with mlxtp",
    )
    drain_s: float = _told(
        GENERAL, SECONDS, 10,
        "Seconds that open requests have after a signal to stop, such as Ctrl-C. A second one ends at once.",
        key="drain",
    )
    model_folders: tuple[str, ...] = _told(
        GENERAL, _list(values.parse_folder, "DIR", "/Volumes/share/models"), (),
        "Folder of models with plain names: NAME is DIR/NAME.",
    )
    log_format: str = _told(
        GENERAL, _choice("text", "json"), "text",
        "Format of the log: lines for people, or one JSON object each.",
    )
    log_file: str = _told(
        GENERAL, FILE, "",
        f"Write the log there. At {MAX_LOG_BYTES >> 20} MiB a new file begins; the last {KEPT_LOGS} stay.",
        unset="standard error",
    )
    # --- cluster ---
    alone: bool = _told(
        CLUSTER, SWITCH, False, "Serve on this Mac only: connect to no others, and admit none."
    )
    name: str = _told(
        CLUSTER, ValueKind(values.parse_name, "NAME"), "", "Name of this Mac.", unset="its host name"
    )
    control_host: str = _told(
        CLUSTER, ValueKind(values.parse_host_port, "ADDRESS:PORT"), f"0.0.0.0:{DEFAULT_CONTROL_PORT}",
        "Address for other Macs. With one on loopback, agents of one machine use loopback alone.",
        unset=f"port {DEFAULT_CONTROL_PORT} of every address", key="control",
        names=("control_host", "control_port"),
    )
    control_port: int = DEFAULT_CONTROL_PORT
    peers: tuple[str, ...] = _told(
        CLUSTER, _list(values.parse_peer, "HOST:PORT", "10.0.0.2:52414"), (),
        f"Address of another Mac, if Bonjour does not find it; port {DEFAULT_CONTROL_PORT} unless given.",
    )
    discovery: bool = _told(CLUSTER, SWITCH, True, "Find other Macs, and be found, by Bonjour.")
    nodes: str = _told(
        CLUSTER, NODES, "auto", "With --model: how many Macs to spread it over.",
        unset="auto, as many as answer soonest",
    )
    parallel: str = _told(
        CLUSTER, _choice("auto", "tensor", "pipeline"), "auto",
        "How several Macs share a model: each has a part of each layer (tensor), or whole layers (pipeline).",
        unset="auto, the way that answers sooner", same_on_all=True,
    )
    split: str = _told(
        CLUSTER, ValueKind(values.parse_split, "auto|N,N"), "auto",
        "With --model: the layers of each Mac of a pipeline, such as 40,24,16, in the order of ranks. Rank 0 "
        "has the last layers.",
        unset="auto, by memory and speed",
    )
    fabric: str = _told(
        CLUSTER, _choice("auto", "jaccl", "ring"), "auto",
        "How Macs exchange data while they compute: RDMA over Thunderbolt (jaccl) or TCP (ring).",
        unset="auto, the faster that works", same_on_all=True, key="backend",
    )
    fabric_networks: str = _told(
        CLUSTER, _choice("thunderbolt", "private", "any"), "any",
        "Links that may carry tensors, which MLX does not encrypt: Thunderbolt cables only, also Ethernet "
        "between two Macs alone (private), or also Wi-Fi and shared Ethernet (any).",
        same_on_all=True,
    )
    rdma: tuple[str, ...] = _told(
        CLUSTER, RDMA, (),
        "The RDMA device of a Mac, set by hand: studio=rdma_en5, or studio/mini=rdma_en5 for one cable.",
        unset="found automatically",
    )
    fast_fences: bool = _told(
        CLUSTER, SWITCH, False,
        "Much shorter waits between CPU and GPU (MLX_METAL_FAST_SYNCH=1). Can hang a GPU until its Mac "
        "restarts.",
        same_on_all=True,
    )
    large_buffers: bool = _told(
        CLUSTER, SWITCH, False,
        "Fewer and larger command buffers on Metal, and prompts in chunks of at most 512 tokens. Owners "
        "report 5 to 8 % more tokens a second of mixtures of experts. Rank 0's Mac decides for its group; "
        "`mlxtp qualify` tries it.",
    )
    keep_awake: bool = _told(CLUSTER, SWITCH, True, "Prevent idle sleep of this Mac while it serves.")
    load_on_request: bool = _told(
        CLUSTER, SWITCH, False,
        "A request that names a model on this Mac's disk loads it. If memory is short, the least recently "
        "used model that is not pinned gives way.",
    )
    # --- endpoint ---
    api_keys: str = _told(
        ENDPOINT, _choice("auto", "always", "never"), "auto", "When the endpoint requires an API key.",
        unset="auto: from other machines, and from this one as soon as there is a key (`mlxtp key create`)",
    )
    allowed_hosts: tuple[str, ...] = _told(
        ENDPOINT, _list(values.parse_host, "NAME", "studio.example.com"), (),
        "A name of this Mac besides its host name and addresses, such as a proxy's; * for any.",
    )
    allowed_origins: tuple[str, ...] = _told(
        ENDPOINT, _list(values.parse_origin, "ORIGIN", "http://localhost:3000"), (),
        "A web page that may use the endpoint from a browser, such as http://localhost:3000; * for any.",
    )
    http_cert: str = _told(
        ENDPOINT, FILE, "",
        "Use HTTPS with this certificate (PEM, with its chain behind it); goes with --http-key.",
    )
    http_key: str = _told(ENDPOINT, FILE, "", "The private key of --http-cert (PEM, without a password).")
    http_tls: bool = _told(
        ENDPOINT, SWITCH, False,
        "Use HTTPS with a certificate that mlxtp makes itself, and that clients must be set to trust.",
    )
    # --- engine ---
    repeatable: bool = _told(
        TUNING, SWITCH, False,
        "Connect three Macs or more only in ways with reproducible sums: over a JACCL ring or TCP, not a "
        "JACCL mesh. No measured time influences a computation.",
        same_on_all=True,
    )
    max_context: int = _told(
        TUNING, _number(values.parse_tokens, "TOKENS"), 0, "Most tokens of prompt and reply.",
        unset="0, the model's own", same_on_all=True,
    )
    kv_bits: int = _told(
        TUNING, _number(values.parse_kv_bits, "0|4|8"), 0,
        "Bits of a number in the KV cache, 0 for all. Fewer: longer contexts, but slower attention.",
        same_on_all=True,
    )
    kv_bytes: int = _told(
        TUNING, BYTES, 0, "Memory for KV caches on each Mac, such as 4GB.",
        unset="0, three quarters of the free memory", same_on_all=True,
    )
    cache_disk: int | None = _told(
        TUNING, BYTES, None,
        "Disk space of this Mac for KV caches of earlier prompts, such as 20GB; 0 keeps none there.",
        unset="a tenth of the free disk, 50 GB at most",
    )
    draft_model: str = _told(
        TUNING, MODEL, "",
        "A small model with the same vocabulary, which proposes tokens so that replies come faster.",
    )
    speculation: str = _told(
        TUNING, _choice("auto", "off", "lookup", "mtp", "draft"), "auto",
        "Source of proposed tokens, which one step then checks: a search in prompt and reply (lookup), "
        "the model's own MTP head, or --draft-model (draft).",
        unset="auto, whichever saves time by measurement, if any does", same_on_all=True,
    )
    keep_warm: bool = _told(
        TUNING, SWITCH, True,
        "Give the GPU a tiny operation each second while a model is idle, so that no request waits until its "
        "weights are wired again. Off on battery. Not run on a Mac yet.",
    )
    # fmt: on
    # --- not set by users ---
    limits: Limits = Limits()
    prefill_chunk: int = 2048  #: most tokens of a prompt in one forward
    run_ahead: int = 1  #: most forwards queued ahead
    cluster: bool = False  #: It belongs to a cluster. `alone` is the user's setting against that.
    model_given: bool = False  #: The user set `model`. A default model is only for a new cluster.
    join: str | None = None  #: None: not set; "": by the stored identity; else a join token
    #: key and place of each setting that is not the default
    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def local_backend(self) -> str:
        """Fabric of one machine's ranks. A single rank needs none."""
        return "none" if self.ranks == 1 else "ring"

    @property
    def loopback(self) -> str:
        """The only address for agents of one machine; "" for other agents."""
        return self.control_host if values.is_loopback(self.control_host) else ""


def _settings_of(told: type) -> Iterator[Setting]:
    for each in fields(told):
        if (setting := each.metadata.get("setting")) is not None:
            yield replace(setting, key=setting.key or each.name, names=setting.names or (each.name,))


#: In the order of help and page: the model first. The home is missing, because the file is in it.
SETTINGS = tuple(
    sorted((*_settings_of(Settings), *_settings_of(Limits)), key=lambda each: each.key != "model")
)
BY_KEY = {setting.key: setting for setting in SETTINGS}
JOIN = "MLXTP_JOIN"
#: Variables that are not settings of the file, with their meanings.
OTHER_VARIABLES = {
    "MLXTP_HOME": "The home of the agent, for every command, where `--home` is not given.",
    JOIN: "The token for `mlxtp node --join`, hidden from the list of processes.",
    "MLXTP_KEY": "The API key that `mlxtp launch` gives to a client, where `--key` is not given.",
}
#: Variables for the examples and for clients' settings.
_FOR_CLIENTS = frozenset(("MLXTP_URL", "MLXTP_API_KEY"))


def nearest(word: str, known: tuple[str, ...] = tuple(BY_KEY)) -> str:
    """Return the name that was probably meant, or whose last part was; "" for none."""
    whole = {each: each for each in reversed(known)}
    parts = {each.rpartition(".")[2]: each for each in reversed(known)}
    for asked in dict.fromkeys((word, word.rpartition(".")[2])):
        if found := get_close_matches(asked.replace("-", "_"), [*whole, *parts], n=1):
            return (parts | whole)[found[0]]
    return ""


def unknown_variables(names: tuple[str, ...]) -> list[str]:
    """Return a sentence for each environment variable that looks like mlxtp's but is unknown."""
    known = {key: variable_of(key) for key in BY_KEY}
    known |= {name.removeprefix("MLXTP_").lower(): name for name in OTHER_VARIABLES}
    passed = _FOR_CLIENTS.union(known.values())
    found = []
    for name in sorted(names):
        if not name.startswith("MLXTP_") or name.startswith("MLXTP_TEST_") or name in passed:
            continue
        if meant := nearest(name.removeprefix("MLXTP_").lower(), tuple(known)):
            found.append(f"{name} is unknown; did you mean {known[meant]}?")
        else:
            found.append(f"{name} is unknown; docs/settings.md lists all")
    return found
