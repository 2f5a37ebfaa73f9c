"""Settings of an agent: flags > environment > configuration file > defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError

DEFAULT_HTTP = "127.0.0.1:52415"
EMBEDDED_MODEL = "tiny"
RANK_COUNTS = (1, 2, 4)
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_KEYS = ("home", "http", "ranks", "model")
_FILE_KEYS = ("http", "ranks", "model")  # the file is in the home, so it cannot name it


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each thing may take, in seconds, and how many requests may be open."""

    spawn_s: float = 60.0
    form_s: float = 45.0
    load_stall_s: float = 60.0
    warm_up_s: float = 300.0
    prefill_stall_s: float = 120.0
    decode_stall_s: float = 30.0
    heartbeat_s: float = 0.5
    silence_s: float = 3.0
    ack_s: float = 8.0
    shutdown_s: float = 10.0
    max_open_requests: int = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """What `mlxtp node` runs with."""

    home: Path
    http_host: str
    http_port: int
    ranks: int
    model: str
    prefill_chunk: int = 512
    run_ahead: int = 1
    limits: Limits = Limits()

    @property
    def backend(self) -> str:
        """How the ranks of this machine talk: one alone needs nothing."""
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
    given = {key: (value, f"--{key}") for key, value in flags.items() if value is not None}
    names = {key: f"MLXTP_{key.upper()}" for key in _KEYS}
    variables = {key: (environment[name], name) for key, name in names.items() if environment.get(name)}
    fallback: dict[str, tuple[Any, str]] = {
        "ranks": (1, ""),
        "http": (DEFAULT_HTTP, ""),
        "model": (EMBEDDED_MODEL, ""),
        **{key: (value, "") for key, value in (defaults or {}).items()},
    }
    chosen = fallback | variables | given
    home = Path(str(chosen["home"][0] if "home" in chosen else _default_home())).expanduser()
    chosen = fallback | _read_file(home / "config.toml") | variables | given
    host, port = _parse_address(*chosen["http"])
    ranks = _parse_ranks(*chosen["ranks"])
    return Settings(home=home, http_host=host, http_port=port, ranks=ranks, model=str(chosen["model"][0]))


def _default_home() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_dir("mlxtp", appauthor=False))


def _read_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        table = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    unknown = sorted(set(table) - set(_FILE_KEYS))
    if unknown:
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(_FILE_KEYS)}")
    return {key: (value, f"{key} in {path}") for key, value in table.items()}


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
    if not host or not 0 <= port <= 65535:
        raise ConfigError(f"{where}: {value!r} is not HOST:PORT, such as {DEFAULT_HTTP}")
    if host not in LOOPBACK:
        raise ConfigError(
            f"{where}: {host} is not this machine's loopback; serving beyond it needs an API key, "
            f"which does not exist yet. Use 127.0.0.1:{port} and a tunnel."
        )
    return host, port
