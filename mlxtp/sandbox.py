"""Sandbox of a rank process on macOS: `sandbox-exec` with a profile in SBPL, the language of such profiles.

Written from documentation and from published profiles, not run on a Mac. Apple calls `sandbox-exec`
deprecated and documents no SBPL. macOS, browsers and build tools rely on both all the same.

Folders reach a profile as parameters (`-D NAME=FOLDER`) and never as text, so no name can add a rule.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import ConfigError

PROGRAM = "/usr/bin/sandbox-exec"
SETTING = "sandbox_ranks"
#: Advice where a sandboxed process fails before it serves.
HINT = (
    "Its process is in a sandbox, which may have refused something that it needs: try `mlxtp node "
    "--no-sandbox-ranks`, or sandbox_ranks = false in config.toml"
)

#: Folders with code of macOS and of package managers. They hold nothing of a user.
SYSTEM = ("/System", "/usr", "/bin", "/Library/Apple", "/Library/Frameworks", "/opt/homebrew")

#: Connections of a rank: none for one alone, loopback for ranks of one Mac.
Reach = Literal["none", "loopback", "network"]

# Rules match real paths. system.sb has what Apple's libraries need in each process. Of the GPU, MLX opens
# these two user clients; macOS before 26 compiles kernels in a service.
_BASE = """(version 1)
(deny default)
(import "system.sb")
(allow process-fork)
(allow process-info* (target same-sandbox))
(allow signal (target same-sandbox))
(allow sysctl-read)
(allow file-read* (literal "/dev/null") (literal "/dev/random") (literal "/dev/urandom"))
(allow file-write-data (literal "/dev/null"))
(allow iokit-open
  (iokit-registry-entry-class "AGXDeviceUserClient")
  (iokit-registry-entry-class "IOSurfaceRootUserClient"))
(allow mach-lookup (xpc-service-name "com.apple.MTLCompilerService"))
"""
#: Assumed: Apple documents no name. These are of the drivers' own classes.
_RDMA = """(allow iokit-open
  (iokit-registry-entry-class-prefix "IORDMA")
  (iokit-registry-entry-class-prefix "AppleThunderboltRDMA"))
"""
# A host is localhost, which stands for all addresses of this Mac, or *. One rule for both directions would
# admit more: each outgoing connection has a local end, too.
_REACH: dict[Reach, str] = {
    "none": "",
    "loopback": """(allow system-socket)
(allow network-outbound (remote ip "localhost:*"))
(allow network-bind network-inbound (local ip "localhost:*"))
""",
    "network": """(allow system-socket)
(allow network-outbound (remote tcp "*:*"))
(allow network-bind network-inbound (local tcp "*:*"))
""",
}


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Sandbox of one rank. `folder` is that of its epoch: its home, and the one for temporary files.

    `reads` and `writes` are further files and folders; no link in them leads out. `rdma`: it uses JACCL.
    """

    folder: Path
    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    reach: Reach = "none"
    rdma: bool = False

    def command(self) -> list[str]:
        """Return the command before that of the process. Reads links."""
        rules = (
            ("process-exec*", _real((sys.prefix, sys.base_prefix))),
            ("file-read* file-map-executable", _real(libraries())),
            ("file-read*", _real(map(_with_blobs, self.reads))),
            ("file-read* file-write*", _real((self.folder, *self.writes))),
        )
        return [PROGRAM, *arguments(rules, self.reach, rdma=self.rdma)]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that keep the process's libraries out of the user's home."""
        folder = str(self.folder)
        return dict.fromkeys(("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME"), folder) | {
            "PYTHONUSERBASE": site.getuserbase()
        }


def arguments(rules: Sequence[tuple[str, Sequence[str]]], reach: Reach, *, rdma: bool) -> list[str]:
    """Return the arguments of `sandbox-exec`. A rule allows operations below its paths, which are real ones.

    The folders above these may be looked up.
    """
    above = sorted({parent for _, paths in rules for path in paths for parent in _above(path)})
    allowed = [*((f"(allow {what}", "subpath", paths) for what, paths in rules)]
    allowed.append(("(allow file-read-metadata", "literal", above))
    text = [_BASE, _RDMA if rdma else "", _REACH[reach]]
    values: list[str] = []
    for begin, kind, paths in allowed:
        if paths:
            names = [f"P{len(values) + at}" for at in range(len(paths))]
            text.append(begin + "".join(f'\n  ({kind} (param "{name}"))' for name in names) + ")\n")
            values += paths
    defined = [each for at, path in enumerate(values) for each in ("-D", f"P{at}={path}")]
    return ["-p", "".join(text), *defined]


def libraries() -> tuple[str, ...]:
    """Return the folders with this Python, its packages, and what they are linked with."""
    paths = sysconfig.get_paths()
    packages = (paths["stdlib"], paths["purelib"], paths["platlib"], site.getusersitepackages())
    return (*SYSTEM, sys.prefix, sys.base_prefix, *packages, str(Path(__file__).parents[1]))


def check(wanted: bool, where: str) -> None:
    """Check that ranks can have a sandbox here, if they are to. `where` is the place of the setting.

    Raises ConfigError.
    """
    if wanted and not os.access(PROGRAM, os.X_OK):
        raise ConfigError(
            f"{where or SETTING}: ranks have a sandbox on macOS only, and here is no {PROGRAM}; use "
            "--no-sandbox-ranks, or sandbox_ranks = false in config.toml"
        )


def _with_blobs(path: Path) -> Path:
    """Return a model's folder with the files to which a snapshot in the Hub's cache links; else `path`."""
    whole = path.parent.parent
    return whole if path.parent.name == "snapshots" and whole.name.startswith("models--") else path


def _real(paths: Iterable[Path | str]) -> list[str]:
    """Return the real paths, without those that are below another one."""
    found = sorted({os.path.realpath(path) for path in paths})
    return [path for path in found if not any(parent in found for parent in _above(path))]


def _above(path: str) -> list[str]:
    return [str(parent) for parent in Path(path).parents]
