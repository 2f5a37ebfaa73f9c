"""Settings of one agent: flags > environment > configuration file > the defaults of `settings`."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .settings import BY_KEY, JOIN, SETTINGS, ValueKind, nearest, variable_of
from .settings import EMBEDDED_MODEL as EMBEDDED_MODEL
from .settings import Limits as Limits
from .settings import Settings as Settings
from .values import expanded as expanded
from .values import is_host_name as is_host_name
from .values import is_loopback as is_loopback
from .values import split_layers as split_layers

FILE = "config.toml"


@dataclass(frozen=True, slots=True)
class GivenValue:
    """A value before parsing."""

    value: Any
    where: str = ""  #: its place for errors; "" for a default
    line: int = 0  #: in the file, from 1

    @property
    def origin(self) -> str:
        return f"{FILE}, line {self.line}" if self.line else self.where


Refuse = Callable[[ConfigError], None]


def _raise(error: ConfigError) -> None:
    raise error


def embedded_model_path() -> Path:
    return Path(__file__).parent / "models" / EMBEDDED_MODEL


def resolve_settings(
    flags: Mapping[str, object | None],
    environment: Mapping[str, str] = os.environ,
    defaults: Mapping[str, object] | None = None,
    refuse: Refuse = _raise,
) -> Settings:
    """Resolve settings from `flags` (None = not given), variables, the home's file, and `defaults`.

    An empty variable counts as not set. A wrong value raises ConfigError with its place. With `refuse`, that
    gets the error instead, and the value counts as not set.
    """
    flags = {key: value for key, value in flags.items() if value is not None}
    home = home_folder(flags.get("home"), environment, (defaults or {}).get("home"))
    given = (
        {key: GivenValue(value) for key, value in (defaults or {}).items()}
        | dict(_read_file(home / FILE, refuse))
        | {
            key: GivenValue(value, variable_of(key))
            for key in BY_KEY
            if (value := environment.get(variable_of(key)))
        }
        | {key: GivenValue(value, BY_KEY[key].typed(value)) for key, value in flags.items() if key in BY_KEY}
    )
    values: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    origins = {}
    for setting in SETTINGS:
        if (one := given.get(setting.key)) is None:
            continue
        try:
            parsed = setting.kind.parse(one.value, one.where)
        except ConfigError as error:
            refuse(error)
            continue
        found = parsed if len(setting.names) > 1 else (parsed,)
        (limits if "." in setting.key else values).update(zip(setting.names, found, strict=True))
        if one.where:
            origins[setting.key] = one.origin
    settings = Settings(
        home=home,
        model_given="model" in origins,
        limits=Limits(**limits),
        origins=tuple(origins.items()),
        **values,
    )
    for problem, without in _contradictions(settings, given):
        refuse(problem)
        settings = replace(settings, **without)
    return settings


def _contradictions(
    settings: Settings, given: Mapping[str, GivenValue]
) -> Iterator[tuple[ConfigError, dict[str, Any]]]:
    """Yield an error for each setting that conflicts with others, and replacements for it."""
    for one, other in (("http_cert", "http_key"), ("http_key", "http_cert")):
        if getattr(settings, one) and not getattr(settings, other):
            problem = (
                f"{given[one].where}: HTTPS needs a certificate and its private key; name the other with "
                f"--{other.replace('_', '-')}, or {other} in {FILE}"
            )
            yield ConfigError(problem), {one: ""}
    if settings.speculation == "draft" and not settings.draft_model:
        problem = (
            f"{given['speculation'].where}: draft needs a model that proposes tokens; name it with "
            f"--draft-model, or draft_model in {FILE}"
        )
        yield ConfigError(problem), {"speculation": "auto"}
    try:
        split_layers(settings.split, settings.parallel, settings.nodes)
    except ConfigError as error:
        yield error, {"split": "auto", "nodes": "auto"}


def shown(settings: Settings) -> dict[str, Any]:
    """Return each setting's value in the form of the file; None if not set."""
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
    return {"settings": shown(settings), "origins": dict(settings.origins)}


def resolve_join(
    flag: str | None, read_line: Callable[[], str], environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return `Settings.join` from the value of --join (None = not given) and MLXTP_JOIN.

    "-" reads a token from standard input by `read_line`. This and the variable keep it out of the list of
    processes. Raises ConfigError if standard input has no token.
    """
    if flag == "-":
        if not (token := read_line().strip()):
            raise ConfigError("--join -: there is no token on standard input; `mlxtp token` makes one")
        return token
    return flag or environment.get(JOIN, "").strip() or flag


def home_folder(
    flag: object = None, environment: Mapping[str, str] = os.environ, default: object = None
) -> Path:
    """Return the home of --home, MLXTP_HOME or `default`, else the user's own. Raises as `expanded`."""
    named = environment.get("MLXTP_HOME")
    where = "--home" if flag else "MLXTP_HOME" if named else "the home"
    return expanded(flag or named or default or default_home(), where)


def default_home() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("mlxtp", appauthor=False))


def _read_file(path: Path, refuse: Refuse) -> Iterator[tuple[str, GivenValue]]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would block
            raise ValueError("it is not a regular file; replace or remove it")
        content = path.read_text()
        table = tomllib.loads(content)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        return refuse(ConfigError(f"{path}: {error}"))
    except RecursionError:
        return refuse(ConfigError(f"{path}: it is nested too deeply"))
    lines = lines_of(content)
    for key, value in _flat(table):
        line = next((at for name, at in lines if f"{name}.".startswith(f"{key}.")), 0)
        where = f"{key} in {path}, line {line}"
        if key not in BY_KEY:
            refuse(ConfigError(f"{path}, line {line}: {_unknown(key)}"))
        elif wrong := _wrong_type(BY_KEY[key].kind, value):
            refuse(ConfigError(f"{where}: {wrong}"))
        else:
            yield key, GivenValue(value, where, line)


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Join keys of nested tables with dots. The keys of a setting that is a table are part of its value."""
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
    if meant := nearest(key):
        table, _, _ = meant.rpartition(".")
        return f"unknown key {key!r}; did you mean {meant}" + (f", in the table [{table}]?" if table else "?")
    return f"unknown key {key!r}; `mlxtp config show` lists all"


#: Tokens that decide where a TOML statement ends: strings, comments, brackets and line ends.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|"(?:\\.|[^"\\])*"|' + r"'''.*?'{3,5}|'[^']*'|#[^\n]*|[\[\]{}\n]", re.DOTALL
)


def lines_of(content: str) -> list[tuple[str, int]]:
    """Return each key and table of a valid TOML text, with its first line, from 1. Takes linear time."""
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
    """Yield each statement with its line end. Empty lines and comment lines are statements too."""
    begin = depth = 0
    for token in _TOKEN.finditer(content):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and not depth:
            yield content[begin : token.end()]
            begin = token.end()
    yield content[begin:]


def _dotted(statement: Mapping[str, Any]) -> str:
    name, value = next(iter(statement.items()))
    return f"{name}.{_dotted(value)}" if isinstance(value, dict) and value else name


def _wrong_type(kind: ValueKind, value: object) -> str:
    """Return why a value's TOML type is wrong; "" if it is right."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if type(value) in kind.types and all(isinstance(item, str) for item in items):
        return ""
    text = repr(value) if isinstance(value, (str, list, dict)) else str(value).lower()
    return f"{text} is of the wrong type; it has to be {kind.expected}"
