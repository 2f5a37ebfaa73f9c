"""API keys: those in `keys.json` of a home, and a running agent's access by them.

A key is 256 random bits. Only its SHA-256 is kept, so that a reader of the file cannot use the endpoint. A
slow hash with a salt protects passwords, which can be guessed. It would add nothing here: 2^256 keys cannot
be searched, and no two keys are equal.

    {"version": 1, "keys": [{"name": "laptop", "sha256": "…", "created": 1780000000, "per_minute": 60}]}
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Code, ConfigError, UserError
from ..identity.private_files import FILE_MODE, read_private, write_private
from .request_context import note_key

log = logging.getLogger(__name__)

# --- the file --------------------------------------------------------------------------------------------


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


# --- the keys of a running agent: reloaded when the file changes, with use counts and rate limits --------


_ROUNDING = 1e-6  # tokens by which a sum of floats may be short


class TokenBucket:
    """Limiter to `per_minute` requests a minute on average, and as many at once after an idle minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        """Start full at `now`, in seconds of the clock that later calls use."""
        self._most = float(per_minute)
        self._level = self._most
        self._at = now

    def take(self, now: float) -> float:
        """Take a token and return 0; without one, return the seconds until there is one."""
        rate = self._most / 60
        self._level = min(self._most, self._level + max(now - self._at, 0.0) * rate)
        self._at = max(now, self._at)
        if self._level >= 1 - _ROUNDING:
            self._level -= 1
            return 0.0
        return (1 - self._level) / rate


LOOK_S = 1.0  # Greatest age, in seconds, of the last check of the file when a request arrives.
_CHALLENGE = 'Bearer realm="mlxtp"'
_HOW = "on the Mac that answers here, `mlxtp key create NAME` makes one"


def keys_needed(rule: str, *, beyond: bool, exist: bool) -> bool:
    """Return True where requests have to show a key.

    `rule` is the setting `api_keys`. `beyond`: other machines reach the endpoint. `exist`: there are keys.
    """
    return rule == "always" or (rule == "auto" and (beyond or exist))


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer in place of the route's. `headers` are added to those of every answer."""

    status: int
    code: Code
    message: str
    headers: Mapping[str, str] = field(default_factory=dict)


class KeyRing:
    """Access decisions by the keys of one home, which may have none yet.

    `own_key` is that of this Mac's own commands and opens everything. `clock` and `now` (since 1970) are in
    seconds.
    """

    def __init__(
        self,
        file: KeyFile,
        rule: str,
        *,
        beyond: bool,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Load the keys. Raises ConfigError when they cannot be read."""
        self.own_key = ""
        self._file = file
        self._rule = rule
        self._beyond = beyond
        self._clock = clock
        self._now = now
        self._stamp = file.stamp()
        self._keys = file.load()
        self._problem = ""
        self._looked_at = clock()
        self._buckets: dict[ApiKey, TokenBucket] = {}
        self._used: dict[str, int] = {}

    @property
    def needed(self) -> bool:
        """True while requests have to show a key."""
        exist = bool(self._keys or self._problem)
        return keys_needed(self._rule, beyond=self._beyond, exist=exist)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all valid keys."""
        return tuple(each.name for each in self._keys)

    @property
    def used(self) -> Mapping[str, int]:
        """Time of the last use of each key since this agent started, in seconds since 1970."""
        return self._used

    def refusal(self, given: Sequence[str]) -> Refusal | None:
        """Return the refusal of a request that shows the keys `given`; None to admit it."""
        now = self._clock()
        self._reload(now)
        if not self.needed or self._is_own(given):
            return None
        if self._problem:
            return Refusal(
                503,
                Code.CONFIG,
                "this server cannot read its API keys, so it accepts none; see its log for the cause",
            )
        found = self._find(given)
        return self._unknown(given) if found is None else self._use(found, now)

    def admits(self, given: Sequence[str]) -> bool:
        """Return True where one of `given` is valid or none is needed. Does not count as a use."""
        self._reload(self._clock())
        return not self.needed or self._is_own(given) or self._find(given) is not None

    def _is_own(self, given: Sequence[str]) -> bool:
        return bool(self.own_key) and _among(digest_of(self.own_key), [digest_of(key) for key in given])

    def _find(self, given: Sequence[str]) -> ApiKey | None:
        digests = [digest_of(key) for key in given]
        found = None
        for key in self._keys:  # always all of them, so that the time reveals nothing
            if _among(key.digest, digests):
                found = key
        return found

    def _use(self, key: ApiKey, now: float) -> Refusal | None:
        self._used[key.name] = int(self._now())
        note_key(key.name, key.digest.hex())
        if not key.per_minute:
            return None
        bucket = self._buckets.setdefault(key, TokenBucket(key.per_minute, now))
        if not (wait_s := bucket.take(now)):
            return None
        seconds = math.ceil(wait_s)
        return Refusal(
            429,
            Code.RATE_LIMITED,
            f"the key {key.name} allows {key.per_minute} requests a minute; retry in {seconds} s",
            {"retry-after": str(seconds)},
        )

    def _unknown(self, given: Sequence[str]) -> Refusal:
        challenge = _CHALLENGE
        if not self._keys:
            why = f"this server requires an API key, and there is none yet: {_HOW}"
        elif not given:
            why = (
                "this server requires an API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`; its "
                f"keys begin with {PREFIX}, and {_HOW}"
            )
        else:
            why = f"this API key is not known here, or was revoked; {_HOW}"
            challenge += ', error="invalid_token"'
        return Refusal(401, Code.KEY_INVALID, why, {"www-authenticate": challenge})

    def _reload(self, now: float) -> None:
        """Reload the file if it has changed. If it cannot be read, no key is valid."""
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        try:
            stamp = self._file.stamp()
            if stamp == self._stamp and not self._problem:
                return
            if stamp is None:
                raise ConfigError(
                    f"{self._file.path} is gone, so no API key is valid; restore it, or restart the agent "
                    f"to go on without keys"
                )
            self._keys, self._problem = self._file.load(), ""
            self._stamp = stamp
        except ConfigError as error:
            if error.detail != self._problem:
                log.error("%s", error.detail)
            self._keys, self._problem = (), error.detail
            return
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if key in self._keys}
        self._used = {name: at for name, at in self._used.items() if name in self.names}
        log.info("API keys that count now: %s", ", ".join(self.names) or "none")


def _among(digest: bytes, digests: Sequence[bytes]) -> bool:
    """Constant-time membership test."""
    return sum(hmac.compare_digest(digest, each) for each in digests) > 0
