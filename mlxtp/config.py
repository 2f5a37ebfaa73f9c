"""Settings of an agent: flags > environment > configuration file > defaults."""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError

DEFAULT_HTTP = "127.0.0.1:52415"
DEFAULT_CONTROL_PORT = 52414
BACKENDS = ("auto", "jaccl", "ring")
MAX_NAME = 80
MAX_NODES = 8
EMBEDDED_MODEL = "tiny"
RANK_COUNTS = (1, 2, 4)
API_KEYS = ("auto", "always", "never")

LOG_FORMATS = ("text", "json")
AGREEMENTS = ("auto", "broadcast", "verify")
KV_BITS = (0, 4, 8)
MAX_CONTEXT = 1 << 24
MAX_BYTES = 1 << 50
MAX_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each thing may take, in seconds, and how much is taken at once.

    `queue_s`: a request's wait for its first forward. `recovery_s`: its wait for another group when its own
    has ended. `deadline_s`: all of it, from its arrival to its last token. `client_stall_s`: how long a
    client may leave unread what is there for it. `canary_s`: how long a group idles between two proofs.
    `max_open_tokens`: of prompts and answers of open requests. `min_free_bytes`: memory of this machine below
    which nothing new is taken. `load_stall_s`, `prefill_stall_s`, `decode_stall_s`: without any progress. On
    top a forward has 4 times what it is expected to take in prefill, and 20 times in decode.
    """

    spawn_s: float = 60.0
    form_s: float = 45.0
    load_stall_s: float = 60.0
    warm_up_s: float = 300.0
    prefill_stall_s: float = 30.0
    decode_stall_s: float = 10.0
    heartbeat_s: float = 0.5
    silence_s: float = 3.0
    ack_s: float = 8.0
    queue_s: float = 300.0
    recovery_s: float = 60.0
    deadline_s: float = 3600.0
    client_stall_s: float = 60.0
    canary_s: float = 60.0
    shutdown_s: float = 10.0
    max_open_requests: int = 256
    max_open_tokens: int = 2_000_000
    min_free_bytes: int = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class Settings:
    """What `mlxtp node` runs with.

    agreement     how ranks come to hold the same token: by rule, or always in one of the two ways
    compiled      whether decode graphs are traced once and replayed
    speculation   whether tokens are drafted, and looked up in prompt and answer
    prefix_cache  whether KV caches outlive their sequence, for others with the same beginning
    max_context   tokens of prompt and answer; 0 is what the model was made for
    kv_bits       bits of a number in the KV cache; 0 leaves it as the model computes it
    kv_bytes      what KV caches may take on each rank; 0 is what fits
    draft_model   a small model with the same vocabulary that proposes tokens; empty for none

    cluster       whether this agent belongs to a cluster; `alone` is the wish that it does not
    name          what people call this Mac
    control_host  where other agents find this one; "0.0.0.0" is every address
    interface     the only address of this Mac that is announced and used; empty for all
    peers         addresses of other agents ("ip:port"), for networks without multicast
    discovery     whether to look for others by Bonjour
    join          None: not asked for; empty: with the stored identity; else a join token (`resolve_join`)
    nodes         how many Macs one model is spread over: auto, all, or a number
    fabric        how ranks of several Macs talk: auto, jaccl or ring
    fast_fences   MLX_METAL_FAST_SYNCH, which is fast and can hang a GPU until it is restarted
    keep_awake    whether this Mac is kept from sleeping while it serves
    spare         whether a rank process is started ahead for each rank here, for when that one dies
    rdma          RDMA devices by hand, "NODE=DEVICE" or "NODE/PEER=DEVICE" each
    drain_s       how long an agent that is told to stop goes on with what has begun
    load_on_request  whether a request that names another model on this Mac's disk has it loaded
    model_folders where models may be that are called by a plain name; searched in this order
    log_format    how lines of the log are written: text for people, json for programs

    api_keys         when the endpoint asks for an API key: auto (beyond loopback, or once there is a key),
                     always or never
    allowed_hosts    names under which this Mac is reached, beside those it knows; "*" for any
    allowed_origins  origins of other pages whose programs may use the endpoint; "*" for any
    http_cert        with http_key, PEM files for HTTPS; empty for none
    http_tls         whether to speak HTTPS with a certificate of its own, where there is no http_cert
    """

    home: Path
    http_host: str
    http_port: int
    ranks: int
    model: str
    prefill_chunk: int = 512
    run_ahead: int = 1
    agreement: str = "auto"
    compiled: bool = True
    speculation: bool = True
    prefix_cache: bool = True
    max_context: int = 0
    kv_bits: int = 0
    kv_bytes: int = 0
    draft_model: str = ""
    spare: bool = True
    cluster: bool = False
    alone: bool = False
    model_given: bool = False
    name: str = ""
    control_host: str = "0.0.0.0"
    control_port: int = DEFAULT_CONTROL_PORT
    interface: str = ""
    peers: tuple[str, ...] = ()
    discovery: bool = True
    join: str | None = None
    nodes: str = "auto"
    fabric: str = "auto"
    fast_fences: bool = False
    keep_awake: bool = True
    rdma: tuple[str, ...] = ()
    drain_s: float = 10.0
    load_on_request: bool = False
    model_folders: tuple[str, ...] = ()
    log_format: str = "text"
    api_keys: str = "auto"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    http_cert: str = ""
    http_key: str = ""
    http_tls: bool = False
    limits: Limits = Limits()

    @property
    def local_backend(self) -> str:
        """How ranks of one machine talk: one alone needs nothing."""
        return "none" if self.ranks == 1 else "ring"


def embedded_model_path() -> Path:
    """The folder of the tiny model that comes with the package."""
    return Path(__file__).parent / "models" / EMBEDDED_MODEL


def resolve_settings(
    flags: Mapping[str, object | None],
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Settings:
    """Settings from `flags` (None = not given), `MLXTP_*` variables, `config.toml` in the home, `defaults`.

    An empty variable counts as not set. Raises ConfigError naming where the wrong value stands.
    """
    environment = os.environ if environment is None else environment
    given: _Chosen = {
        key: (value, _FLAGS.get(key, f"--{key.replace('_', '-')}"))
        for key, value in flags.items()
        if value is not None
    }
    names = {key: f"MLXTP_{key.upper()}" for key in ("home", *_PARSERS)}
    variables: _Chosen = {
        key: (environment[name], name) for key, name in names.items() if environment.get(name)
    }
    fallback: _Chosen = {
        "http": (DEFAULT_HTTP, ""),
        "ranks": (1, ""),
        "model": (EMBEDDED_MODEL, ""),
        **{key: (value, "") for key, value in (defaults or {}).items()},
    }
    chosen = fallback | variables | given
    home = Path(str(chosen["home"][0] if "home" in chosen else _default_home())).expanduser()
    chosen = fallback | _read_file(home / "config.toml") | variables | given
    values = {key: parse(*chosen[key]) for key, parse in _PARSERS.items() if key in chosen}
    host, port = values.pop("http")
    if "control" in values:
        values["control_host"], values["control_port"] = values.pop("control")
    elif values.get("interface"):
        values["control_host"] = values["interface"]
    if "backend" in values:
        values["fabric"] = values.pop("backend")
    if "drain" in values:
        values["drain_s"] = values.pop("drain")
    values["model_given"] = bool(chosen["model"][1])
    _check_pair(values, chosen)
    return Settings(home=home, http_host=host, http_port=port, **values)


def resolve_join(
    flag: str | None, read_line: Callable[[], str], environment: Mapping[str, str] | None = None
) -> str | None:
    """What `Settings.join` shall be, from the value of --join (None = not given) and MLXTP_JOIN.

    "-" is a token on standard input, of which `read_line` gives the first line. Neither can be seen in the
    list of processes, or stays in a shell's history. Raises ConfigError when there is none on standard input.
    """
    environment = os.environ if environment is None else environment
    if flag == "-":
        if not (token := read_line().strip()):
            raise ConfigError("--join -: there is no token on standard input; `mlxtp token` makes one")
        return token
    return flag or environment.get("MLXTP_JOIN", "").strip() or flag


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine get to an address or name; of names, that is localhost alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_host_name(text: str) -> bool:
    """Whether it can be the name of a machine, in lower case."""
    return bool(_HOST_NAME.fullmatch(text))


_HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")


def _check_pair(values: Mapping[str, Any], chosen: _Chosen) -> None:
    """A certificate is of no use without its key. Raises ConfigError naming where the one stands."""
    for one, other in (("http_cert", "http_key"), ("http_key", "http_cert")):
        if values.get(one) and not values.get(other):
            raise ConfigError(
                f"{chosen[one][1]}: HTTPS takes a certificate and its private key; name the other file by "
                f"--{other.replace('_', '-')}, or {other} in config.toml"
            )


def _default_home() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("mlxtp", appauthor=False))


_FLAGS = {
    "peers": "--peer",
    "allowed_hosts": "--allowed-host",
    "allowed_origins": "--allowed-origin",
    "model_folders": "--model-folder",
}
_Chosen = dict[str, tuple[Any, str]]
"""Of each key its value, and where that stands."""


def _read_file(path: Path) -> _Chosen:
    try:
        table = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None
    table = _with_fabric(table, path)
    unknown = sorted(set(table) - set(_PARSERS))
    if unknown:
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(_PARSERS)}")
    for key, value in table.items():
        _check_type(key, value, path)
    return {key: (value, f"{key} in {path}") for key, value in table.items()}


def _check_type(key: str, value: object, path: Path) -> None:
    """TOML says what is a number and what a string. Raises ConfigError where the file says something else."""
    kinds, expected = _FILE_TYPES[key]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if type(value) not in kinds or not all(isinstance(item, str) for item in items):
        shown = repr(value) if isinstance(value, (str, list, dict)) else str(value).lower()
        raise ConfigError(f"{key} in {path}: {shown} is of the wrong type; it has to be {expected}")


def _with_fabric(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """`[fabric.rdma]` means the same as `rdma`."""
    fabric = table.pop("fabric", {})
    if not isinstance(fabric, dict) or fabric.keys() - {"rdma"}:
        raise ConfigError(f"{path}: [fabric] has a table rdma, NODE = DEVICE, and nothing else")
    if "rdma" in fabric and "rdma" in table:
        raise ConfigError(
            f"{path}: RDMA devices stand both in rdma and in [fabric.rdma]; one of them is enough"
        )
    return table | fabric


def _parse_ranks(value: object, where: str) -> int:
    try:
        ranks = int(str(value))
    except ValueError:
        ranks = 0
    if ranks not in RANK_COUNTS:
        raise ConfigError(f"{where} {value}: one machine runs 1, 2 or 4 ranks")
    return ranks


def _parse_address(value: object, where: str) -> tuple[str, int]:
    host, _, port_text = str(value).rpartition(":")
    host = host.strip("[]")
    try:
        port = int(port_text)
    except ValueError:
        port = -1
    if not (_is_address(host) or is_host_name(host.lower())) or not 0 <= port <= 65535:
        raise ConfigError(f"{where}: {value!r} is not HOST:PORT, such as {DEFAULT_HTTP}")
    return host, port


def _parse_text(value: object, where: str) -> str:
    return str(value)


def _parse_path(value: object, where: str) -> str:
    return str(Path(str(value)).expanduser()) if str(value) else ""


def _parse_api_keys(value: object, where: str) -> str:
    if value not in API_KEYS:
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(API_KEYS)}")
    return str(value)


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@\s]+)/?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def _parse_hosts(value: object, where: str) -> tuple[str, ...]:
    """Names and addresses as URLs have them, without port: a list, or one string with commas."""
    found = []
    for item in _parse_list(value):
        host = item.lower().removeprefix("[").removesuffix("]")
        if host != "*" and not is_host_name(host) and not _is_address(host):
            raise ConfigError(
                f"{where}: {item!r} is no name or address of this Mac, such as studio.local; leave http:// "
                f"and the port away, or write * for any"
            )
        found.append(host)
    return tuple(found)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _parse_origins(value: object, where: str) -> tuple[str, ...]:
    """Origins as browsers send them: a list, or one string with commas."""
    found = []
    for item in _parse_list(value):
        match = _ORIGIN.fullmatch(item.lower())
        if item != "*" and match is None:
            raise ConfigError(
                f"{where}: {item!r} is no origin, such as http://localhost:3000: scheme, host and port of "
                f"the page, and no path; or * for any"
            )
        found.append("*" if match is None else _origin(match[1], match[2]))
    return tuple(found)


def _origin(scheme: str, place: str) -> str:
    """Browsers leave out the port that the scheme has anyway."""
    return f"{scheme}://{place.removesuffix(_DEFAULT_PORTS.get(scheme, '/'))}"


def _parse_name(value: object, where: str) -> str:
    text = str(value)
    if len(text) > MAX_NAME or not text.isprintable():
        raise ConfigError(f"{where}: {value!r} is not a name of at most {MAX_NAME} printable characters")
    return text


def _parse_host_port(value: object, where: str) -> tuple[str, int]:
    """An IPv4 address and a port, such as 10.0.0.1:52414; MLX's ring speaks nothing else."""
    host, _, port = str(value).rpartition(":")
    address = _parse_ipv4(host or value, where)
    if _decimal(port, 65535) is None:
        raise ConfigError(f"{where}: {value!r} is not ADDRESS:PORT, such as 10.0.0.1:{DEFAULT_CONTROL_PORT}")
    return address, int(port)


