"""API keys of a home, in its `keys.json`.

A key is 256 random bits. Only its SHA-256 is kept, so that a reader of the file cannot use the endpoint. A
slow hash with a salt protects passwords, which can be guessed. It would add nothing here: 2^256 keys cannot
be searched, and no two keys are equal.

    {"version": 1, "keys": [{"name": "laptop", "sha256": "…", "created": 1780000000, "per_minute": 60}]}

Version 2 has fields of `key_limits.ApiKey` that differ from their defaults. Earlier mlxtp, which would not
heed such limits, does not read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UserError
from ..identity.private_files import FILE_MODE, MAX_BYTES, read_private, write_private
from .key_limits import ApiKey

FILE = "keys.json"
LOCK = "keys.lock"
PREFIX = "mlxtp_"
KEY_BYTES = 32
MAX_KEYS = 256
_VERSION = 2
#: Fields that a file of version 1 does not have, with their defaults, which are not written.
_LATER = {each.name: each.default for each in fields(ApiKey)[4:]}
_LISTS = ("models", "scopes")

Stamp = tuple[int, ...]  # changes whenever the file changes


class KeyFile:
    """The keys of one home. Several processes may change them at the same time."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.path = home / FILE

    def stamp(self) -> Stamp | None:
        """Return the version of the file's content; None where there is no file. Raises ConfigError."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from None
        return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size

    def load(self) -> tuple[ApiKey, ...]:
        """Return all keys, in the order of their creation.

        Raises ConfigError, with the remedy, when the file is damaged, or others may read or change it.
        """
        data = read_private(self.path, if_read="revoke its keys and make new ones")
        if data is None:
            return ()
        try:
            return _parsed(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self.path} is damaged ({type(error).__name__}: {error!s:.100}), so no API key counts; "
                f"restore it from a backup, or remove it and make new keys with `mlxtp key create`"
            ) from None

    def create(self, name: str, per_minute: int, now: float, **more: Any) -> tuple[ApiKey, str]:
        """Create a key. Return it and its secret text, which is stored nowhere. `now` in seconds since 1970.

        `more` are further fields of `ApiKey`. Raises UserError for a name that is taken, and for a field that
        no key can have, and ConfigError as `load` does.
        """
        text = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        made = ApiKey(name, digest_of(text), int(now), per_minute, **more)
        if made.problem:
            raise UserError(made.problem)
        with self._changing() as keys:
            if any(each.name == name for each in keys):
                raise UserError(f"there is a key called {name!r}; `mlxtp key revoke {name}` ends it")
            if len(keys) >= MAX_KEYS:
                raise UserError(f"there are {MAX_KEYS} keys, the most possible; revoke one that is unused")
            keys.append(made)
        return made, text

    def revoke(self, name: str) -> int:
        """Delete a key. Return the number of keys left. Raises UserError where there is no such key."""
        with self._changing() as keys:
            left = [each for each in keys if each.name != name]
            if len(left) == len(keys):
                known = ", ".join(each.name for each in keys) or "no key at all"
                raise UserError(f"no key is called {name!r:.80}; there is {known}")
            keys[:] = left
        return len(left)

    @contextmanager
    def _changing(self) -> Iterator[list[ApiKey]]:
        """Yield the list of keys, then write it with the caller's changes. One process at a time."""
        try:
            self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.fdopen(os.open(self._home / LOCK, os.O_WRONLY | os.O_CREAT, FILE_MODE), "w")
        except OSError as error:
            raise ConfigError(f"--home {self._home}: {error.strerror or error}") from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = list(self.load())
            yield keys
            if len(data := _written(keys)) > MAX_BYTES:
                raise UserError(f"{self.path} would be longer than {MAX_BYTES} bytes; name fewer models")
            write_private(self.path, data)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, the only part of it that is stored."""
    return hashlib.sha256(key.encode()).digest()


def _parsed(table: Any) -> tuple[ApiKey, ...]:
    version = table["version"]
    if version not in (1, _VERSION):
        raise ValueError(f"its version is {version!r:.40}, and this mlxtp knows {_VERSION}")
    keys = tuple(_key(row, strict=version > 1) for row in table["keys"])
    if len({each.name for each in keys}) != len(keys) or len(keys) > MAX_KEYS:
        raise ValueError("names are not unique, or there are too many")
    return keys


def _key(row: Any, *, strict: bool) -> ApiKey:
    """Return the key of a row. `strict`: what is not known may be a limit, so it is refused."""
    values = {name: row[name] for name in ("name", "created", "per_minute")}
    values |= {name: row[name] for name in _LATER if name in row}
    if strict and row.keys() - values.keys() - {"sha256"}:
        raise ValueError("a key has fields that this mlxtp does not know")
    for name, value in values.items():
        texts = type(value) is list and all(type(each) is str for each in value)
        if not (texts if name in _LISTS else type(value) is (str if name == "name" else int)):
            raise TypeError("a field of a key is of the wrong type")
    digest = bytes.fromhex(row["sha256"])
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("a hash has the wrong length")
    lists = {name: tuple(values[name]) for name in _LISTS if name in values}
    key = ApiKey(digest=digest, **(values | lists))
    if key.problem or not 0 <= key.created < 1 << 32 or not 0 <= key.expires < 1 << 33:
        raise ValueError("a field of a key is not what mlxtp writes")
    return key


def _written(keys: list[ApiKey]) -> bytes:
    """Return the file's content: of version 1, which earlier mlxtp reads, unless a key has later fields."""
    rows = [_row(each) for each in keys]
    version = _VERSION if any(name in row for row in rows for name in _LATER) else 1
    return (json.dumps({"version": version, "keys": rows}, indent=1) + "\n").encode()


def _row(key: ApiKey) -> dict[str, Any]:
    later = {name: getattr(key, name) for name, default in _LATER.items() if getattr(key, name) != default}
    named = {"name": key.name, "sha256": key.digest.hex(), "created": key.created}
    return {**named, "per_minute": key.per_minute, **later}
