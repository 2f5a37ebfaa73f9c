"""API keys of a home: the file `keys.json`, access decisions in a running agent, and counts kept on disk.

A key has 256 random bits, too many to guess, so a plain SHA-256 of it is stored and no slow hash is needed.
The agent notices changes of the file within a second. A crash loses the counts of the last half minute.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..errors import Code, ConfigError, UserError, in_words
from ..identity.private_files import FILE_MODE, MAX_BYTES, make_folder, read_private, write_private
from .key_limits import BATCH, CHALLENGE, CHAT, ON_REQUEST, ApiKey, KeyCounts, KeyUse, Refusal, outlived
from .request_context import RequestContext, current, note_key

log = logging.getLogger(__name__)


# --- the file -------------------------------------------------------------------------------------------

#: {"version": 1, "keys": [{"name": "laptop", "sha256": "…", "created": 1780000000, "per_minute": 60}]}
FILE = "keys.json"
LOCK = "keys.lock"
PREFIX = "mlxtp_"
KEY_BYTES = 32
MAX_KEYS = 256
_VERSION = 1
#: Fields written only if they differ from these.
_DEFAULTS = {each.name: each.default for each in fields(ApiKey)[4:]}
_LISTS = ("models", "scopes")
_TEXTS = ("name", "priority")

Stamp = tuple[int, ...]  # changes whenever the file changes


class KeyFile:
    """The keys of one home. Several processes may change them at the same time."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.path = home / FILE

    def stamp(self) -> Stamp | None:
        """Return the version of the file's content; None without a file. Raises ConfigError."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from None
        return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size

    def load(self) -> tuple[ApiKey, ...]:
        """Return all keys, in the order of their creation.

        Raises ConfigError when the file is damaged, or others may read or change it.
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

        `more` are further fields of `ApiKey`. Raises UserError, and ConfigError as `load` does.
        """
        text = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        made = ApiKey(name, digest_of(text), int(now), per_minute, **more)
        if made.problem:
            raise UserError(made.problem)
        with self._changing() as keys:
            if any(each.name == name for each in keys):
                raise UserError(f"there is a key called {name!r}; `mlxtp key revoke {name}` ends it")
            if len(keys) >= MAX_KEYS:
                raise UserError(f"there are {MAX_KEYS} keys, the most possible; revoke an unused one")
            keys.append(made)
        return made, text

    def revoke(self, name: str) -> int:
        """Delete a key. Return the number of keys left. Raises UserError where there is no such key."""
        with self._changing() as keys:
            found = next((each for each in keys if each.name == name), None)
            if found is None:
                known = ", ".join(each.name for each in keys) or "no key at all"
                raise UserError(f"no key is called {name!r:.80}; there is {known}")
            keys.remove(found)
        return len(keys)

    @contextmanager
    def _changing(self) -> Iterator[list[ApiKey]]:
        """Yield the list of keys, then write it with the caller's changes. One process at a time."""
        with in_words(ConfigError, f"--home {self._home}"):
            make_folder(self._home)
            lock = os.fdopen(os.open(self._home / LOCK, os.O_WRONLY | os.O_CREAT, FILE_MODE), "w")
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            keys = list(self.load())
            yield keys
            if len(data := _written(keys)) > MAX_BYTES:
                raise UserError(f"{self.path} would be longer than {MAX_BYTES} bytes; name fewer models")
            write_private(self.path, data)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _parsed(table: Any) -> tuple[ApiKey, ...]:
    if (version := table["version"]) != _VERSION:
        raise ValueError(f"its version is {version!r:.40}, and this mlxtp knows {_VERSION}")
    keys = tuple(map(_key, table["keys"]))
    if len({each.name for each in keys}) != len(keys) or len(keys) > MAX_KEYS:
        raise ValueError("names are not unique, or there are too many")
    return keys


def _key(row: Any) -> ApiKey:
    """Return the key of a row. Refuse unknown fields, because one of them may be a limit."""
    values = {name: row[name] for name in ("name", "created", "per_minute")}
    values |= {name: row[name] for name in _DEFAULTS if name in row}
    if row.keys() - values.keys() - {"sha256"}:
        raise ValueError("a key has fields that this mlxtp does not know")
    for name, value in values.items():
        texts = type(value) is list and all(type(each) is str for each in value)
        if not (texts if name in _LISTS else type(value) is (str if name in _TEXTS else int)):
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
    table = {"version": _VERSION, "keys": [_row(each) for each in keys]}
    return (json.dumps(table, indent=1) + "\n").encode()


def _row(key: ApiKey) -> dict[str, Any]:
    more = {name: getattr(key, name) for name, default in _DEFAULTS.items() if getattr(key, name) != default}
    named = {"name": key.name, "sha256": key.digest.hex(), "created": key.created}
    return {**named, "per_minute": key.per_minute, **more}


# --- keys of a running agent ----------------------------------------------------------------------------

USE_FILE = "key-use.json"
SAVE_S = 30.0  #: Seconds between two writes of the counts while keys are used.
LOOK_S = 1.0  # Greatest age, in seconds, of the last check of the file when a request arrives.
_HOW = "on the Mac that answers here, `mlxtp key create NAME` makes one"


def keys_needed(rule: str, *, beyond: bool, exist: bool) -> bool:
    """Return True if the setting `api_keys` makes requests show a key.

    `beyond`: other machines reach the endpoint. `exist`: there are keys.
    """
    return rule == "always" or (rule == "auto" and (beyond or exist))


