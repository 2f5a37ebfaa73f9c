"""Settings of an agent: flags > environment > configuration file > defaults. `settings` has the table."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .settings import BY_KEY, GONE, JOIN, SETTINGS, Setting, nearest
from .settings import EMBEDDED_MODEL as EMBEDDED_MODEL
from .values import DEFAULT_CONTROL_PORT as DEFAULT_CONTROL_PORT
from .values import DEFAULT_HTTP as DEFAULT_HTTP
from .values import expanded as expanded
from .values import is_host_name as is_host_name
from .values import is_loopback as is_loopback
from .values import parse_keep as parse_keep
from .values import parse_macs as parse_macs
from .values import parse_nodes as parse_nodes
from .values import parse_parallel as parse_parallel
from .values import parse_replicas as parse_replicas
from .values import parse_seconds as parse_seconds
from .values import parse_split as parse_split
from .values import split_layers as split_layers

FILE = "config.toml"
_MODELS = ("model", "draft_model")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of time, in seconds, and of open requests.

    `form_s`, `proof_s`: forming a group, and its first small sums, which hang where a cable is unplugged.
    `queue_s`: a request's wait for its first forward. `recovery_s`: its wait for another group after its own
    has ended, or three loads of the model, whichever is longer. `deadline_s`: all of its time, from its
    arrival to its last token. `canary_s`: the idle time of a group between two proofs. `load_stall_s`,
    `prefill_stall_s`, `decode_stall_s`: time without any progress. A forward has 4 times its expected time in
    addition in prefill, and 20 times in decode.
    """

    spawn_s: float = 60.0
    form_s: float = 45.0
    proof_s: float = 15.0
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
    canary_s: float = 60.0
    shutdown_s: float = 10.0
    max_open_requests: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that `mlxtp node` runs with. `settings.SETTINGS` explains each; these are not in it:

    cluster      this agent belongs to a cluster; `alone` is the user's setting against it
    model_given  the user set `model`; a default model is for a new cluster only
    cache_disk   None: a part of the free disk
    join         None: not set; empty: with the stored identity; else a join token (`resolve_join`)
    fabric       the setting `backend`
    origins      key and place of each setting that is not the default
    """

    home: Path
    http_host: str
    http_port: int
    ranks: int
    model: str
    prefill_chunk: int = 2048
    run_ahead: int = 1
    repeatable: bool = False
    speculation: str = "auto"
    max_context: int = 0
    kv_bits: int = 0
    kv_bytes: int = 0
    cache_disk: int | None = None
    draft_model: str = ""
    keep_warm: bool = True
    sandbox_ranks: bool = False
    cluster: bool = False
    alone: bool = False
    model_given: bool = False
    name: str = ""
    control_host: str = "0.0.0.0"
    control_port: int = DEFAULT_CONTROL_PORT
    peers: tuple[str, ...] = ()
    discovery: bool = True
    join: str | None = None
    nodes: str = "auto"
    parallel: str = "auto"
    split: str = "auto"
    fabric: str = "auto"
    fabric_networks: str = "any"
    fast_fences: bool = False
    large_buffers: bool = False
    keep_awake: bool = True
    rdma: tuple[str, ...] = ()
    drain_s: float = 10.0
    load_on_request: bool = False
    model_folders: tuple[str, ...] = ()
    log_format: str = "text"
    log_file: str = ""
    api_keys: str = "auto"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    http_cert: str = ""
    http_key: str = ""
    http_tls: bool = False
    limits: Limits = Limits()
    origins: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    @property
    def local_backend(self) -> str:
        """Fabric of the ranks of one machine; a single rank needs none."""
        return "none" if self.ranks == 1 else "ring"

    @property
    def loopback(self) -> str:
        """The only address that counts for agents of one machine; empty for others."""
        return self.control_host if is_loopback(self.control_host) else ""


@dataclass(frozen=True, slots=True)
class Given:
    """A value before parsing, and its place. A default has no place.

    `where` is the place that an error names. `line` counts from 1, and is 0 outside the file.
    """

    value: Any
    where: str = ""
    line: int = 0


_Chosen = Mapping[str, Given]


Refuse = Callable[[ConfigError], None]


def _raise(error: ConfigError) -> None:
    raise error


def embedded_model_path() -> Path:
    """Return the folder of the tiny model in the package."""
    return Path(__file__).parent / "models" / EMBEDDED_MODEL


def resolve_settings(
    flags: Mapping[str, object | None],
    environment: Mapping[str, str] = os.environ,
    defaults: Mapping[str, object] | None = None,
    refuse: Refuse = _raise,
) -> Settings:
    """Resolve settings from `flags` (None = not given), `MLXTP_*` variables, `config.toml` in the home,
    `defaults`.

    An empty variable counts as not set. Raises ConfigError naming the place of a wrong value; or passes the
    error to `refuse`, and the value counts as not set.
    """
    flags = {key: value for key, value in flags.items() if value is not None}
    home = home_folder(flags.get("home"), environment, (defaults or {}).get("home"))
    chosen = (
        {setting.key: Given(setting.default) for setting in SETTINGS if setting.default is not None}
        | {key: Given(value) for key, value in (defaults or {}).items()}
        | dict(_read_file(home / FILE, refuse))
        | {
            setting.key: Given(value, setting.variable)
            for setting in SETTINGS
            if (value := environment.get(setting.variable))
        }
        | {key: Given(value, BY_KEY[key].typed(value)) for key, value in flags.items() if key in BY_KEY}
    )
    values: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for setting in SETTINGS:
        if (given := chosen.get(setting.key)) is not None:
            try:
                parsed = _parsed(setting, given)
            except ConfigError as error:
                refuse(error)
                chosen.pop(setting.key)
                if setting.default is None:
                    continue
                parsed = setting.parse(setting.default, "")
                chosen[setting.key] = Given(setting.default)
            found = parsed if len(setting.names) > 1 else (parsed,)
            (limits if "." in setting.key else values).update(zip(setting.names, found, strict=True))
    try:
        _check_pair(values, chosen)
    except ConfigError as error:
        refuse(error)
        values |= {"http_cert": "", "http_key": ""}
    if values["speculation"] == "draft" and not values["draft_model"]:
        refuse(
            ConfigError(
                f"{chosen['speculation'].where}: draft needs a model that proposes tokens; name it with "
                "--draft-model, or draft_model in config.toml"
            )
        )
        values |= {"speculation": "auto"}
    try:
        split_layers(values["split"], values["parallel"], values["nodes"])
    except ConfigError as error:
        refuse(error)
        values |= {"split": "auto", "nodes": "auto"}
    return Settings(
        home=home,
        model_given=bool(chosen["model"].where),
        limits=Limits(**limits),
        origins=tuple((key, _origin(each)) for key, each in chosen.items() if each.where),
        **values,
    )


def shown(settings: Settings) -> dict[str, Any]:
    """Return the value of each setting as the file would have it; None for one that is not set."""
    found: dict[str, Any] = {}
    for setting in SETTINGS:
        source = settings.limits if "." in setting.key else settings
        values = [getattr(source, name) for name in setting.names]
        if len(values) > 1:
            host, port = values
            found[setting.key] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        elif isinstance(values[0], tuple):
            found[setting.key] = list(values[0])
        else:
            found[setting.key] = None if values[0] == "" else values[0]
    return found


def told(settings: Settings) -> dict[str, Any]:
    """Return the settings that an agent was started with, for its replies."""
    return {"settings": shown(settings), "origins": dict(settings.origins)}


def resolve_join(
    flag: str | None, read_line: Callable[[], str], environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the value of `Settings.join`, from the value of --join (None = not given) and MLXTP_JOIN.

    "-" is a token on standard input, whose first line `read_line` returns. Neither it nor the variable shows
    in the list of processes, or in a shell's history. Raises ConfigError when standard input has no token.
    """
    if flag == "-":
        if not (token := read_line().strip()):
            raise ConfigError("--join -: there is no token on standard input; `mlxtp token` makes one")
        return token
    return flag or environment.get(JOIN, "").strip() or flag


