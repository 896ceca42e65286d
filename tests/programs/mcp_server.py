"""An MCP server over stdio with one tool, `read_note`, which returns its argument."""

from __future__ import annotations

import json
import sys
from typing import Any

_TOOL = {
    "name": "read_note",
    "description": "Reads the team's note.",
    "inputSchema": {
        "type": "object",
        "properties": {"title": {"type": "string", "description": "The note's title."}},
        "required": ["title"],
    },
}


def _result(method: str, parameters: dict[str, Any], note: str) -> dict[str, Any]:
    if method == "initialize":
        return {
            "protocolVersion": parameters["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [_TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": note}], "isError": False}
    return {}


def main(note: str) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = _result(message["method"], message.get("params") or {}, note)
        answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