class KeyRing:
    """Access decisions based on one home's keys, if it has any.

    `own_key` belongs to this Mac's own commands and opens everything.
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
        self._problem = ""
        self._looked_at = clock()
        self._kept = kept_use(file.path.parent)
        self._uses: dict[ApiKey, KeyUse] = {}
        self._saved = b""
        self._saving = threading.Lock()
        self._hold(file.load())

    @property
    def needed(self) -> bool:
        exist = bool(self._uses or self._problem)
        return keys_needed(self._rule, beyond=self._beyond, exist=exist)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._uses)

    def reports(self) -> list[dict[str, Any]]:
        return [use.summary(self._now()) for use in self._uses.values()]

    def refusal(self, given: Sequence[str], scope: str = CHAT, *, own: bool = True) -> Refusal | None:
        """Return the refusal of a request that shows the keys `given` and needs `scope`; None to admit it.

        `own`: the key of this Mac's own commands counts. A request that may chat is open until `end`.
        """
        now = self._clock()
        self._reload(now)
        if not self.needed or (own and self._is_own(given)):
            return None
        if self._problem:
            words = "this server cannot read its API keys, so it accepts none; see its log for the cause"
            return Refusal(503, Code.CONFIG, words)
        if (use := self._find(given)) is None:
            return self._unknown(given)
        loads, batch = use.key.may(ON_REQUEST), use.key.priority == BATCH
        note_key(use.key.name, use.key.digest.hex(), use.key.models, loads=loads, batch=batch)
        refused, request = use.refusal(scope, now, self._now()), current()
        if refused is None and scope == CHAT and request is not None:
            use.open[request] = None
        return refused

    def end(self, request: RequestContext) -> None:
        for use in self._uses.values():
            if request in use.open:
                use.end(request, self._now())

    def admits(self, given: Sequence[str]) -> bool:
        """Return True if a key in `given` is valid or none is needed. Does not count as a use."""
        self._reload(self._clock())
        if not self.needed or self._is_own(given):
            return True
        use = None if self._problem else self._find(given)
        return use is not None and outlived(use.key, self._now()) is None

    def models_for(self, given: Sequence[str]) -> tuple[str, ...]:
        """Return the models that a client with these keys may use; () for all. Does not count as a use."""
        use = self._find(given) if self.needed else None
        return use.key.models if use is not None else ()

    async def keep(self) -> None:
        """Write the counts periodically, and once more on cancellation."""
        import asyncio

        try:
            while True:
                await asyncio.sleep(SAVE_S)
                await asyncio.to_thread(self._save, self._counts())
        finally:
            self._save(self._counts())

    def _counts(self) -> bytes:
        rows = {use.key.digest.hex(): asdict(use.counts) for use in self._uses.values()}
        return (json.dumps({"version": 1, "keys": rows}) + "\n").encode()

    def _save(self, counts: bytes) -> None:
        if counts == self._saved or not self._uses:
            return
        try:
            with self._saving:
                write_private(self._file.path.parent / USE_FILE, counts)
            self._saved = counts
        except ConfigError as error:
            log.error("the use of API keys is not kept: %s", error.detail)

    def _is_own(self, given: Sequence[str]) -> bool:
        return bool(self.own_key) and _among(digest_of(self.own_key), [digest_of(key) for key in given])

    def _find(self, given: Sequence[str]) -> KeyUse | None:
        digests = [digest_of(key) for key in given]
        found = None
        for use in self._uses.values():  # never stops early: the time would reveal a match
            if _among(use.key.digest, digests):
                found = use
        return found

    def _unknown(self, given: Sequence[str]) -> Refusal:
        challenge = CHALLENGE
        if not self._uses:
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

    def _hold(self, keys: Sequence[ApiKey]) -> None:
        clock, kept, before = self._clock(), self._kept, self._uses
        kept |= {use.key.digest.hex(): use.counts for use in before.values()}
        for gone in kept.keys() - {key.digest.hex() for key in keys}:
            del kept[gone]
        fresh = {key: KeyUse(key, kept.get(key.digest.hex()) or KeyCounts(), clock) for key in keys}
        self._uses = {key: before.get(key, use) for key, use in fresh.items()}

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
            self._hold(self._file.load())
            self._problem, self._stamp = "", stamp
        except ConfigError as error:
            if error.detail != self._problem:
                log.error("%s", error.detail)
            self._problem = error.detail
            return
        log.info("API keys that count now: %s", ", ".join(self.names) or "none")


def kept_use(home: Path) -> dict[str, KeyCounts]:
    """Return a home's saved counts, by the hash of each key in hexadecimal digits.

    A file that is damaged or open to other users counts as empty.
    """
    try:
        data = read_private(home / USE_FILE)
        rows = json.loads(data)["keys"] if data is not None else {}
        found = {digest: KeyCounts(**row) for digest, row in rows.items()}
        if any(
            type(count) is not int or count < 0 for each in found.values() for count in asdict(each).values()
        ):
            raise ValueError("a count is no number")
        return found
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s does not count, so the use of API keys begins again: %s", home / USE_FILE, error)
        return {}


def _among(digest: bytes, digests: Sequence[bytes]) -> bool:
    return sum(hmac.compare_digest(digest, each) for each in digests) > 0  # in constant time