def home_folder(
    flag: object = None, environment: Mapping[str, str] = os.environ, default: object = None
) -> Path:
    """Return the home that --home or MLXTP_HOME names, else `default`, else the user's own. Reads no file.

    Raises ConfigError for a path that begins with the ~ of an unknown user.
    """
    named = environment.get("MLXTP_HOME")
    where = "--home" if flag else "MLXTP_HOME" if named else "the home"
    return expanded(flag or named or default or default_home(), where)


def default_home() -> Path:
    """Return the default home of this user's agent."""
    import platformdirs

    return Path(platformdirs.user_data_dir("mlxtp", appauthor=False))


def _parsed(setting: Setting, given: Given) -> Any:
    """Parse a value. Raises ConfigError naming its place."""
    if setting.key in _MODELS and not str(given.value).isprintable():
        raise ConfigError(
            f"{given.where}: {given.value!r} has characters that cannot be printed, which no model's name "
            "has; write a folder or OWNER/NAME"
        )
    return setting.parse(given.value, given.where)


def _check_pair(values: Mapping[str, Any], chosen: _Chosen) -> None:
    """Check that certificate and key come together. Raises ConfigError naming the place of a single one."""
    for one, other in (("http_cert", "http_key"), ("http_key", "http_cert")):
        if values.get(one) and not values.get(other):
            raise ConfigError(
                f"{chosen[one].where}: HTTPS needs a certificate and its private key; name the other with "
                f"--{other.replace('_', '-')}, or {other} in config.toml"
            )


