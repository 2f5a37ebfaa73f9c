"""Run all benchmarks and print one table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from . import decode, frames
from .table import show


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    args = parser.parse_args()
    rows = [*frames.measure(), *decode.measure(rounds=3 if args.quick else 9)]
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
