"""How a command talks to the agent of its home."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import Code, UserError

FILE = "agent.json"
TIMEOUT_S = 15.0


class AgentClient:
    """The agent whose home this is. Raises UserError when none runs there."""

    def __init__(self, home: Path) -> None:
        self._home = home
        try:
            found = json.loads((home / FILE).read_text())
            self.url, self._key = str(found["url"]), str(found["key"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"no mlxtp node runs with home {home}; start one with `mlxtp node`, or name its --home",
                Code.NOT_READY,
            ) from None

    def get(self, what: str) -> dict[str, Any]:
        """Ask. Raises UserError with the agent's words when it refuses."""
        return self._ask("GET", what, None)

    def post(self, what: str, **body: str) -> dict[str, Any]:
        """Have something done. Raises as `get` does."""
        return self._ask("POST", what, body)

    def _ask(self, method: str, what: str, body: dict[str, str] | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            connection.request(method, f"/admin/{what}", json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(
                f"the agent of {self._home} does not answer at {self.url} ({error}); is it still running?",
                Code.NOT_READY,
            ) from None
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise UserError(str(answer.get("error", {}).get("message", answer)))
        return dict(answer)
