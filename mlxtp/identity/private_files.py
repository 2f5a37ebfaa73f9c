"""Files that only their owner may read. After a crash each has its old content or its new one."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import ConfigError, UserError, in_words

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_OTHERS, _WRITERS, _ENTERERS = 0o077, 0o022, 0o011
MAX_BYTES = 1 << 20


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents, closed to other users. Raises OSError."""
    for each in (*reversed([above for above in folder.parents if not above.exists()]), folder):
        each.mkdir(FOLDER_MODE, exist_ok=True)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder that is removed when the context ends. Raises UserError if no disk has room."""
    try:
        made = TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise UserError(
            f"a temporary folder cannot be made: {error.strerror}; free space there, or set TMPDIR to a "
            "folder on a disk that has some"
        ) from None
    with made as folder:
        yield Path(folder)


def check_home(home: Path, inside: Sequence[str]) -> None:
    """Raise ConfigError with a remedy if other users can write to a home, or to its parts `inside`.

    In a home that no other user can enter, an open part is closed instead. No part may be a link.
    """
    above = home.stat()
    for path in (home, *(home / name for name in inside)):
        try:
            status = above if path is home else path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(status.st_mode):
            raise ConfigError(f"{path} is a link, which leads out of the home; move it away")
        _check_owner(path, status)
        if not status.st_mode & _WRITERS:
            continue
        if path is home or above.st_mode & _ENTERERS:
            raise ConfigError(
                f"{path} can be changed by other users of this machine (mode "
                f"{stat.S_IMODE(status.st_mode):04o}), who could replace what mlxtp keeps there; if none "
                f"has, run: chmod go-w '{path}'"
            )
        path.chmod(status.st_mode & ~_OTHERS)


def make_private_folder(folder: Path) -> None:
    """Create `folder` if it is missing. Raises ConfigError as `check_private_folder` does."""
    with in_words(ConfigError, f"{folder} cannot be made"):
        make_folder(folder)
    check_private_folder(folder)


def check_private_folder(folder: Path) -> None:
    """Raise ConfigError with a remedy if other users may read `folder`, or it is not our folder."""
    with in_words(ConfigError, f"{folder} cannot be read"):
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is not a folder; move it away")
    _check_owner(folder, status)
    if status.st_mode & _OTHERS:
        raise ConfigError(
            f"{folder} is open to other users of this Mac (mode {stat.S_IMODE(status.st_mode):04o}, should "
            f"be {FOLDER_MODE:04o}); run: chmod {FOLDER_MODE:o} '{folder}'"
        )


def read_private(path: Path, if_read: str = "remove this Mac from its cluster") -> bytes | None:
    """Return the content of a file that no other user may read; None if it does not exist.

    Raises ConfigError otherwise. `if_read`: advice in case another user has read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a file; move it away")
        _check_owner(path, status)
        check_closed(path, status, if_read)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_BYTES} bytes, which mlxtp never writes")
    return data


def write_private(path: Path, data: bytes) -> None:
    with in_words(ConfigError, f"{path} cannot be written"):
        write_whole(path, data)


def write_whole(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Write the whole file to the disk, or leave it as it was. Raises OSError. One writer at a time.

    Two flushes are needed: one, so that the new name never lacks its content, and one for the name. After a
    crash `.NAME.new` may be left, which the next write replaces.
    """
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            to_disk(descriptor)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        to_disk(descriptor)
    finally:
        os.close(descriptor)


def to_disk(descriptor: int) -> None:
    """Flush written data to the disk itself. Raises OSError.

    On macOS `fsync` may leave data in the drive's cache. F_FULLFSYNC does not, but some file systems lack it.
    """
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(descriptor, full)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(descriptor)


def _check_owner(path: Path, status: os.stat_result) -> None:
    user = os.geteuid()
    if user not in (0, status.st_uid):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, and this is user {user}; run mlxtp as that user, or "
            f"with another --home"
        )


def check_closed(path: Path, status: os.stat_result, if_read: str) -> None:
    if status.st_mode & _OTHERS:
        raise ConfigError(
            f"{path} can be read or changed by other users of this Mac (mode "
            f"{stat.S_IMODE(status.st_mode):04o}, should be {FILE_MODE:04o}); if one of them may have "
            f"read it, {if_read}; otherwise run: chmod {FILE_MODE:o} '{path}'"
        )
