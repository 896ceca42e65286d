"""Certificates that are renewed while connections are open: the server's and its clients'."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import pytest
import redis
from cryptography.hazmat.primitives import serialization

from adapters.errors import SourceUnavailable
from certificates.contexts import CertificateError, ClientFiles, client_context, server_context
from certificates.memory_files import copy_to_memory
from certificates.reloading import ReloadedValue, poll_all
from gateway.config.settings import Settings
from gateway.http.server import Server, bind
from gateway.observability.tracing import Tracer
from gateway.sources.remote import open_location
from gateway.sources.source import parse
from gateway.triton.client import TritonClient
from gateway.triton.transport import ConnectionOptions, TransportName
from lora_store import connect, redis_url
from lora_store.redis_tls import with_memory_files
from tests.support.authority import Authority
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import running_redis
from tests.support.secure_gateway import SecureGateway, trust_of
from tests.support.tls_proxy import TlsProxy, serial_of
from tests.support.wire_requests import stream_request

READ_AGAIN = "read again, for new connections"
UNUSABLE = "the files have changed and cannot be used"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


class Secret:
    """A Secret as Kubernetes mounts it: files are symlinks through a symlink that is replaced."""

    def __init__(self, folder: Path, **files: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._version = 0
        self.renew(**files)
        for name in files:
            (folder / name).symlink_to(Path("..data") / name)

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def renew(self, **files: Path) -> None:
        self._version += 1
        version = self.folder / f"..{self._version}"
        version.mkdir()
        for name, source in files.items():
            (version / name).write_bytes(source.read_bytes())
        (self.folder / "..new").symlink_to(version.name)
        os.replace(self.folder / "..new", self.folder / "..data")


def _pair(authority: Authority, name: str) -> dict[str, Path]:
    return dict(zip(("crt", "key"), authority.issue(name), strict=True))


def _served(port: int, trust: ssl.SSLContext) -> bytes:
    """Return the server certificate (DER) that a new connection receives."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line,
        trust.wrap_socket(line, server_hostname="127.0.0.1") as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def _der(cert: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(cert.read_text(encoding="ascii"))


def _ask(connection: http.client.HTTPSConnection) -> int:
    connection.request("GET", "/health/live")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_the_server_shows_a_renewed_certificate_in_all_workers(
    stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    trust = trust_of(authority)
    first = _pair(authority, "first")
    secret = Secret(tmp_path / "secret", **first)
    settings = {"tls_cert": secret["crt"], "tls_key": secret["key"]}
    settings |= {"workers": 2, "redis_url": stack.redis, "admin_port": 0}
    with SecureGateway(trust, tmp_path / "gateway", stack, **settings) as gateway:
        gateway.wait_for("listening on", times=4)  # two ports times two workers
        open_before = http.client.HTTPSConnection(
            "127.0.0.1", gateway.port, context=trust, timeout=PATIENCE_S
        )
        assert _ask(open_before) == 200
        line = open_before.sock
        assert _served(gateway.port, trust) == _der(first["crt"])

        second = _pair(authority, "second")
        secret.renew(**second)
        gateway.wait_for(READ_AGAIN, times=2)
        for port in (gateway.port, gateway.admin_port):
            _wait_until_all_show(port, trust, _der(second["crt"]))
        assert _ask(open_before) == 200
        assert open_before.sock is line
        open_before.close()

        # A key of another certificate and a truncated certificate are reported, and not used.
        secret.renew(crt=second["crt"], key=first["key"])
        gateway.wait_for("do not belong together", times=2)
        half = tmp_path / "half"
        half.write_bytes(second["crt"].read_bytes()[:200])
        secret.renew(crt=half, key=second["key"])
        gateway.wait_for("is no certificate in PEM form", times=2)
        assert {_served(gateway.port, trust) for _ in range(8)} == {_der(second["crt"])}
        assert gateway.text.count(UNUSABLE) == 4
        assert f"GATEWAY_TLS_CERT, GATEWAY_TLS_KEY: {UNUSABLE}: {secret['crt']} " in gateway.text

        third = _pair(authority, "third")
        secret.renew(**third)
        gateway.wait_for(READ_AGAIN, times=4)
        _wait_until_all_show(gateway.port, trust, _der(third["crt"]))
        # SIGHUP reads the files again, even if they did not change.
        gateway.process.send_signal(signal.SIGHUP)
        gateway.wait_for(READ_AGAIN, times=6)
    # No process still listens on the port.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S)


class _Application:
    """The minimal application that a server needs."""

    has_failed = False
    door = None

    async def asgi(self, scope: object, receive: object, send: object) -> None:
        """Do nothing, as the tests send no request."""

    def build_error_response(self, *_: object) -> None:
        """Do nothing, as the tests send no request."""

    def watch(self, connections: object, starts: object) -> None:
        pass

    def set_admin_port(self, admin_port: int) -> None:
        pass

    def drain(self) -> bool:
        return False


async def test_a_renewal_that_cannot_listen_changes_nothing_and_is_tried_again(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = _pair(authority, "first"), _pair(authority, "second")
    secret = Secret(tmp_path / "secret", **first)
    settings = Settings(
        port=0, admin_port=0, tls_cert=secret["crt"], tls_key=secret["key"], tokenizer_dir=tmp_path
    )
    server = Server(cast("Any", _Application()), settings)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    sockets = bind(settings)
    await server.startup(sockets)
    ports = [each.getsockname()[1] for each in sockets]
    trust = trust_of(authority)

    async def shown() -> list[bytes]:
        return [await asyncio.to_thread(_served, port, trust) for port in ports]

    try:
        assert await shown() == [_der(first["crt"])] * 2
        secret.renew(**second)
        assert server._tls is not None
        server._tls.refresh()
        # A closed listener fails like one for which no file descriptor is left.
        whole = server._listeners[1].dup()
        server._listeners[1].close()
        for _ in range(3):
            assert not await server.on_tick(1)
            assert await shown() == [_der(first["crt"])] * 2
        assert caplog.text.count("cannot listen with the renewed one") == 1
        server._listeners[1] = whole
        assert not await server.on_tick(1)
        assert await shown() == [_der(second["crt"])] * 2
    finally:
        server.force_exit = True
        await server.shutdown(sockets)


def _wait_until_all_show(port: int, trust: ssl.SSLContext, expected: bytes) -> None:
    """Wait until 16 connections in a row receive the expected certificate.

    Each worker switches within one tick, and any idle worker may accept the connection.
    """
    in_a_row = 0
    for _ in range(10_000):
        in_a_row = in_a_row + 1 if _served(port, trust) == expected else 0
        if in_a_row == 16:
            return
    pytest.fail("the certificate of before is still shown")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_whose_authority_was_removed_comes_in_no_more(
    stack: Stack, authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    removed = Authority(tmp_path, "removed")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.file.read_bytes() + removed.file.read_bytes())
    kept_client = trust_of(authority, authority.issue("client"))
    client = trust_of(authority, removed.issue("client"))
    client.maximum_version = version
    cert, key = authority.issue("server")
    settings = {"tls_cert": cert, "tls_key": key, "tls_client_ca": both}
    with SecureGateway(kept_client, tmp_path / "gateway", stack, **settings) as gateway:
        session = _exchange(gateway.port, client, None)
        both.write_bytes(authority.file.read_bytes())
        gateway.wait_for(READ_AGAIN)
        # Each worker switches within one tick and accepts the client until then.
        for _ in range(1_000):
            try:
                session = _exchange(gateway.port, client, session)
            except OSError:
                break
        else:
            pytest.fail("the removed authority is still trusted")
        for attempt in (session, None):
            with pytest.raises(OSError):  # noqa: PT011  TLS 1.3 tells it at the first read
                _exchange(gateway.port, client, attempt)
        _exchange(gateway.port, kept_client, None)


def _exchange(
    port: int, trust: ssl.SSLContext, session: ssl.SSLSession | None
) -> ssl.SSLSession | None:
    """Send a request on a connection that resumes `session`; return the session for the next."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line,
        trust.wrap_socket(line, server_hostname="127.0.0.1", session=session) as secure,
    ):
        secure.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = secure.recv(4096)
        if not answer:
            raise ConnectionError("closed without an answer")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return secure.session


@contextlib.contextmanager
def _listening(context: ssl.SSLContext) -> Iterator[int]:
    """Yield the port of a TLS server that sends "word" to each client."""

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), context.wrap_socket(line, server_side=True) as one:
                one.sendall(b"word")
                one.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("mutual", [False, True])
def test_tickets_are_given_unless_clients_need_certificates(
    authority: Authority, mutual: bool, version: ssl.TLSVersion
) -> None:
    """Check that mutual TLS issues no tickets: a resumed session has no certificate check."""
    cert, key = authority.issue("server")
    trust = trust_of(authority, authority.issue("client"))
    trust.maximum_version = version
    context = server_context(cert, key, authority.file if mutual else None)
    session = None
    with _listening(context) as port:
        for _ in range(2):
            with (
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line,
                trust.wrap_socket(line, server_hostname="127.0.0.1", session=session) as secure,
            ):
                assert secure.version() == version.name.replace("_", ".")
                assert secure.recv(4) == b"word"
                resumed, session = secure.session_reused, secure.session
    assert session is not None
    assert session.has_ticket is not mutual
    assert resumed is not mutual


# Connections that the gateway opens as a client.


def test_a_server_of_another_name_is_not_trusted(authority: Authority) -> None:
    """Check the server's name. Otherwise any certificate of the authority would be accepted."""
    cert, key = authority.issue("server")
    context = client_context(ClientFiles(authority.file))
    with _listening(server_context(cert, key, None)) as port:
        for name, is_trusted in {"triton.test": True, "elsewhere.test": False}.items():
            with (
                socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as line,
                contextlib.nullcontext()
                if is_trusted
                else pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"),
                context.wrap_socket(line, server_hostname=name) as secure,
            ):
                assert secure.recv(4) == b"word"


@contextlib.asynccontextmanager
async def _triton_behind_tls(authority: Authority, stack: Stack) -> AsyncIterator[TlsProxy]:
    host, _, port = stack.triton_grpc.partition(":")
    proxy = TlsProxy(authority, authority.issue("triton"), ["h2"])
    async with proxy.serving(lambda: asyncio.open_connection(host, int(port))):
        yield proxy


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_connections_to_triton_use_renewed_certificates(
    authority: Authority, tmp_path: Path, stack: Stack, transport: TransportName
) -> None:
    first = _pair(authority, "first")
    secret = Secret(tmp_path / "secret", **first)
    options = ConnectionOptions(transport, authority.file, secret["crt"], secret["key"])
    async with _triton_behind_tls(authority, stack) as proxy, asyncio.timeout(300):
        client = TritonClient(f"grpcs://127.0.0.1:{proxy.port}", options)
        try:
            stream = await client.infer(stream_request(300), metadata={})
            assert await stream.read() is not None
            assert proxy.serials == [serial_of(first["crt"])]

            second = _pair(authority, "second")
            secret.renew(**second)
            await asyncio.to_thread(poll_all)
            if transport == "http2":  # the open connection stays
                assert await client.model_ready("tensorrt_llm")
                assert len(proxy.serials) == 1
            else:
                assert await client.model_ready("tensorrt_llm")
                assert proxy.serials[1:] == [serial_of(second["crt"])]
            tokens = 1
            while (response := await stream.read()) is not None:
                assert not response.error_message
                tokens += 1
            assert tokens >= 300

            client.disconnect()
            assert await client.model_ready("tensorrt_llm")
            assert proxy.serials[-1] == serial_of(second["crt"])

            secret.renew(crt=first["crt"], key=second["key"])
            await asyncio.to_thread(poll_all)
            client.disconnect()
            assert await client.model_ready("tensorrt_llm")
            assert proxy.serials[-1] == serial_of(second["crt"])
        finally:
            await client.close()


async def test_connections_to_triton_trust_a_renewed_authority(
    authority: Authority, tmp_path: Path, stack: Stack
) -> None:
    other = Authority(tmp_path, "other")
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(other.file.read_bytes())
    options = ConnectionOptions("http2", trusted, *authority.issue("client"))
    async with _triton_behind_tls(authority, stack) as proxy, asyncio.timeout(300):
        client = TritonClient(f"grpcs://127.0.0.1:{proxy.port}", options)
        try:
            assert not await _is_reached(client)
            trusted.write_bytes(authority.file.read_bytes())
            await asyncio.to_thread(poll_all)
            while not await _is_reached(client):
                await asyncio.sleep(0.05)  # the client waits between its attempts
        finally:
            await client.close()


async def _is_reached(client: TritonClient) -> bool:
    with contextlib.suppress(Exception):
        return await client.model_ready("tensorrt_llm")
    return False


async def test_connections_to_redis_use_renewed_certificates(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = _pair(authority, "first")
    secret = Secret(tmp_path / "secret", **first)
    with running_redis() as redis:
        proxy = TlsProxy(authority, authority.issue("redis"), [])
        path = redis.url.removeprefix("unix://")
        async with proxy.serving(lambda: asyncio.open_unix_connection(path)):
            url = redis_url.parse(
                f"rediss://127.0.0.1:{proxy.port}/0?ssl_ca_certs={authority.file}"
                f"&ssl_certfile={secret['crt']}&ssl_keyfile={secret['key']}"
            )
            client = await asyncio.to_thread(
                connect.connect, url, timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S
            )

            async def asked(*, again: bool) -> int:
                """Return the serial number of the latest certificate, after a command on each
                connection.
                """
                if again:
                    client.connection_pool.disconnect()
                assert await asyncio.to_thread(client.ping)
                listener = connect.load().asyncio.Redis.from_url(connect.channel_url(url, client))
                try:
                    assert await listener.ping()
                finally:
                    await listener.aclose()
                assert len(set(proxy.serials[-1 - again :])) == 1
                return proxy.serials[-1]

            assert await asked(again=True) == serial_of(first["crt"])
            second = _pair(authority, "second")
            secret.renew(**second)
            await asyncio.to_thread(poll_all)
            assert await asked(again=False) == serial_of(second["crt"])
            assert proxy.serials[-2] != proxy.serials[-1]  # the pool did not reconnect
            assert await asked(again=True) == serial_of(second["crt"])

            half = tmp_path / "half"
            half.write_bytes(first["crt"].read_bytes()[:100])
            secret.renew(crt=half, key=first["key"])
            for _ in range(3):
                await asyncio.to_thread(poll_all)
            assert await asked(again=True) == serial_of(second["crt"])
            told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
            assert len([line for line in told if "connections to Redis" in line]) == 1
            client.close()


async def _answers_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each HTTP request with 200 and close the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.decode("latin-1").lower().split("\r\n"):
        if line.startswith("content-length:"):
            await reader.readexactly(int(line.partition(":")[2]))
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    writer.close()
    await writer.wait_closed()


@contextlib.asynccontextmanager
async def _https(authority: Authority, *, mutual: bool) -> AsyncIterator[TlsProxy]:
    server = await asyncio.start_server(_answers_all, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    proxy = TlsProxy(authority, authority.issue("https"), mutual=mutual)
    async with server, proxy.serving(lambda: asyncio.open_connection("127.0.0.1", port)):
        yield proxy


async def test_traces_are_sent_with_renewed_certificates(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = _pair(authority, "first"), _pair(authority, "second")
    secret = Secret(tmp_path / "secret", **first)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # these would take precedence
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.file))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", str(secret["crt"]))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(secret["key"]))
    async with _https(authority, mutual=True) as proxy, asyncio.timeout(300):
        tracer = Tracer(f"https://127.0.0.1:{proxy.port}")

        async def sent() -> int:
            before = len(proxy.serials)
            tracer.begin("GET", "https", {}).begin_attempt("replica").end(None)
            assert await asyncio.to_thread(tracer._provider.force_flush)
            assert len(proxy.serials) == before + 1
            return proxy.serials[-1]

        try:
            assert await sent() == serial_of(first["crt"])
            for renewed in (second, {"crt": first["crt"], "key": second["key"]}):
                secret.renew(**renewed)
                await asyncio.to_thread(poll_all)
                assert await sent() == serial_of(second["crt"])
        finally:
            await tracer.close()


async def test_sources_of_adapters_are_trusted_by_renewed_authorities(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "ca.pem"
    trusted.write_bytes(Authority(tmp_path, "other").file.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    async with _https(authority, mutual=False) as proxy, asyncio.timeout(300):
        source = parse(f"https://127.0.0.1:{proxy.port}/zh")

        async def look() -> object:
            async with open_location(source, lambda _: False) as place:
                return await place.stat("adapter_config.json")

        with pytest.raises(SourceUnavailable):
            await look()
        for content in (authority.file.read_bytes(), b"half"):
            trusted.write_bytes(content)
            await asyncio.to_thread(poll_all)
            assert await look() is not None


# Detection of changed files.


def _watch(path: Path) -> ReloadedValue[bytes]:
    def read() -> bytes:
        content = path.read_bytes()
        if content == b"bad":
            raise CertificateError("bad content")
        return content

    return ReloadedValue("test", [path], read)


def test_every_way_to_change_a_file_is_seen(tmp_path: Path) -> None:
    path, new = tmp_path / "file", tmp_path / "new"
    path.write_bytes(b"1")
    watched = _watch(path)
    path.write_bytes(b"22")
    watched.refresh()
    assert watched.value == b"22"
    # The new file replaces the old one by a rename, with equal size and modification time.
    new.write_bytes(b"33")
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.replace(path)
    watched.refresh()
    assert watched.value == b"33"


def test_a_change_of_permissions_is_seen(tmp_path: Path) -> None:
    """Check that new permissions count as a change.

    An unreadable file may become readable with the same content and modification time.
    """
    path = tmp_path / "file"
    path.touch()
    watched = ReloadedValue("test", [path], partial(next, count()))
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:  # file times have a coarse resolution
        path.chmod(0o600)
    watched.refresh()
    watched.refresh()
    assert watched.value == 1


def test_the_old_value_stays_until_there_is_a_better_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    watched = _watch(path)
    path.write_bytes(b"bad")
    for force in (False, False, True):
        watched.refresh(force=force)
    path.unlink()
    watched.refresh()
    assert watched.value == b"1"
    errors = [record.getMessage() for record in caplog.records]
    assert len(errors) == 3  # first refresh, forced refresh, and new error
    assert f"test: {UNUSABLE}: bad content; what was read before" in errors[0]
    path.write_bytes(b"1")  # the original content
    with caplog.at_level(logging.INFO):
        watched.refresh()
    assert "test: read again" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("cert", "key", "ca", "said"),
    [
        ("none", "key", "ca", "{none}: No such file or directory"),
        ("cert", "none", "ca", "{none}: No such file or directory"),
        ("cert", "other", "ca", "{cert} and {other} do not belong together"),
        ("cert", "cert", "ca", "{cert} is no key"),
        ("cut", "key", "ca", "{cut} is no certificate in PEM form"),
        ("cert", "secret", "ca", "{secret} is encrypted; give the key without a password"),
        ("cert", "key", "key", "{key} has no certificates in PEM form"),
        ("cert", "key", "empty", "{empty} has no certificates in PEM form"),
    ],
)
def test_what_is_wrong_names_the_file(
    authority: Authority, tmp_path: Path, cert: str, key: str, ca: str, said: str
) -> None:
    own, own_key = authority.issue("own")
    files = {"cert": own, "key": own_key, "other": authority.issue("other")[1]}
    files |= {"ca": authority.file} | {n: tmp_path / n for n in ("none", "cut", "secret", "empty")}
    files["cut"].write_bytes(own.read_bytes()[:150])
    files["empty"].touch()
    files["secret"].write_bytes(_encrypted(own_key, b"hunter2"))
    with pytest.raises(CertificateError) as server:
        server_context(files[cert], files[key], files[ca])
    with pytest.raises(CertificateError) as client:
        client_context(ClientFiles(files[ca], files[cert], files[key]))
    assert said.format(**files) in str(server.value)
    assert said.format(**files) in str(client.value)


def test_a_password_opens_a_key_and_is_not_shown(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("own")
    locked = tmp_path / "locked"
    locked.write_bytes(_encrypted(key, b"hunter2"))
    files = ClientFiles(authority.file, cert, locked)
    client_context(files, "hunter2")
    with pytest.raises(CertificateError) as refused:
        client_context(files, "hunter3")
    assert "hunter" not in str(refused.value)


def _encrypted(key: Path, password: bytes) -> bytes:
    loaded: Any = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted: bytes = loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    return encrypted


def test_a_pair_is_kept_in_one_file(authority: Authority, tmp_path: Path) -> None:
    """Check that certificate and key are copied into one file.

    With two files, a concurrent connection could load a certificate with the key of another.
    """
    secret = Secret(tmp_path / "secret", **_pair(authority, "one"))
    kept = copy_to_memory("a test", ClientFiles(authority.file, secret["crt"], secret["key"]))
    assert kept.cert == kept.key != kept.ca
    renewed = _pair(authority, "two")
    secret.renew(**renewed)
    poll_all()
    client_context(kept)
    assert kept.cert is not None
    assert renewed["crt"].read_text() in kept.cert.read_text()


def test_files_that_change_while_they_are_checked_are_not_used(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that files which change during their check are rejected."""
    secret = Secret(tmp_path / "secret", **_pair(authority, "one"))
    files = ClientFiles(authority.file, secret["crt"], secret["key"])
    check = ssl.SSLContext.load_cert_chain

    def check_and_renew(*given: Any) -> None:
        check(*given)
        secret.renew(**_pair(authority, "two"))

    with monkeypatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_cert_chain", check_and_renew)
        with pytest.raises(CertificateError, match="written to at this moment"):
            copy_to_memory("a test", files)
    client_context(copy_to_memory("a test", files))


def test_the_password_of_a_key_is_read_as_redis_py_reads_it(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = authority.issue("one")
    encrypted = tmp_path / "key"
    encrypted.write_bytes(_encrypted(key, b"100% of it"))
    url = f"rediss://h:1?ssl_certfile={cert}&ssl_keyfile={encrypted}&ssl_password=100%2525 of it"
    parse = redis.connection.parse_url

    def decoding_twice(url: str) -> dict[str, Any]:
        options: dict[str, Any] = parse(url)
        return options | {"ssl_password": unquote(options["ssl_password"])}

    assert with_memory_files(url) == url  # the password "100%25 of it" is wrong
    monkeypatch.setattr(redis.connection, "parse_url", decoding_twice)
    assert "proc" in with_memory_files(url)
