"""A server of the Model Context Protocol on stdio with one tool."""

import json
import sys

TOOL = {
    "name": "look_up",
    "description": "Look a number up.",
    "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}

for line in sys.stdin:
    asked = json.loads(line)
    params, result = asked.get("params") or {}, {}
    match asked.get("method"):
        case "initialize":
            version = params["protocolVersion"]
            info = {"name": "numbers", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            result = {"content": [{"type": "text", "text": f"FALCON-{params['arguments']['n']}"}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