def _parse_ipv4(value: object, where: str) -> str:
    try:
        return str(ipaddress.IPv4Address(str(value)))
    except ValueError:
        raise ConfigError(f"{where}: {value!r} is no IPv4 address, such as 10.0.0.1") from None


def _parse_peers(value: object, where: str) -> tuple[str, ...]:
    """Addresses of agents: a list, or one string with commas. Names are looked up when they are dialled."""
    peers = []
    for peer in _parse_list(value):
        host, colon, port = peer.rpartition(":")
        if not colon:
            host, port = peer, str(DEFAULT_CONTROL_PORT)
        if not host or not _decimal(port, 65535):
            raise ConfigError(f"{where}: {peer!r} is not HOST:PORT, such as 10.0.0.2:{DEFAULT_CONTROL_PORT}")
        peers.append(f"{host}:{port}")
    return tuple(peers)


def _parse_folders(value: object, where: str) -> tuple[str, ...]:
    """Folders by their whole paths: an agent may be started anywhere."""
    folders = tuple(str(Path(folder).expanduser()) for folder in _parse_list(value))
    for folder in folders:
        if not Path(folder).is_absolute():
            raise ConfigError(f"{where}: {folder!r} is no whole path, such as /Volumes/share/models")
    return folders


def _parse_list(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return tuple(item.strip() for item in items if item.strip())


def _parse_rdma(value: object, where: str) -> tuple[str, ...]:
    """NODE=DEVICE or NODE/PEER=DEVICE: a table, a list, or one string with commas."""
    if isinstance(value, dict):
        items = tuple(f"{node}={device}" for node, device in value.items())
    else:
        items = _parse_list(value)
    for item in items:
        who, equals, device = item.partition("=")
        node, slash, peer = who.partition("/")
        if not (node and equals and device) or bool(slash) != bool(peer) or "=" in device:
            raise ConfigError(f"{where}: {item!r} is not NODE=DEVICE, such as studio-1=rdma_en5")
    return items


def _parse_fabric(value: object, where: str) -> str:
    if value not in BACKENDS:
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(BACKENDS)}")
    return str(value)


