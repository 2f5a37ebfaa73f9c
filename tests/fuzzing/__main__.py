"""`make fuzz`: feeds every target inputs that reach new code, and keeps each one that breaks it.

The search is libFuzzer's, by way of atheris, which `make fuzz` installs; there is none for macOS. What it
learned stays in build/fuzz; what it found goes into the folder `corpus` beside this file; tests replay it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

_LEARNED = Path("build/fuzz")
_CORPUS = Path(__file__).with_name("corpus")
_MAX_BYTES = 4096
_SLOW_S = 10
_MAX_MB = 2048
_WORD = re.compile(rb'"?[A-Za-z_]{2,30}"?|[0-9.]{1,20}|[][{}:,=]')
_MAX_WORDS = 500
_BROKEN = "broken by "


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all of them unless some are named")
    args = parser.parse_args()
    if args.here:
        search(args.targets[0], args.seconds)
        return
    from .targets import TARGETS

    if unknown := set(args.targets) - TARGETS.keys():
        parser.error(f"no target is called {min(unknown)}; there are {', '.join(TARGETS)}")
    print(f"{'target':18}{'executions':>12}{'edges':>8}{'memory':>10}  found", flush=True)
    outcomes = [outcome(name, args.seconds) for name in args.targets or TARGETS]
    sys.exit(0 if all(outcomes) else 1)


def outcome(name: str, seconds: int) -> bool:
    """Searches in a process of its own, prints a line, and says whether nothing was found."""
    corpus = _CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzzing", "--here", "--seconds", str(seconds), name]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    said = done.stdout.decode(errors="replace")
    executions = re.findall(r"number_of_executed_units:\s*(\d+)", said) or ["?"]
    edges = re.findall(r" cov: (\d+)", said) or ["?"]
    memory = re.findall(r"peak_rss_mb:\s*(\d+)", said) or ["?"]
    if not any(corpus.iterdir()):
        corpus.rmdir()
    found = re.findall(rf"^{_BROKEN}(.*)$", said, re.MULTILINE)
    print(f"{name:18}{executions[-1]:>12}{edges[-1]:>8}{memory[-1]:>7} MB  {len(found)}", flush=True)
    for each in found:
        print(f"    {each}")
    if done.returncode:
        print("\n".join(said.splitlines()[-20:]))
    return not found and done.returncode == 0


def search(name: str, seconds: int) -> None:
    """Never returns: libFuzzer ends the process when the time is over."""
    import atheris

    with atheris.instrument_imports(include=["mlxtp"]):
        from .targets import TARGETS
    target, seen = TARGETS[name], set()
    learned, corpus = _LEARNED / name, _CORPUS / name
    learned.mkdir(parents=True, exist_ok=True)
    for seed in (*target.seeds, *(path.read_bytes() for path in corpus.glob("*"))):
        (learned / hashlib.sha1(seed).hexdigest()).write_bytes(seed)

    def once(data: bytes) -> None:
        error = target.broken_by(data)
        if error is None:
            return
        where = traceback.extract_tb(error.__traceback__)[-1]
        if (key := (type(error), where.filename, where.lineno)) in seen:
            return
        seen.add(key)
        file = corpus / f"{type(error).__name__}-{hashlib.sha1(data).hexdigest()[:8]}"
        file.write_bytes(data)
        place = f"{Path(where.filename).name}:{where.lineno}"
        print(f"\n{_BROKEN}{file.name}: {type(error).__name__} at {place}: {error!s:.200}", flush=True)

    words = learned.with_suffix(".words")
    words.write_text("".join(f'"{word}"\n' for word in vocabulary(target.seeds)))
    options = {
        "dict": words,
        "max_total_time": seconds,
        "max_len": _MAX_BYTES,
        "timeout": _SLOW_S,
        "rss_limit_mb": _MAX_MB,
        "print_final_stats": 1,
        "artifact_prefix": f"{corpus}/",
    }
    atheris.Setup([name, *(f"-{key}={value}" for key, value in options.items()), str(learned)], once)
    atheris.Fuzz()


def vocabulary(seeds: Iterable[bytes]) -> list[str]:
    """Words of the seeds, to be put in anywhere, as libFuzzer's dictionaries have them: bytes in hex."""
    found = {b"\0", *(word for seed in seeds for word in _WORD.findall(seed))}  # an empty one is refused
    return sorted("".join(f"\\x{byte:02x}" for byte in word) for word in found)[:_MAX_WORDS]


if __name__ == "__main__":
    main()
