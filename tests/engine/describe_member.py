"""Process that describes models: configurations as JSON on standard input, one a line, descriptions out."""

from __future__ import annotations

import contextlib
import json
import sys

from mlxtp.description import to_text
from mlxtp.engine.describe import describe
from mlxtp.engine.group import CollectiveCounter
from mlxtp.errors import ModelError

if __name__ == "__main__":
    CollectiveCounter().install()
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                answer = to_text(describe(json.loads(line)))
            except ModelError as error:
                answer = json.dumps({"refused": error.detail})
        sys.stdout.write(answer + "\n")
