"""Parsers of single settings' values, from a flag, a variable or the file, and words for them. Pure.

`value` is a string or a TOML value. `where` is its place in a ConfigError. Any parser may raise one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError

#: Takes a value and its place. Raises ConfigError.
Parser = Callable[[Any, str], Any]

DEFAULT_HTTP = "127.0.0.1:52415"
DEFAULT_CONTROL_PORT = 52414
MAX_PORT = 65535
MAX_NAME = 80
MAX_NODES = 8
MAX_LAYERS = 1024
MAX_RANKS = 4
KV_BITS = (0, 4, 8)
MAX_CONTEXT = 1 << 24
MAX_BYTES = 1 << 50
MAX_SECONDS = 86_400


def _wrong(where: str, value: object, what: str) -> ConfigError:
    return ConfigError(f"{where}: {value!r} {what}")


def is_loopback(host: str) -> bool:
    """Return True if only programs of this machine reach an address or name, such as localhost."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_host_name(text: str) -> bool:
    return bool(_HOST_NAME.fullmatch(text))


_HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")


def parse_ranks(value: object, where: str) -> int:
    if not (ranks := _decimal(str(value).strip(), MAX_RANKS)):
        raise ConfigError(f"{where}: one machine runs 1 to {MAX_RANKS} ranks, not {value}")
    return ranks


def parse_address(value: object, where: str) -> tuple[str, int]:
    host, _, port_text = str(value).rpartition(":")
    host = host.strip("[]")
    port = _decimal(port_text.strip(), MAX_PORT)
    if port is None or not (_is_address(host) or is_host_name(host.lower())):
        raise _wrong(where, value, f"is not HOST:PORT, such as {DEFAULT_HTTP}")
    return host, port


def parse_model(value: object, where: str) -> str:
    if not str(value).isprintable():
        flaw = (
            "has characters that cannot be printed, which no model's name has; write a folder or OWNER/NAME"
        )
        raise _wrong(where, value, flaw)
    return str(value)


def one_of(*choices: str) -> Parser:

    def parse(value: object, where: str) -> str:
        if value not in choices:
            raise _wrong(where, value, f"is not one of {', '.join(choices)}")
        return str(value)

    return parse


def up_to(most: int, what: str = "a whole number from 0") -> Parser:
    """Return a parser of whole numbers from 0 to `most`. `what` names them in errors."""

    def parse(value: object, where: str) -> int:
        if (number := _decimal(str(value).replace("_", ""), most)) is None:
            raise _wrong(where, value, f"is not {what} to {most}")
        return number

    return parse


def expanded(path: object, where: str) -> Path:
    """Expand ~ in a path. Raises ConfigError for text that cannot be a path."""
    text = str(path)
    if "\0" in text:
        raise _wrong(where, text, "has a zero character; no path can have one")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        problem = (
            f"{where}: {text!r}: this machine has no user {text.partition('/')[0]}; write the whole path"
        )
        raise ConfigError(problem) from None


def parse_path(value: object, where: str) -> str:
    return str(expanded(value, where)) if str(value) else ""


_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@\s]+)/?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def each_of(parse: Callable[[str, str], str]) -> Parser:
    """Return a parser of a table, a list, or a string with commas. `parse` parses each item."""

    def parse_all(value: object, where: str) -> tuple[str, ...]:
        if isinstance(value, dict):
            value = [f"{name}={text}" for name, text in value.items()]
        items = value if isinstance(value, (list, tuple)) else str(value).split(",")
        return tuple(parse(item.strip(), where) for item in items if item.strip())

    return parse_all


def parse_host(item: str, where: str) -> str:
    host = item.lower().removeprefix("[").removesuffix("]")
    if host != "*" and not is_host_name(host) and not _is_address(host):
        form = "a name or address of this Mac, such as studio.local; omit http:// and the port"
        raise _wrong(where, item, f"is not {form}, or write * for any")
    return host


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def parse_origin(item: str, where: str) -> str:
    if item == "*":
        return item
    if (match := _ORIGIN.fullmatch(item.lower())) is None:
        form = "an origin, such as http://localhost:3000: scheme, host, port of the page, without a path"
        raise _wrong(where, item, f"is not {form}; or write * for any")
    # Browsers omit a scheme's default port.
    return f"{match[1]}://{match[2].removesuffix(_DEFAULT_PORTS.get(match[1], '/'))}"


def parse_name(value: object, where: str) -> str:
    text = str(value).strip(" ")
    if len(text) > MAX_NAME or not text.isprintable():
        raise _wrong(where, value, f"is not a name of at most {MAX_NAME} printable characters")
    return text


def parse_host_port(value: object, where: str) -> tuple[str, int]:
    """Parse an IPv4 address and a port, such as 10.0.0.1:52414. MLX's ring supports only IPv4."""
    host, _, port_text = str(value).rpartition(":")
    try:
        address = str(ipaddress.IPv4Address(host or str(value)))
    except ValueError:
        raise _wrong(where, host or value, "is not an IPv4 address, such as 10.0.0.1") from None
    if (port := _decimal(port_text, MAX_PORT)) is None:
        raise _wrong(where, value, f"is not ADDRESS:PORT, such as 10.0.0.1:{DEFAULT_CONTROL_PORT}")
    return address, port


def parse_peer(item: str, where: str) -> str:
    """Parse an agent's address. Names are resolved when dialed."""
    host, colon, port = item.rpartition(":")
    if not colon:
        host, port = item, str(DEFAULT_CONTROL_PORT)
    if not re.fullmatch(r"[^\s,/]+", host) or not _decimal(port, MAX_PORT):  # such as http://HOST:PORT
        raise _wrong(where, item, f"is not HOST:PORT, such as 10.0.0.2:{DEFAULT_CONTROL_PORT}")
    return f"{host}:{port}"


