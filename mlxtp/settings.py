"""Table of settings: their names, values and meanings. Everything else is derived from it.

That is flags (`options`), variables, keys of the file and defaults (`config`), and docs/settings.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from .values import (
    DEFAULT_CONTROL_PORT,
    DEFAULT_HTTP,
    Parser,
    count_to,
    one_of,
    parse_address,
    parse_bytes,
    parse_folders,
    parse_host_port,
    parse_hosts,
    parse_kv_bits,
    parse_limit,
    parse_name,
    parse_nodes,
    parse_origins,
    parse_parallel,
    parse_path,
    parse_peers,
    parse_ranks,
    parse_rdma,
    parse_seconds,
    parse_split,
    parse_switch,
    parse_text,
    parse_tokens,
)

EMBEDDED_MODEL = "tiny"
#: Bytes at which a new log file begins; the last `KEPT_LOGS` before it are kept.
MAX_LOG_BYTES = 10 * 1024**2
KEPT_LOGS = 5
AUDIT_LOG = "audit.jsonl"  #: In the home.
GENERAL, CLUSTER, ENDPOINT, TUNING, LIMITS = "General", "Cluster", "Endpoint", "Engine", "Limits"


@dataclass(frozen=True, slots=True)
class SettingKind:
    """Types of a setting in the file, and their name. Flags and variables have strings."""

    types: tuple[type, ...]
    expected: str


TEXT = SettingKind((str,), "a string in quotes")
SWITCH = SettingKind((bool,), "true or false")
NUMBER = SettingKind((int,), "a whole number")
SECONDS = SettingKind((int, float), "a number of seconds")
BYTES = SettingKind((int, str), 'a whole number, or a string such as "500MB"')
TABLE = SettingKind((dict, list), 'a table of strings, such as studio = "rdma_en5", or a list of strings')


def _list_of(example: str) -> SettingKind:
    return SettingKind((list,), f'a list of strings, such as ["{example}"]')


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `key` is its name in the file; one with a dot is in a table, and has no flag.

    `default` is as the file would have it; where it is None, `unset` describes the effect. `unset` also
    explains a default that does not explain itself. `help` ends with a full stop. `flag` is given where the
    flag's name differs from the key, and `fields` where those of `Settings` (or `Limits`) do. A setting that
    is `same_on_all` must be the same on all Macs of a cluster.
    """

    key: str
    kind: SettingKind
    parse: Parser
    default: object
    help: str
    panel: str
    metavar: str = ""
    unset: str = ""
    flag: str = ""
    fields: tuple[str, ...] = ()
    same_on_all: bool = False

    @property
    def option(self) -> str:
        """Its flag, such as --max-context; empty without one."""
        if "." in self.key:
            return ""
        return f"--{(self.flag or self.key).replace('_', '-')}"

    def typed(self, value: object) -> str:
        """Return its flag, as it was typed for this value."""
        return f"--no-{self.option[2:]}" if value is False else self.option

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"MLXTP_{self.key.upper().replace('.', '_')}"

    @property
    def names(self) -> tuple[str, ...]:
        """Its names in `Settings`, or in `Limits`."""
        return self.fields or (self.key.rpartition(".")[2],)

    @property
    def repeatable(self) -> bool:
        """True if its flag may be given several times."""
        return list in self.kind.types

    @property
    def default_words(self) -> str:
        """The default, for people."""
        if self.unset:
            return self.unset
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return "none" if self.default in ([], "", None) else str(self.default)