def parse_nodes(value: object, where: str) -> str:
    """How many Macs: "auto", "all" or a number from 1 to 8. Raises ConfigError."""
    text = str(value)
    if text in ("auto", "all"):
        return text
    if not (nodes := _decimal(text, MAX_NODES)):
        raise ConfigError(f"{where}: {value!r} is none of auto, all, or a number from 1 to {MAX_NODES}")
    return str(nodes)


def _decimal(text: str, most: int) -> int | None:
    """The number in `text`, None where there is none from 0 to `most`, of however many digits."""
    digits = text.lstrip("0") if text.isascii() and text.isdecimal() else None
    if digits is None or len(digits) > len(str(most)):
        return None
    number = int(digits or "0")
    return number if number <= most else None


def _parse_switch(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    words = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if str(value).lower() not in words:
        raise ConfigError(f"{where}: {value!r} is neither true nor false")
    return words[str(value).lower()]


def _parse_agreement(value: object, where: str) -> str:
    if value not in AGREEMENTS:
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(AGREEMENTS)}")
    return str(value)


def _parse_log_format(value: object, where: str) -> str:
    if value not in LOG_FORMATS:
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(LOG_FORMATS)}")
    return str(value)


def _parse_kv_bits(value: object, where: str) -> int:
    if str(value) not in map(str, KV_BITS):
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(map(str, KV_BITS))} (0: not quantized)")
    return int(str(value))


