"""The API keys of one agent, in `keys.json` of its home.

A key is 256 random bits. Only its SHA-256 is kept, so that a reader of the file cannot use the endpoint. A
slow hash with a salt protects passwords, which can be guessed. It would add nothing here: 2^256 keys cannot
be searched, and no two keys are equal.

    {"version": 1, "keys": [{"name": "laptop", "sha256": "…", "created": 1780000000, "per_minute": 60}]}
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UserError
from ..identity.private_files import FILE_MODE, read_private, write_private

FILE = "keys.json"
LOCK = "keys.lock"
PREFIX = "mlxtp_"
KEY_BYTES = 32
MAX_KEYS = 256
MAX_PER_MINUTE = 1_000_000
_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Stamp = tuple[int, ...]  # changes whenever the file changes


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Stored record of a key. `created` in seconds since 1970; `per_minute` requests, 0 for any number."""

    name: str
    digest: bytes = field(repr=False)
    created: int
    per_minute: int = 0


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

    def create(self, name: str, per_minute: int, now: float) -> tuple[ApiKey, str]:
        """Create a key. Return it and its secret text, which is stored nowhere. `now` in seconds since 1970.

        Raises UserError for a name that is taken or invalid, and ConfigError as `load` does.
        """
        check_name(name)
        text = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        made = ApiKey(name, digest_of(text), int(now), check_rate(per_minute))
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
            write_private(self.path, _written(keys))


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key, the only part of it that is stored."""
    return hashlib.sha256(key.encode()).digest()


def check_name(name: str) -> None:
    """Raise UserError for an invalid name of a key."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r:.80} cannot be the name of a key; take up to 64 letters, digits, dots, dashes or "
            f"underscores, such as laptop"
        )


def check_rate(per_minute: int) -> int:
    """Return the number unchanged. Raises UserError for an invalid number of requests per minute."""
    if not 0 <= per_minute <= MAX_PER_MINUTE:
        raise UserError(
            f"--per-minute {per_minute}: a key has from 1 to {MAX_PER_MINUTE} requests a minute, or 0 for "
            f"any number"
        )
    return per_minute


def _parsed(table: Any) -> tuple[ApiKey, ...]:
    if table["version"] != _VERSION:
        raise ValueError(f"its version is {table['version']!r:.40}, and this mlxtp knows {_VERSION}")
    keys = tuple(map(_key, table["keys"]))
    if len({each.name for each in keys}) != len(keys) or len(keys) > MAX_KEYS:
        raise ValueError("names are not unique, or there are too many")
    return keys


def _key(fields: Any) -> ApiKey:
    name, created, per_minute = fields["name"], fields["created"], fields["per_minute"]
    if type(name) is not str or type(created) is not int or type(per_minute) is not int:
        raise TypeError("a field of a key is of the wrong type")
    if not _NAME.fullmatch(name) or not 0 <= per_minute <= MAX_PER_MINUTE or not 0 <= created < 1 << 32:
        raise ValueError("a field of a key is not what mlxtp writes")
    digest = bytes.fromhex(fields["sha256"])
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("a hash has the wrong length")
    return ApiKey(name, digest, created, per_minute)


def _written(keys: list[ApiKey]) -> bytes:
    rows = [
        {
            "name": each.name,
            "sha256": each.digest.hex(),
            "created": each.created,
            "per_minute": each.per_minute,
        }
        for each in keys
    ]
    return (json.dumps({"version": _VERSION, "keys": rows}, indent=1) + "\n").encode()