#: In the order of the help and of the page. The file is in the home, so it cannot name the home.
SETTINGS: tuple[Setting, ...] = (
    Setting(
        "model", TEXT, parse_text, EMBEDDED_MODEL,
        "A model folder, or an id on the Hugging Face Hub (OWNER/NAME).",
        GENERAL, "MODEL", f"{EMBEDDED_MODEL}, a toy that comes with mlxtp",
    ),
    Setting(
        "http", TEXT, parse_address, DEFAULT_HTTP,
        "Address of the endpoint; port 0 takes a free one. 0.0.0.0:52415 is for other machines too; those "
        "need an API key: `mlxtp key create`.",
        GENERAL, "HOST:PORT", f"{DEFAULT_HTTP}, for apps on this machine", fields=("http_host", "http_port"),
    ),
    Setting(
        "ranks", NUMBER, parse_ranks, 1,
        "Processes that share the model on this machine. Several are for experiments on one machine, "
        "and imply --alone.",
        GENERAL, "1|2|3|4", "1, for the demo 2",
    ),
    Setting(
        "drain", SECONDS, parse_seconds, 10,
        "Seconds that open requests may take to end after a request to stop, such as Ctrl-C. A second Ctrl-C "
        "ends at once.",
        GENERAL, "SECONDS", fields=("drain_s",),
    ),
    Setting(
        "model_folders", _list_of("/Volumes/share/models"), parse_folders, [],
        "Folder of models with plain names: NAME is DIR/NAME.",
        GENERAL, "DIR", flag="model_folder",
    ),
    Setting(
        "log_format", TEXT, one_of("text", "json"), "text",
        "Format of the log: lines for people, or one JSON object each.",
        GENERAL, "text|json",
    ),
    Setting(
        "log_file", TEXT, parse_path, "",
        f"Write the log there. At {MAX_LOG_BYTES >> 20} MiB a new file begins; the last {KEPT_LOGS} before "
        "it stay beside it.",
        GENERAL, "FILE", "standard error",
    ),
    # --- cluster ---
    Setting(
        "alone", SWITCH, parse_switch, False,
        "Serve on this Mac only: connect to no others, and admit none.", CLUSTER,
    ),
    Setting("name", TEXT, parse_name, None, "Name of this Mac.", CLUSTER, "NAME", "its host name"),
    Setting(
        "control", TEXT, parse_host_port, None,
        "Address at which other Macs reach this one. One on loopback is for agents of one machine, which use "
        "no other then.",
        CLUSTER, "ADDRESS:PORT", f"port {DEFAULT_CONTROL_PORT} of every address",
        fields=("control_host", "control_port"),
    ),
    Setting(
        "peers", _list_of("10.0.0.2:52414"), parse_peers, [],
        f"Address of another Mac, if Bonjour does not find it; port {DEFAULT_CONTROL_PORT} unless given.",
        CLUSTER, "HOST:PORT", flag="peer",
    ),
    Setting(
        "discovery", SWITCH, parse_switch, True, "Find other Macs, and be found, by Bonjour.", CLUSTER
    ),
    Setting(
        "nodes", SettingKind((int, str), '"auto", "all", or a whole number'), parse_nodes, "auto",
        "With --model: how many Macs to spread it over.",
        CLUSTER, "auto|all|N", "auto, as many as answer soonest",
    ),
    Setting(
        "parallel", TEXT, parse_parallel, "auto",
        "How several Macs share a model: each has a part of each layer (tensor), or whole layers (pipeline).",
        CLUSTER, "auto|tensor|pipeline", "auto, the way that answers sooner", same_on_all=True,
    ),
    Setting(
        "split", TEXT, parse_split, "auto",
        "With --model: the layers of each Mac of a pipeline, such as 40,24,16, in the order of ranks. Rank 0 "
        "has the last layers.",
        CLUSTER, "auto|N,N", "auto, by memory and speed",
    ),
    Setting(
        "backend", TEXT, one_of("auto", "jaccl", "ring"), "auto",
        "How Macs exchange data while they compute: RDMA over Thunderbolt (jaccl) or TCP (ring).",
        CLUSTER, "auto|jaccl|ring", "auto, the faster that works", fields=("fabric",), same_on_all=True,
    ),
    Setting(
        "fabric_networks", TEXT, one_of("thunderbolt", "private", "any"), "any",
        "Links that may carry tensors, which MLX does not encrypt: Thunderbolt cables only, also Ethernet "
        "between two Macs alone (private), or Wi-Fi and shared Ethernet, too (any).",
        CLUSTER, "thunderbolt|private|any", same_on_all=True,
    ),
    Setting(
        "rdma", TABLE, parse_rdma, [],
        "The RDMA device of a Mac, set by hand: studio=rdma_en5, or studio/mini=rdma_en5 for one cable.",
        CLUSTER, "NODE=DEVICE", "found automatically",
    ),
    Setting(
        "fast_fences", SWITCH, parse_switch, False,
        "Much shorter waits between CPU and GPU (MLX_METAL_FAST_SYNCH=1). Can hang a GPU until its Mac is "
        "restarted.",
        CLUSTER, same_on_all=True,
    ),
    Setting(
        "large_buffers", SWITCH, parse_switch, False,
        "Fewer and larger command buffers on Metal, and prompts in chunks of at most 512 tokens. Owners "
        "report 5 to 8 % more tokens a second of mixtures of experts. The Mac of rank 0 decides for its "
        "group; `mlxtp qualify` tries it.",
        CLUSTER,
    ),
    Setting(
        "keep_awake", SWITCH, parse_switch, True,
        "Prevent idle sleep of this Mac while it serves.", CLUSTER,
    ),
    Setting(
        "load_on_request", SWITCH, parse_switch, False,
        "A request that names a model on this Mac's disk loads it beside the others. If memory is short, "
        "the least recently used model that `mlxtp serve` did not pin gives way.",
        CLUSTER,
    ),
    # --- endpoint ---
    Setting(
        "api_keys", TEXT, one_of("auto", "always", "never"), "auto",
        "When the endpoint requires an API key.",
        ENDPOINT, "auto|always|never",
        "auto: if other machines reach the endpoint, and on this one as soon as there is a key (`mlxtp key "
        "create`)",
    ),
    Setting(
        "allowed_hosts", _list_of("studio.example.com"), parse_hosts, [],
        "A further name of this Mac, such as that of a proxy, beside its host name and "
        "addresses; * for any.",
        ENDPOINT, "NAME", flag="allowed_host",
    ),
    Setting(
        "allowed_origins", _list_of("http://localhost:3000"), parse_origins, [],
        "A web page that may use the endpoint from a browser, such as http://localhost:3000; * for "
        "any.",
        ENDPOINT, "ORIGIN", flag="allowed_origin",
    ),
    Setting(
        "http_cert", TEXT, parse_path, "",
        "Use HTTPS with this certificate (PEM, with its chain behind it); goes with --http-key.",
        ENDPOINT, "FILE",
    ),
    Setting(
        "http_key", TEXT, parse_path, "",
        "The private key of --http-cert (PEM, without a password).", ENDPOINT, "FILE",
    ),
    Setting(
        "http_tls", SWITCH, parse_switch, False,
        "Use HTTPS with a certificate that mlxtp makes itself, and that clients must be set to trust.",
        ENDPOINT,
    ),
    # --- engine ---
    Setting(
        "repeatable", SWITCH, parse_switch, False,
        "Connect three Macs or more only in ways with reproducible sums: over a JACCL ring or TCP, "
        "not over a JACCL mesh. No measured time influences a computation.",
        TUNING, same_on_all=True,
    ),
    Setting(
        "max_context", NUMBER, parse_tokens, 0,
        "Most tokens of prompt and reply.",
        TUNING, "TOKENS", "0, the model's own", same_on_all=True,
    ),
    Setting(
        "kv_bits", NUMBER, parse_kv_bits, 0,
        "Bits of a number in the KV cache, 0 for all. Fewer: longer contexts, but slower attention.",
        TUNING, "0|4|8", same_on_all=True,
    ),
    Setting(
        "kv_bytes", BYTES, parse_bytes, 0,
        "Memory for KV caches on each Mac, such as 4GB.",
        TUNING, "AMOUNT", "0, three quarters of the free memory", same_on_all=True,
    ),
    Setting(
        "cache_disk", BYTES, parse_bytes, None,
        "Disk space of this Mac for KV caches of earlier prompts, such as 20GB; 0 keeps none there.",
        TUNING, "AMOUNT", "a tenth of the free disk, 50 GB at most",
    ),
    Setting(
        "draft_model", TEXT, parse_text, "",
        "A small model with the same vocabulary, which proposes tokens so that replies come faster.",
        TUNING, "MODEL",
    ),
    Setting(
        "speculation", TEXT, one_of("auto", "off", "lookup", "mtp", "draft"), "auto",
        "Who proposes tokens, several of which one step then checks: a search in prompt and reply (lookup), "
        "the model's own MTP head, or --draft-model (draft).",
        TUNING, "auto|off|lookup|mtp|draft", "auto, whichever saves time by measurement, if any does",
        same_on_all=True,
    ),
    Setting(
        "keep_warm", SWITCH, parse_switch, True,
        "Give the GPU a tiny operation each second while a model is idle, so that no request waits until its "
        "weights are wired again. Off on battery. Not run on a Mac yet.",
        TUNING,
    ),
    Setting(
        "sandbox_ranks", SWITCH, parse_switch, False,
        "Run ranks in a sandbox of macOS, without a warm process: they read their model and their software, "
        "write their caches, and reach no other files. Not run on a Mac yet.",
        TUNING,
    ),
    # --- limits ---
    Setting(
        "limits.deadline", SECONDS, parse_limit, 3600,
        "All of a request's time, from the arrival of its body to its last token; a client may set less.",
        LIMITS, fields=("deadline_s",),
    ),
    Setting(
        "limits.queue", SECONDS, parse_limit, 300,
        "A request's wait for its first forward, or for the model that it names.",
        LIMITS, fields=("queue_s",),
    ),
    Setting(
        "limits.load_stall", SECONDS, parse_limit, 60,
        "Loading a model without any progress, after which the group forms again; more for a slow disk.",
        LIMITS, fields=("load_stall_s",),
    ),
    Setting(
        "limits.open_requests", NUMBER, count_to(2048), 0,
        "Requests open at once at this Mac; 0: as many as their tokens allow. One client may have 7 of 8.",
        LIMITS, fields=("max_open_requests",),
    ),
)  # fmt: skip

