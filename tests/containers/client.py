"""A load generator: four threads send streamed and complete requests until SIGTERM.

Each request opens a new connection and tries the next address of the host name if one refuses. A
JSON line per second has the number of correct answers and up to five failures.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
from urllib.parse import urlsplit

LOST: list[str] = []
answered = 0
counting = threading.Lock()
ended = threading.Event()


def ask(netloc: str, stream: bool) -> str:
    """Return the problem with the answer, or "" if it is correct."""
    body = {"model": "demo", "prompt": "The capital of France is", "temperature": 0}
    body |= {"stream": stream, "max_tokens": 60, "ignore_eos": True}
    connection = http.client.HTTPConnection(netloc, timeout=60)
    headers = {"authorization": f"Bearer {os.environ['KEY']}", "connection": "close"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()
    whole = text.endswith("data: [DONE]\n\n") if stream else '"finish_reason":"length"' in text
    return "" if response.status == 200 and whole else f"{response.status}: {text[-300:]}"


def go_on(netloc: str, stream: bool) -> None:
    global answered  # noqa: PLW0603
    while not ended.is_set():
        wrong = ask(netloc, stream)
        with counting:
            if wrong:
                LOST.append(wrong)
            else:
                answered += 1


signal.signal(signal.SIGTERM, lambda *_: ended.set())
asking = [
    threading.Thread(target=go_on, args=(urlsplit(sys.argv[1]).netloc, bool(number % 2)))
    for number in range(4)
]
for thread in asking:
    thread.start()
while any(thread.is_alive() for thread in asking):
    time.sleep(1)
    with counting:
        print(json.dumps({"answered": answered, "lost": LOST[:5]}), flush=True)
