"""Both transports with a real tritonserver that requires mutual TLS and a protocol key."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from gateway.errors import EngineUnavailable, EngineUnreachable, GatewayError
from gateway.triton import grpcio
from gateway.triton.client import TritonClient
from gateway.triton.http2.channel import Http2Transport
from gateway.triton.transport import ConnectionOptions, Endpoint, TransportName
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.repository import PARAMETERS
from tests.support.authority import Authority
from tests.support.triton_server import MODEL, Server, serving
from tests.support.wire_requests import stream_request
from triton_repo.cpu_executor import synthetic
from triton_repo.render import render

TRANSPORTS: list[TransportName] = ["http2", "grpcio"]
# Error text of each transport for a port that closes the connection without an answer.
HTTP_PORT = {"http2": "triton's http port", "grpcio": "socket closed"}
KEY = {"triton-grpc-protocol-secret": "let me in"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Server]:
    """Start a Triton that requires TLS, a client certificate, and a key for inference."""
    folder = tmp_path_factory.mktemp("tls")
    synthetic.build(folder / "engine", vocab_size=4096, tokens_per_second=200)
    parameters = {**PARAMETERS, "engine_dir": str(folder / "engine"), "tokenizer_dir": str(MODEL)}
    render(folder / "repository", parameters)
    certificate, key = authority.issue("server")
    options = (
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={certificate}",
        f"--grpc-server-key={key}",
        f"--grpc-root-cert={authority.file}",
        "--grpc-restricted-protocol=inference:secret=let me in",
    )
    with serving(folder, *options) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(server: Server) -> str:
    return f"grpcs://{server.grpc}"


@contextlib.asynccontextmanager
async def client_of(endpoint: str, options: ConnectionOptions) -> AsyncIterator[TritonClient]:
    client = TritonClient(endpoint, options)
    try:
        async with asyncio.timeout(300):
            yield client
    finally:
        await client.close()


async def count_tokens(client: TritonClient, tokens: int, **metadata: str) -> int:
    stream = await client.infer(stream_request(tokens), metadata=metadata)
    count = 0
    while (response := await stream.read()) is not None:
        assert not response.error_message
        outputs = response.infer_response.outputs
        count += sum(t.shape[2] for t in outputs if t.name == "output_ids")
    return count


@pytest.fixture(scope="module")
def known(authority: Authority) -> dict[str, Path]:
    """Return the TLS files that a client needs."""
    certificate, key = authority.issue("client")
    return {"tls_ca": authority.file, "tls_cert": certificate, "tls_key": key}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tokens_over_tls(
    endpoint: str, known: dict[str, Path], transport: TransportName
) -> None:
    options = ConnectionOptions(transport, **known, metadata=KEY)
    async with client_of(endpoint, options) as client:
        assert await client.model_ready("tensorrt_llm")
        assert not await client.model_ready("another")
        assert (await client.model_config("tensorrt_llm")).name == "tensorrt_llm"
        counts = await asyncio.gather(*[count_tokens(client, n) for n in range(10, 40)])
        assert counts == list(range(10, 40))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_server_that_is_far_away(
    endpoint: str, known: dict[str, Path], transport: TransportName
) -> None:
    """A slow TLS handshake, with round trips of 0.3 s, does not exceed the connect timeout."""
    host, port = endpoint.removeprefix("grpcs://").split(":")
    relays = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await asyncio.sleep(0.15)
                writer.write(data)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.add(asyncio.current_task())
        from_server, to_server = await asyncio.open_connection(host, port)
        await asyncio.gather(pass_on(reader, to_server), pass_on(from_server, writer))

    async with await asyncio.start_server(relay, LOCALHOST, 0) as listener:
        far = f"grpcs://{LOCALHOST}:{listener.sockets[0].getsockname()[1]}"
        async with client_of(far, ConnectionOptions(transport, **known, metadata=KEY)) as client:
            assert await count_tokens(client, 3) == 3
        await asyncio.wait_for(asyncio.gather(*relays), 60)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_restricted_protocol_wants_its_key(
    endpoint: str, known: dict[str, Path], transport: TransportName
) -> None:
    async with client_of(endpoint, ConnectionOptions(transport, **known)) as client:
        assert await client.model_ready("tensorrt_llm")
        with pytest.raises(EngineUnavailable):
            await count_tokens(client, 3)
        assert await count_tokens(client, 3, **KEY) == 3


def test_a_call_that_the_server_ended_unread_is_no_broken_engine() -> None:
    """INTERNAL means unavailable: grpc.aio reports it, in a race, for a call refused at once."""
    details = "Internal error from Core"
    nothing = grpc.aio.Metadata()
    refused = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details)
    assert type(grpcio._translate(refused)) is EngineUnavailable


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_name_of_the_certificate(
    endpoint: str, known: dict[str, Path], transport: TransportName
) -> None:
    for name, right in (("triton.test", True), ("another.test", False)):
        async with client_of(f"{endpoint}#{name}", ConnectionOptions(transport, **known)) as client:
            if right:
                assert await client.model_ready("tensorrt_llm")
            else:
                with pytest.raises(EngineUnreachable):
                    await client.model_ready("tensorrt_llm")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("lacking", ["trust", "certificate", "TLS"])
async def test_without_what_tls_needs_the_server_is_away(
    endpoint: str,
    known: dict[str, Path],
    transport: TransportName,
    lacking: str,
    tmp_path: Path,
) -> None:
    if lacking == "trust":
        known = known | {"tls_ca": Authority(tmp_path, "stranger").file}
    elif lacking == "certificate":
        known = {"tls_ca": known["tls_ca"]}
    else:
        endpoint = endpoint.removeprefix("grpcs://")
    async with client_of(endpoint, ConnectionOptions(transport, **known, metadata=KEY)) as client:
        with pytest.raises(EngineUnreachable):
            await client.model_ready("tensorrt_llm")
        with pytest.raises(GatewayError):
            await count_tokens(client, 3)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_why_there_is_no_connection(server: Server, transport: TransportName) -> None:
    with PortClaims() as claims:
        nobody = f"{LOCALHOST}:{claims.take_free()}"
    for endpoint, why in ((nobody, "refused"), (server.http, HTTP_PORT[transport])):
        async with client_of(endpoint, ConnectionOptions(transport)) as client:
            for _ in range(2):  # the second call gets the error of the first attempt
                with pytest.raises(EngineUnreachable) as raised:
                    await client.model_ready("tensorrt_llm")
                assert why in raised.value.why.lower()
                assert endpoint not in raised.value.message


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_who_waits_while_a_server_is_given_up_may_go_elsewhere(
    endpoint: str, known: dict[str, Path], transport: TransportName
) -> None:
    """Waiting calls fail with an error that allows failover. They are not cancelled."""
    # The http2 transport continues to connect, and the 5 s timeout of a call may pass first.
    given_up = (EngineUnreachable, TimeoutError) if transport == "http2" else EngineUnreachable
    with socket.create_server((LOCALHOST, 0)) as listener:  # accepts connections, but never answers
        silent = f"{LOCALHOST}:{listener.getsockname()[1]}"
        async with client_of(silent, ConnectionOptions(transport)) as client:
            waiting = [
                asyncio.create_task(count_tokens(client, 3)),
                asyncio.create_task(client.model_ready("tensorrt_llm")),
            ]
            await asyncio.sleep(0.1)
            client.disconnect()
            for waits in waiting:
                with pytest.raises(given_up):
                    await waits
    options = ConnectionOptions(transport, **known, metadata=KEY)
    async with client_of(endpoint, options) as client:
        streaming = asyncio.create_task(count_tokens(client, 4000))
        await count_tokens(client, 3)
        client.disconnect()
        with pytest.raises(EngineUnavailable):
            await streaming
        assert await count_tokens(client, 3) == 3


async def test_a_tls_server_without_http2_is_away(authority: Authority) -> None:
    """The client sends nothing if ALPN did not select HTTP/2."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("other"))

    async def read_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    listener = await asyncio.start_server(read_on, LOCALHOST, 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    endpoint = Endpoint.parse(f"grpcs://{LOCALHOST}:{port}")
    transport = Http2Transport(endpoint, ConnectionOptions(tls_ca=authority.file))
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(transport.unary("/a/B", b"", 5), 60)
    await transport.close()
    listener.close()
    await listener.wait_closed()


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    for transport in TRANSPORTS:
        with pytest.raises(OSError, match="No such file"):
            TritonClient("grpcs://h:1", ConnectionOptions(transport, tls_ca=tmp_path / "ca.pem"))


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_stream_that_was_left_is_not_read_any_more(
    endpoint: str, known: dict[str, Path], transport: TransportName
) -> None:
    """A stream may be abandoned between two reads, for example at a deadline."""
    options = ConnectionOptions(transport, **known, metadata=KEY)
    async with client_of(endpoint, options) as client:
        stream = await client.stream(stream_request(1000), bytes)  # generates for five seconds
        assert await stream.read()
        stream.abandon()
        stream.abandon()
        with pytest.raises(asyncio.CancelledError):
            await stream.read()
        assert await count_tokens(client, 3, **KEY) == 3