def _origin(given: Given) -> str:
    return f"{FILE}, line {given.line}" if given.line else given.where


def _read_file(path: Path, refuse: Refuse) -> Iterator[tuple[str, Given]]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would block
            raise ConfigError(f"{path}: it is not a regular file; replace or remove it")
        content = path.read_text()
        table = tomllib.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        return
    except ConfigError as error:
        return refuse(error)
    except (OSError, ValueError) as error:
        return refuse(ConfigError(f"{path}: {error}"))
    except RecursionError:
        return refuse(ConfigError(f"{path}: it is nested too deeply"))
    lines = lines_of(content)
    for key, value in _flat(table):
        line = next((at for name, at in lines if f"{name}.".startswith(f"{key}.")), 0)
        where = f"{key} in {path}, line {line}"
        try:
            if key not in BY_KEY:
                raise ConfigError(f"{path}, line {line}: {_unknown(key)}")
            _check_type(key, value, where)
        except ConfigError as error:
            refuse(error)
        else:
            yield key, Given(value, where, line)


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Join the keys of tables with dots. Keys of a setting that is a table itself are its value."""
    for name, value in table.items():
        key = f"{before}{name}"
        if isinstance(value, dict) and value and key not in BY_KEY:
            yield from _flat(value, f"{key}.")
        elif not (value == {} and _is_table(key)):
            yield key, value


def _is_table(key: str) -> bool:
    return any(known.startswith(f"{key}.") for known in BY_KEY)


def _unknown(key: str) -> str:
    if _is_table(key):
        return f"{key} is a table, which begins with the line [{key}]"
    if key in GONE:
        return f"{key} is no longer a setting: {GONE[key]}; remove that line"
    if meant := nearest(key):
        table, _, _ = meant.rpartition(".")
        return f"unknown key {key!r}; did you mean {meant}" + (f", in the table [{table}]?" if table else "?")
    return f"unknown key {key!r}; `mlxtp config show` lists all"


#: Tokens that decide where a TOML statement ends: strings, comments, brackets and line ends.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|"(?:\\.|[^"\\])*"|' + r"'''.*?'{3,5}|'[^']*'|#[^\n]*|[\[\]{}\n]", re.DOTALL
)


def lines_of(content: str) -> list[tuple[str, int]]:
    """Return where each key and table of a valid TOML text begins, by dotted name, in order; lines count from
    1.

    The time is linear in the length of the text.
    """
    found = []
    table, line = "", 1
    for text in _statements(content):
        if statement := tomllib.loads(text):
            name = _dotted(statement)
            if text.lstrip().startswith("["):
                table = f"{name}."
            else:
                name = f"{table}{name}"
            found.append((name, line))
        line += text.count("\n")
    return found


def _statements(content: str) -> Iterator[str]:
    """Yield each statement with its line end. An empty line and a comment line count as statements."""
    begin = depth = 0
    for token in _TOKEN.finditer(content):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and not depth:
            yield content[begin : token.end()]
            begin = token.end()
    yield content[begin:]


def _dotted(statement: Mapping[str, Any]) -> str:
    """Return the name in one statement, of which each table has one key."""
    name, value = next(iter(statement.items()))
    return f"{name}.{_dotted(value)}" if isinstance(value, dict) and value else name


def _check_type(key: str, value: object, where: str) -> None:
    """Check the TOML type of a value. Raises ConfigError for a wrong one."""
    kind = BY_KEY[key].kind
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if type(value) not in kind.types or not all(isinstance(item, str) for item in items):
        shown_value = repr(value) if isinstance(value, (str, list, dict)) else str(value).lower()
        raise ConfigError(f"{where}: {shown_value} is of the wrong type; it has to be {kind.expected}")