BY_KEY = {setting.key: setting for setting in SETTINGS}
JOIN = "MLXTP_JOIN"
#: Variables that are not settings of the file, with their meanings.
OTHER_VARIABLES = {
    "MLXTP_HOME": "The home of the agent, for every command, where `--home` is not given.",
    JOIN: "The token for `mlxtp node --join`, hidden from the list of processes.",
    "MLXTP_KEY": "The API key that `mlxtp launch` gives to a client, where `--key` is not given.",
}
#: Former settings, with what holds instead.
GONE = {
    "agreement": "the Macs of a group decide how it agrees",
    "compiled": "MLX_DISABLE_COMPILE=1, a variable of MLX, turns tracing off",
    "interface": "agents of one machine have a `control` on loopback",
    "prefix_cache": "common beginnings of prompts are computed once",
    "share_cache": "clients with different API keys share no beginnings of prompts",
    "spare": "a warm process is kept ready",
    "workload": "plans are for chat requests; `mlxtp plan --workload` compares for others",
    "limits.client_stall": "a client that leaves its data unread is cut off",
    "limits.free_memory": "requests are refused where hardly any memory is free",
    "limits.open_tokens": "the tokens of open requests have a fixed bound",
    "limits.recovery": "a request waits a minute for another group, or three loads of the model",
}
#: Variables that the examples read, and that settings of clients name.
_FOR_CLIENTS = frozenset(("MLXTP_URL", "MLXTP_API_KEY"))