def parse_folder(item: str, where: str) -> str:
    """Parse an absolute folder, because an agent may be started anywhere."""
    folder = expanded(item, where)
    if not folder.is_absolute():
        raise _wrong(where, str(folder), "is not an absolute path, such as /Volumes/share/models")
    return str(folder)


def parse_rdma(item: str, where: str) -> str:
    who, equals, device = item.partition("=")
    node, slash, peer = who.partition("/")
    if not (node and equals and device) or bool(slash) != bool(peer) or "=" in device:
        raise _wrong(where, item, "is not NODE=DEVICE, such as studio-1=rdma_en5")
    return item


def parse_nodes(value: object, where: str) -> str:
    return _count(value, where, MAX_NODES, "auto", "all")


def _count(value: object, where: str, most: int, *words: str) -> str:
    if (text := str(value)) in words:
        return text
    if not (count := _decimal(text, most)):
        raise _wrong(where, value, f"is not {', '.join(words)}, or a number from 1 to {most}")
    return str(count)


def parse_split(value: object, where: str) -> str:
    text = str(value).strip()
    if text == "auto":
        return text
    layers = [_decimal(part.strip(), MAX_LAYERS) for part in text.split(",")]
    if not 2 <= len(layers) <= MAX_NODES or not all(layers):
        raise _wrong(where, value, f"is not auto, nor the layers of 2 to {MAX_NODES} Macs, such as 40,24,16")
    return ",".join(map(str, layers))


def split_layers(split: str, parallel: str, nodes: str) -> tuple[int, ...]:
    """Return the layers per Mac in `split`; () for "auto". Raises ConfigError for conflicting options."""
    if split == "auto":
        if parallel == "pipeline" and nodes == "1":
            raise ConfigError("--parallel pipeline takes 2 Macs or more, and 1 is to serve the model")
        return ()
    layers = tuple(map(int, parse_split(split, "--split").split(",")))
    if parallel == "tensor":
        raise ConfigError(
            f"--split {split} is for a pipeline, and --parallel is tensor: each Mac has a part of each layer"
        )
    if nodes not in ("auto", "all", str(len(layers))):
        raise ConfigError(f"--split {split} is for {len(layers)} Macs, and {nodes} are to share the model")
    return layers


def stage_words(split: Sequence[int]) -> str:
    return f"pipeline of {' + '.join(map(str, split))} layers" if split else ""


def parse_replicas(value: object, where: str) -> int:
    """Parse a number of groups: 1 to 64, or 0 for "all"."""
    return int(_count(value, where, MAX_REPLICAS, "all").replace("all", "0"))


def parse_macs(value: object, where: str) -> tuple[str, ...]:
    """Parse names of Macs, separated by commas; () for "any"."""
    text, form = str(value), "give names such as studio,mini, or any"
    names = tuple(name.strip() for name in text.split(","))
    if not any(names):
        raise _wrong(where, text, f"names no Mac; {form}")
    if not all(names):
        raise _wrong(where, text, f"has an empty name; {form}")
    if names == ("any",):
        return ()
    if "any" in names:
        raise ConfigError(f"{where}: any stands for all Macs, so it stands alone; {form}")
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise _wrong(where, text, f"has {twice} twice; name each Mac once")
    return names


def parse_keep(value: object, where: str) -> int:
    """Parse the seconds that an unused model stays; -1 for "forever"."""
    text = str(value).strip().lower()
    if text in ("forever", "-1"):
        return -1
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text)
    seconds = float(match[1]) * _TIMES[match[2]] if match is not None else MAX_KEEP_S + 1.0
    if seconds > MAX_KEEP_S:
        raise _wrong(where, value, "is not forever, or a time up to 365 days, such as 10m or 2h")
    return int(seconds)


MAX_REPLICAS = 64
MAX_KEEP_S = 365 * 86_400
_TIMES = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def _decimal(text: str, most: int) -> int | None:
    """Return the number from 0 to `most` in a text of any length; None if it is no such number."""
    digits = text.lstrip("0") if text.isascii() and text.isdecimal() else None
    if digits is None or len(digits) > len(str(most)):
        return None
    number = int(digits or "0")
    return number if number <= most else None


_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_switch(value: object, where: str) -> bool:
    word = str(value).lower()
    if word not in (*_YES, *_NO):
        raise _wrong(where, value, "is neither true nor false")
    return word in _YES


def parse_kv_bits(value: object, where: str) -> int:
    if str(value) not in map(str, KV_BITS):
        raise _wrong(where, value, f"is not one of {', '.join(map(str, KV_BITS))} (0: not quantized)")
    return int(str(value))


parse_tokens = up_to(MAX_CONTEXT, "a number of tokens from 0 (the model's own)")


def parse_seconds(value: object, where: str) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise _wrong(where, value, f"is not a time from 0 to {MAX_SECONDS} seconds")
    return seconds


def parse_limit(value: object, where: str) -> float:
    """Parse a time of at least a second: less is never enough."""
    if (seconds := parse_seconds(value, where)) < 1:
        raise _wrong(where, value, f"is not a time from 1 to {MAX_SECONDS} seconds")
    return seconds


_UNITS = {
    **{"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40},
}


def parse_bytes(value: object, where: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)?", str(value).strip().upper())
    if match is None:
        raise _wrong(where, value, "is not a number of bytes, such as 500MB or 1.5GiB")
    size = float(match[1]) * _UNITS[match[2] or ""]
    if size > MAX_BYTES:
        raise _wrong(where, value, f"is more than any machine has; {MAX_BYTES >> 40}TiB is the most")
    return int(size)
