"""Open WebUI: what its page would send to its own server, sent without a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .bench import Bench, Check, free_port, post

SAY = 'DO say "The sky is blue."'


def open_webui(bench: Bench) -> Iterator[Check]:
    home, port = bench.home(), free_port()
    url = f"http://127.0.0.1:{port}"
    told = {
        "OPENAI_API_BASE_URL": f"{bench.url}/v1",
        "OPENAI_API_KEY": "none",
        "ENABLE_OLLAMA_API": "false",
        "DATA_DIR": str(home / "data"),
        "WEBUI_AUTH": "false",
        "WEBUI_SECRET_KEY": "none",
        "OFFLINE_MODE": "true",
    }
    command = [
        bench.folder / "open-webui/bin/open-webui",
        "serve",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with bench.server(command, home, told, f"{url}/health", 240):
        signed = json.loads(post(f"{url}/api/v1/auths/signin", {"email": "", "password": ""}))
        body = {"model": bench.model, "messages": [{"role": "user", "content": SAY}]}
        for stream in (False, True):
            text = post(f"{url}/api/chat/completions", body | {"stream": stream}, signed["token"])
            yield Check(f"chat{', streamed' * stream}", "sky" in text, "" if "sky" in text else text[-300:])
