"""Lua scripts that read and write conversations and responses in Redis.

See decision 068 in docs/decisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from lora_store.connect import errors


class Script:
    """Lua script for Redis. Its text is the concatenation of files in this package."""

    def __init__(self, *names: str) -> None:
        folder = files(__package__)
        self._text = "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
        self._digest = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    def run(self, client: Any, keys: Sequence[object], arguments: Sequence[object]) -> Any:
        """Run the script in Redis, and return the script's result.

        The script is called by its digest. The script's text is sent only if the server does not
        have it yet.
        """
        try:
            return client.evalsha(self._digest, len(keys), *keys, *arguments)
        except errors().NoScriptError:
            return client.eval(self._text, len(keys), *keys, *arguments)


POLL = Script("look.lua")
PUT = Script("records.lua", "put.lua")
READ = Script("records.lua", "read.lua")
RENEW = Script("records.lua", "renew.lua")
STAGE = Script("stage.lua")
ANNOUNCE = Script("announce.lua")