def nearest(word: str, known: tuple[str, ...] = tuple(BY_KEY)) -> str:
    """Return the name that was probably meant, also by the last part of a dotted one; "" for none."""
    whole = {each: each for each in reversed(known)}
    parts = {each.rpartition(".")[2]: each for each in reversed(known)}
    for asked in dict.fromkeys((word, word.rpartition(".")[2])):
        if found := get_close_matches(asked.replace("-", "_"), [*whole, *parts], n=1):
            return (parts | whole)[found[0]]
    return ""


def unknown_variables(names: tuple[str, ...]) -> list[str]:
    """Return a sentence for each environment variable that looks like one of mlxtp's but is unknown."""
    known = {setting.key: setting.variable for setting in SETTINGS}
    known |= {name.removeprefix("MLXTP_").lower(): name for name in OTHER_VARIABLES}
    strange = (
        name
        for name in sorted(names)
        if name.startswith("MLXTP_")
        and not name.startswith("MLXTP_TEST_")
        and name not in _FOR_CLIENTS
        and name not in known.values()
    )
    gone = {f"MLXTP_{key.upper().replace('.', '_')}": instead for key, instead in GONE.items()}
    found = []
    for name in strange:
        if name in gone:
            found.append(f"{name} is no longer a setting: {gone[name]}")
            continue
        meant = nearest(name.removeprefix("MLXTP_").lower(), tuple(known))
        what = f"did you mean {known[meant]}?" if meant else "docs/settings.md lists all"
        found.append(f"{name} is unknown; {what}")
    return found
