"""API keys, tested through the HTTP API: what each key may use and what it reveals."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from gateway.config.tenants import key_hash
from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.in_process import running
from tests.support.local_stack import Stack, Up
from tests.support.patience import PATIENCE_S

ACME, OTHER, NARROW, ADMIN = "sk-acme-0001", "sk-other-0002", "sk-narrow-0003", "sk-admin-0004"
SECRETS = (ACME, OTHER, NARROW, ADMIN, "sk-guessed-0005")


def _tenants() -> list[dict[str, object]]:
    return [
        tenant("acme", ACME),
        tenant("other", OTHER, models=["demo", "acme/zh"]),
        tenant("narrow", NARROW, models=["j?"], max_output_tokens=2),
    ]


@pytest.fixture(scope="module")
def gateway(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("tenants")
    config = write_config(folder / "gateway.yaml", *_tenants(), admin_keys=[key_hash(ADMIN)])
    names = {"zh": "zh", "ja": "ja", "acme/zh": "zh", "other/ja": "ja"}
    adapters = {name: str(DEMO_ADAPTERS / folder_name) for name, folder_name in names.items()}
    with GatewayProcess(folder, stack, config=config, adapters=json.dumps(adapters)) as gateway:
        yield gateway


def _error(response: httpx.Response) -> tuple[int, str | None]:
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Basic abc", "Bearer sk-guessed-0005", ACME, "é"]
)
def test_without_a_right_key_nothing_is_served(gateway: GatewayProcess, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=PATIENCE_S) as client:
        for method, path, sent in (
            ("POST", "/v1/completions", body()),
            ("POST", "/v1/completions", {}),
            ("POST", "/v1/chat/completions", {"model": "demo", "messages": []}),
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/demo", None),
            ("POST", "/tokenize", {"prompt": "x"}),
            ("POST", "/detokenize", {"tokens": [1]}),
            ("GET", "/v1/adapters", None),
            ("GET", "/metrics", None),
        ):
            response = client.request(method, path, json=sent)
            assert _error(response) == (401, "invalid_api_key"), path
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 200


def test_the_sdk_knows_the_errors(gateway: GatewayProcess) -> None:
    base_url = f"{gateway.url}/v1"
    with openai.OpenAI(
        base_url=base_url, api_key="wrong", max_retries=0, timeout=PATIENCE_S
    ) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with openai.OpenAI(
        base_url=base_url, api_key=NARROW, max_retries=0, timeout=PATIENCE_S
    ) as client:
        with pytest.raises(openai.PermissionDeniedError):
            client.completions.create(model="demo", prompt="x")


@pytest.mark.parametrize(
    ("key", "models"),
    [
        (ACME, ["demo", "acme/zh", "ja", "zh"]),
        (OTHER, ["demo", "acme/zh", "other/ja"]),
        (NARROW, ["ja"]),
    ],
)
def test_a_key_sees_what_it_may_use(gateway: GatewayProcess, key: str, models: list[str]) -> None:
    with gateway.client(key) as client:
        listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert listed == models
        for model in models:
            assert client.get(f"/v1/models/{model}").status_code == 200
            assert client.post("/v1/completions", json=body(model=model)).status_code == 200


@pytest.mark.parametrize(
    ("key", "model", "expected"),
    [
        (NARROW, "demo", (403, "model_not_allowed")),
        (NARROW, "zh", (403, "model_not_allowed")),
        (NARROW, "nothing", (404, "model_not_found")),
        (NARROW, "acme/zh", (404, "model_not_found")),
        (NARROW, "acme/nothing", (404, "model_not_found")),
        (NARROW, "narrow/nothing", (404, "model_not_found")),
        (ACME, "other/ja", (404, "model_not_found")),
        (ACME, "acme/zh@000000000000", (404, "model_not_found")),
        (OTHER, "zh", (403, "model_not_allowed")),
        (OTHER, "other/ja@x", (404, "model_not_found")),
    ],
)
def test_what_a_key_may_not_use(
    gateway: GatewayProcess, key: str, model: str, expected: tuple[int, str]
) -> None:
    with gateway.client(key) as client:
        answers = [
            client.post("/v1/completions", json=body(model=model)),
            client.post("/v1/completions", json=body(model=model, stream=True)),
            client.post("/v1/chat/completions", json=_chat(model)),
            client.get(f"/v1/models/{model}"),
            client.post("/tokenize", json={"model": model, "prompt": "x"}),
            client.post("/detokenize", json={"model": model, "tokens": [1]}),
        ]
        assert {_error(answer) for answer in answers} == {expected}
        # The error is the same for a model that exists and one that does not.
        if expected[0] == 404:
            message = answers[0].json()["error"]["message"]
            assert message.startswith(f"The model `{model}` does not exist. GET /v1/models lists ")


def _chat(model: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def test_the_most_output_tokens(gateway: GatewayProcess) -> None:
    with gateway.client(NARROW) as client:
        answer = client.post("/v1/completions", json=body(model="ja", max_tokens=3))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "max_tokens"
        chat = {**_chat("ja"), "max_completion_tokens": 3}
        answer = client.post("/v1/chat/completions", json=chat)
        assert answer.json()["error"]["param"] == "max_completion_tokens"
        unstated = body(model="ja", prompt="Count from 1 to 300", ignore_eos=True)
        del unstated["max_tokens"]
        answer = client.post("/v1/completions", json=unstated)
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_of_two_tenants_keys_authorization_counts(gateway: GatewayProcess) -> None:
    headers = {"authorization": f"Bearer {NARROW}", "x-api-key": ACME}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=PATIENCE_S) as client:
        listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert listed == ["ja"]


def test_admins_and_tenants_are_not_the_same(gateway: GatewayProcess) -> None:
    with gateway.client(ADMIN) as client:
        assert client.get("/v1/adapters").status_code == 200
        assert "gateway_requests_total" in client.get("/metrics").text
        assert _error(client.get("/v1/models")) == (401, "invalid_api_key")
    with gateway.client(ACME) as client:
        assert _error(client.get("/v1/adapters")) == (401, "invalid_api_key")
        assert _error(client.get("/metrics")) == (401, "invalid_api_key")


def test_keys_are_nowhere_to_be_read(gateway: GatewayProcess) -> None:
    for key in SECRETS:
        with gateway.client(key) as client:
            client.post("/v1/completions", json=body(model="nothing"))
            client.post("/v1/completions", content=b"{")
            client.get(f"/v1/nothing?api_key={key}")
    with gateway.client(ADMIN) as client:
        metrics = client.get("/metrics").text
        with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as nobody:
            document = nobody.get("/openapi.json").text
    for key in SECRETS:
        for text in (metrics, document, gateway.text):
            assert key not in text
            assert key_hash(key)[-64:] not in text


async def test_a_second_port_for_admins(stack: Stack, tmp_path: Path) -> None:
    key = "sk-the-admins-key-has-enough-characters"
    settings = {"tokenizer_dir": DEMO_MODEL, "model_name": "demo", "max_seq_len": None}
    settings |= {"admin_port": 0, "admin_key": key}
    async with running(tmp_path, stack.triton_grpc, **settings) as (nobody, _, server):
        url = f"http://127.0.0.1:{server.servers[1].sockets[0].getsockname()[1]}"
        key_of_admin = {"authorization": f"Bearer {key}"}
        for path in ("/v1/adapters", "/metrics", "/v1/adapters/zh"):
            public = await nobody.get(path, headers=key_of_admin)
            assert _error(public) == (404, None)
            assert public.json()["error"]["message"] == f"Unknown URL: GET {path}."
        answer = await nobody.get(f"{url}/v1/adapters", headers=key_of_admin)
        assert answer.status_code == 200
        assert (await nobody.get(f"{url}/metrics")).status_code == 200
        assert _error(await nobody.get(f"{url}/v1/adapters")) == (401, "invalid_api_key")
        assert (await nobody.get("/health/ready")).json() == {"status": "ready"}
        ready = await nobody.get(f"{url}/health/ready")
        assert ready.json()["engine"]["model"] == "tensorrt_llm"
        answer = await nobody.post("/v1/completions", json=body(), headers=key_of_admin)
        assert answer.status_code == 200


def test_without_keys_only_this_machine_is_served(stack: Stack, up: Up, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, stack, host="0.0.0.0")
    with pytest.raises(AssertionError, match="set GATEWAY_ALLOW_ANONYMOUS=true"):
        gateway.__enter__()
    assert gateway.process.returncode == 2
    with GatewayProcess(tmp_path, stack, host="0.0.0.0", allow_anonymous="true") as gateway:
        assert "NO KEYS ARE CONFIGURED: everybody who reaches this address" in gateway.text
    log = (up.state_dir / "logs" / "gateway.log").read_text(encoding="utf-8")
    assert "NO KEYS ARE CONFIGURED: other processes of this machine" in log


def test_a_wrong_file_ends_the_start(stack: Stack, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("tenants:\n  - nmae: x\n")
    gateway = GatewayProcess(tmp_path, stack, config=config)
    with pytest.raises(AssertionError, match=r"gateway\.yaml:2: tenants\[0\]\.nmae: unknown"):
        gateway.__enter__()
    assert gateway.process.returncode == 2
    assert "Traceback" not in gateway.text


@pytest.mark.slow
async def test_reloads_under_load_fail_nobody(stack: Stack, tmp_path: Path) -> None:
    """Requests with an unchanged tenant's key never fail while other keys are added and removed."""
    config = write_config(tmp_path / "gateway.yaml", tenant("stays", ACME))
    with GatewayProcess(tmp_path, stack, config=config, host="0.0.0.0") as gateway:
        done = asyncio.Event()
        statuses: list[int] = []

        async def work() -> None:
            async with gateway.async_client(ACME) as client:
                while not done.is_set():
                    answer = await client.post("/v1/completions", json=body(max_tokens=4))
                    statuses.append(answer.status_code)

        workers = [asyncio.create_task(work()) for _ in range(8)]
        for number in range(4):
            extra = [tenant("comes", OTHER)] if number % 2 == 0 else []
            write_config(config, tenant("stays", ACME), *extra)
            gateway.process.send_signal(signal.SIGHUP)
            # Poll the API, not the log: the file is also polled and may be loaded twice.
            async with gateway.async_client(OTHER) as other, asyncio.timeout(300):
                while (await other.get("/v1/models")).status_code != (200 if extra else 401):
                    await asyncio.sleep(0.02)
        # The first file is invalid. The second is valid, but would turn keys off.
        for number, (text, reason) in enumerate(
            (("tenants: [3]", ":1: "), ("", "DOES NOT TURN KEYS OFF"))
        ):
            config.write_text(text)
            await asyncio.to_thread(gateway.wait_for, "the old one stays in force", number + 1)
            assert reason in gateway.text.rpartition("the old one stays in force")[2]
        async with gateway.async_client(ACME) as client:
            assert (await client.get("/v1/models")).status_code == 200
        done.set()
        await asyncio.gather(*workers)
        assert len(statuses) > 8
        assert set(statuses) == {200}
