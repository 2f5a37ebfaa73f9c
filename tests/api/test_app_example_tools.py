"""The example whose tools no model can be made to call, with a model that calls them by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .conftest import WAIT_S, Server, says

SCRIPT = Path(__file__).parents[2] / "examples" / "clients" / "ollama_chat.py"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWERS = ("FALCON", "FALCON", CALL, "It rains.", '{"wet": true}')


def test_what_a_tool_says_gets_to_the_model(roomy: Server) -> None:
    roomy.backend.scripts = [says(roomy.ids(answer)) for answer in ANSWERS]
    command, environment = [sys.executable, str(SCRIPT)], {**os.environ, "MLXTP_URL": roomy.url}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    tools = done.stdout.partition("== tools\n")[2].partition("== structured\n")[0]
    assert tools == "weather({'city': 'Oslo'}) = '7 degrees, rain'\nIt rains.\n"
    asked, told = (roomy.tokenizer.decode(list(each.tokens)) for each in roomy.backend.requests[2:4])
    assert "The weather in a city." in asked  # what the library made of the function
    assert "7 degrees, rain" not in asked
    assert "7 degrees, rain" in told
