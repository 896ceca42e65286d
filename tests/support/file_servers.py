"""File servers for adapters: an https server that can misbehave, and a minimal S3."""

from __future__ import annotations

import hashlib
import hmac
import ssl
import threading
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, quote, urlsplit
from xml.sax.saxutils import escape

Behaviour = Callable[["_Handler"], None]


class FileServer:
    """A server of the content of `files` by path, as a context manager."""

    handler: ClassVar[type[_Handler]]

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        """Create the server. With `certificate` and key files, the server uses https."""
        self.files: dict[str, bytes] = {}
        self.behaves: dict[str, Behaviour] = {}
        """Functions by path that answer instead of `files`."""
        self.asked: list[tuple[str, str]] = []
        """Method and target of each request."""
        self.authorization: list[str | None] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self._server.daemon_threads = True
        self._server.owner = self  # type: ignore[attr-defined]
        self.port = self._server.server_port
        self.stopping = threading.Event()
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            # The TLS handshake must run in the connection's thread, at its first read.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )

    def put(self, at: str, folder: Path) -> None:
        """Add the files of a folder, below the path `at`."""
        for path in folder.iterdir():
            self.files[f"{at}/{path.name}"] = path.read_bytes()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> FileServer:
        return self.server.owner  # type: ignore[attr-defined, no-any-return]

    def do_GET(self) -> None:
        self.owner.asked.append((self.command, self.path))
        self.owner.authorization.append(self.headers["authorization"])
        path = urlsplit(self.path).path
        if (behaviour := self.owner.behaves.get(path)) is not None:
            behaviour(self)
        else:
            self.file(self.owner.files.get(path))

    do_HEAD = do_GET

    def file(self, data: bytes | None) -> None:
        if data is None:
            self.answer(404, b"")
        else:
            self.answer(200, data, etag=f'"{hashlib.md5(data).hexdigest()}"')

    def answer(self, status: int, data: bytes, **headers: str) -> None:
        self.send_response(status)
        told = {"content_length": str(len(data)), "last_modified": formatdate(usegmt=True)}
        for name, value in (told | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


FileServer.handler = _Handler


class S3Server(FileServer):
    """A server of objects by ``/BUCKET/KEY``, for requests signed with `SECRET` (SigV4) only."""

    KEY: ClassVar[str] = "AKIATESTS"
    SECRET: ClassVar[str] = "a secret of the tests"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for a gateway that reads from this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": self.KEY,
            "AWS_SECRET_ACCESS_KEY": self.SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class _S3Handler(_Handler):
    def do_GET(self) -> None:
        self.owner.asked.append((self.command, self.path))
        if not self._is_signed():
            return self._error(403, "SignatureDoesNotMatch")
        parts = urlsplit(self.path)
        if dict(parse_qsl(parts.query)).get("list-type") == "2":
            prefix = f"{parts.path.rstrip('/')}/{dict(parse_qsl(parts.query)).get('prefix', '')}"
            keys = [key for key in self.owner.files if key.startswith(prefix)]
            entries = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in keys)
            count = f"<KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>"
            listed = f"<ListBucketResult>{count}{entries}</ListBucketResult>"
            return self.answer(200, listed.encode(), content_type="application/xml")
        if (behaviour := self.owner.behaves.get(parts.path)) is not None:
            return behaviour(self)
        if parts.path in self.owner.files:
            return self.file(self.owner.files[parts.path])
        return self._error(404, "NoSuchKey")

    do_HEAD = do_GET

    def _error(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.answer(status, body, content_type="application/xml")

    def _is_signed(self) -> bool:
        """Return True if the AWS Signature Version 4 is valid, as specified."""
        told = self.headers["authorization"] or ""
        if not told.startswith("AWS4-HMAC-SHA256 "):
            return False
        fields = dict(each.strip().split("=", 1) for each in told.split(" ", 1)[1].split(","))
        key_id, day, region, service, _ = fields["Credential"].split("/")
        signed = fields["SignedHeaders"].split(";")
        parts = urlsplit(self.path)
        query = sorted(parse_qsl(parts.query, keep_blank_values=True))
        request = "\n".join(
            [
                self.command,
                parts.path,
                "&".join(
                    f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in query
                ),
                *(f"{name}:{self.headers[name].strip()}" for name in signed),
                "",
                fields["SignedHeaders"],
                self.headers["x-amz-content-sha256"],
            ]
        )
        scope = f"{day}/{region}/{service}/aws4_request"
        hashed = hashlib.sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{self.headers['x-amz-date']}\n{scope}\n{hashed}"
        key = f"AWS4{S3Server.SECRET}".encode()
        for part in (day, region, service, "aws4_request", text):
            key = hmac.digest(key, part.encode(), "sha256")
        return key_id == S3Server.KEY and hmac.compare_digest(key.hex(), fields["Signature"])


S3Server.handler = _S3Handler
