"""uvicorn's HTTP/1.1 protocol with a limit on headers, and errors in OpenAI's envelope."""

from __future__ import annotations

import uuid

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.errors import GatewayError, HeadersTooLarge, InvalidRequest

MAX_HEAD = 64 * 1024
"""Bytes of a request's URL and headers, or of a chunked body's trailers."""

_LINGER_S = 1.0


class HttpProtocol(HttpToolsProtocol):
    """httptools sets no limit by itself: a header that never ends would fill the memory."""

    _pending = 0
    """Bytes of the reads since something was complete, without the read that held its end."""
    _too_large = False
    _refused = False

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._pending += len(data)
        super().data_received(data)
        if self._pending > MAX_HEAD and not self._refused:
            self._too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._pending = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._pending = 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._too_large = size > MAX_HEAD
        if self._too_large:
            raise ValueError  # ends the parser; uvicorn then calls send_400_response
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """For what is not HTTP, or too large to be read; uvicorn's own answer is plain text."""
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        error: GatewayError = InvalidRequest(msg)
        if self._too_large:
            error = HeadersTooLarge(f"The URL and headers are larger than {MAX_HEAD} bytes.")
        self._answer(error)
        # A connection that is closed with data unread is reset, and the answer lost with it.
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _answer(self, error: GatewayError) -> None:
        body = error.json()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": uuid.uuid4().hex,
            "connection": "close",
        } | error.headers()
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        self.transport.write(STATUS_LINE[error.status] + "".join(lines).encode() + b"\r\n" + body)