def _parse_tokens(value: object, where: str) -> int:
    tokens = _decimal(str(value).replace("_", ""), MAX_CONTEXT)
    if tokens is None:
        raise ConfigError(
            f"{where}: {value!r} is no number of tokens from 0 (the model's own) to {MAX_CONTEXT}"
        )
    return tokens


def parse_seconds(value: object, where: str) -> float:
    """A time in seconds, a day at most. Raises ConfigError."""
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise ConfigError(f"{where}: {value!r} is no time from 0 to {MAX_SECONDS} seconds")
    return seconds


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _parse_bytes(value: object, where: str) -> int:
    """A number of bytes, such as 500000000, 500MB or 1.5GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", str(value).strip().upper())
    if match is None:
        raise ConfigError(
            f"{where}: {value!r} is no amount of memory, such as 500MB or 1.5GiB; 0 is what fits"
        )
    size = float(match[1]) * _UNITS[match[2] or ""]
    if size > MAX_BYTES:
        raise ConfigError(f"{where}: {value!r} is more than any machine has; 0 is what fits")
    return int(size)


_TEXT = ((str,), "a string in quotes")
_SWITCH = ((bool,), "true or false")
_NUMBER = ((int,), "a whole number")
_FILE_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "http": _TEXT,
    "ranks": _NUMBER,
    "model": _TEXT,
    "agreement": _TEXT,
    "compiled": _SWITCH,
    "speculation": _SWITCH,
    "prefix_cache": _SWITCH,
    "spare": _SWITCH,
    "max_context": _NUMBER,
    "kv_bits": _NUMBER,
    "kv_bytes": ((int, str), 'a whole number, or a string such as "500MB"'),
    "draft_model": _TEXT,
    "alone": _SWITCH,
    "name": _TEXT,
    "control": _TEXT,
    "interface": _TEXT,
    "peers": ((list,), 'a list of strings, such as ["10.0.0.2:52414"]'),
    "discovery": _SWITCH,
    "nodes": ((int, str), '"auto", "all", or a whole number'),
    "backend": _TEXT,
    "fast_fences": _SWITCH,
    "keep_awake": _SWITCH,
    "drain": ((int, float), "a number of seconds"),
    "load_on_request": _SWITCH,
    "model_folders": ((list,), 'a list of strings, such as ["/Volumes/share/models"]'),
    "log_format": _TEXT,
    "rdma": ((dict, list), 'a table of strings, such as studio = "rdma_en5", or a list of strings'),
    "api_keys": _TEXT,
    "allowed_hosts": ((list,), 'a list of strings, such as ["studio.example.com"]'),
    "allowed_origins": ((list,), 'a list of strings, such as ["http://localhost:3000"]'),
    "http_cert": _TEXT,
    "http_key": _TEXT,
    "http_tls": _SWITCH,
}
"""What each key may be in the file, and how that is called. Flags and variables have strings."""

_PARSERS: Mapping[str, Callable[[Any, str], Any]] = {
    "http": _parse_address,
    "ranks": _parse_ranks,
    "model": _parse_text,
    "agreement": _parse_agreement,
    "compiled": _parse_switch,
    "speculation": _parse_switch,
    "prefix_cache": _parse_switch,
    "max_context": _parse_tokens,
    "kv_bits": _parse_kv_bits,
    "kv_bytes": _parse_bytes,
    "draft_model": _parse_text,
    "spare": _parse_switch,
    "alone": _parse_switch,
    "name": _parse_name,
    "control": _parse_host_port,
    "interface": _parse_ipv4,
    "peers": _parse_peers,
    "discovery": _parse_switch,
    "nodes": parse_nodes,
    "backend": _parse_fabric,
    "fast_fences": _parse_switch,
    "keep_awake": _parse_switch,
    "drain": parse_seconds,
    "load_on_request": _parse_switch,
    "model_folders": _parse_folders,
    "log_format": _parse_log_format,
    "rdma": _parse_rdma,
    "api_keys": _parse_api_keys,
    "allowed_hosts": _parse_hosts,
    "allowed_origins": _parse_origins,
    "http_cert": _parse_path,
    "http_key": _parse_path,
    "http_tls": _parse_switch,
}
"""What flags, variables and the file may set. The file is in the home, so it cannot name that."""
