"""A rank that looks for its model elsewhere: `misled_worker.py FOLDER <arguments of mlxtp.engine.worker>`.

While FOLDER/rank-K exists, rank K loads the model folder that is named there, instead of what it is told to
load, as if two machines held different files.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxtp.engine import executor as rank_module
from mlxtp.engine import worker
from mlxtp.engine.group import Group
from mlxtp.engine.loader import ModelShare


def main() -> None:
    folder, *arguments = sys.argv[1:]
    signpost = Path(folder) / f"rank-{arguments[arguments.index('--rank') + 1]}"
    load = rank_module.load

    def load_elsewhere(path: Path, group: Group, progress: Callable[[], None], *how: Any) -> ModelShare:
        return load(Path(signpost.read_text()) if signpost.exists() else path, group, progress, *how)

    rank_module.load = load_elsewhere
    worker.main(arguments)


if __name__ == "__main__":
    main()
