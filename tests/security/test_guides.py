"""Guides of a tenant: a schema, regex or grammar that the engine cannot compile is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.local_stack import Stack
from tests.support.triton_server import LONG_ANSWER

KEYS = {name: f"sk-{name}-key" for name in ("checked", "unchecked", "none", "other")}
HEADERS = {name: {"authorization": f"Bearer {key}"} for name, key in KEYS.items()}
STEP = "Encountered an error in forwardAsync function: [TensorRT-LLM][ERROR] at /src/xgrammar.cc:12"
TEXT = "hello"
BAD = {"structured_outputs": {"regex": "("}}


def _tool(name: str, parameters: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def _schema(schema: Any) -> dict[str, Any]:
    given = {"name": "s", "schema": schema, "strict": True}
    wanted = {"type": "json_schema", "json_schema": given}
    return {"response_format": wanted}


def _tools(*parameters: Any, choice: Any = "required") -> dict[str, Any]:
    tools = [_tool(f"f{n}", schema) for n, schema in enumerate(parameters)]
    return {"tools": tools, "tool_choice": choice}


NAMED = {"type": "function", "function": {"name": "f1"}}
UNIQUE = {"type": "array", "uniqueItems": True}
PROPERTIES = {"properties": {"a": {"type": "string"}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (_schema({"type": "foo"}), "response_format"),
    (_schema({**PROPERTIES, "required": None}), "response_format"),
    (_schema({"properties": {"tags": UNIQUE}}), "response_format"),
    (_schema({**PROPERTIES, "required": 5}), "response_format"),
    (_schema({**PROPERTIES, "required": [[1]]}), "response_format"),
    (_schema({"$ref": "#"}), "response_format"),
    (_schema({"enum": [f"value {n}" for n in range(12_000)]}), "response_format"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 2**20}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": 'root ::= root "a" | "b"'}}, "structured_outputs"),
    (_schema({"anyOf": [{"$ref": "#"}, {"type": "null"}]}), "response_format"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs"),
    (_tools({}, {"type": "foo"}), "tools[1].function.parameters"),
    (
        _tools({}, {"type": "object", "properties": {"tags": UNIQUE}}),
        "tools[1].function.parameters",
    ),
    (_tools({}, {"type": "foo"}, choice=NAMED), "tools[1].function.parameters"),
    (_tools({}, {**PROPERTIES, "required": None}), "tools[1].function.parameters"),
]


@pytest.fixture(scope="module")
def gateway(
    long_stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("guides")
    tenants = [
        tenant("checked", KEYS["checked"]),
        tenant("unchecked", KEYS["unchecked"], guides="unchecked"),
        tenant("none", KEYS["none"], guides="none"),
        tenant("other", KEYS["other"]),
    ]
    config = write_config(folder / "c.yaml", *tenants)
    with GatewayProcess(folder / "g", long_stack, config=config) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
        yield client


async def _chat(client: httpx.AsyncClient, name: str, fields: dict[str, Any]) -> httpx.Response:
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"model": "demo", "messages": messages, "max_tokens": 8, **fields}
    return await client.post("/v1/chat/completions", json=asked, headers=HEADERS[name])


class _Stream:
    """A long streamed answer of another tenant, which runs meanwhile."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        fields = body(prompt="Repeat: a b c", max_tokens=LONG_ANSWER, ignore_eos=True, stream=True)
        self._stream = client.stream(
            "POST", "/v1/completions", json=fields, headers=HEADERS["other"]
        )

    async def __aenter__(self) -> _Stream:
        answer = await self._stream.__aenter__()
        assert answer.status_code == 200
        self._lines = answer.aiter_lines()
        assert "choices" in (await self.next_event())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stream.__aexit__(*error)

    async def next_event(self) -> dict[str, Any]:
        while not (line := await anext(self._lines)).startswith("data: {"):
            pass
        found: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return found

    async def error(self) -> dict[str, Any]:
        while "error" not in (event := await self.next_event()):
            pass
        found: dict[str, Any] = event["error"]
        return found


@pytest.mark.slow
@pytest.mark.token_mode_only("the guides are the engine's in every mode")
async def test_what_cannot_be_compiled_does_not_reach_the_engine(client: httpx.AsyncClient) -> None:
    async with _Stream(client) as other:
        for fields, param in REFUSED:
            answer = await _chat(client, "checked", fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert error["message"].startswith(f"{param}: cannot be enforced: "), error
            if "uniqueItems" in str(fields):
                assert error["message"].endswith(
                    ": $.properties.tags: uniqueItems is not supported."
                )
        assert "choices" in await other.next_event()
    # The gateway merges `allOf`, since an engine would enforce only one of its schemas.
    parts = [{"properties": {name: {"const": 1}}, "required": [name]} for name in ("a", "b")]
    answer = await _chat(client, "checked", {**_schema({"allOf": parts}), "max_tokens": 40})
    assert answer.status_code == 200
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": 1, "b": 1}


@pytest.mark.token_mode_only("the guides are the engine's in every mode")
async def test_unchecked_it_ends_all_and_they_are_told_to_try_again(
    client: httpx.AsyncClient,
) -> None:
    async with _Stream(client) as other:
        answer = await _chat(client, "unchecked", BAD)
        error = await other.error()
    assert (error["code"], error["type"]) == ("engine_step_failed", "server_error")
    assert "try again" in error["message"]
    assert "xgrammar" not in json.dumps(error)
    # This tenant's guide may have caused the failure, so its client must not retry.
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    async with _Stream(client):
        pass


async def test_a_tenant_may_have_no_guides_at_all(client: httpx.AsyncClient) -> None:
    for fields in (BAD, {"response_format": {"type": "json_object"}}, _tools({})):
        answer = await _chat(client, "none", fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        assert "this key may not use guided decoding" in error["message"]
    assert (await _chat(client, "none", {})).status_code == 200


async def test_nobody_s_step_opens_the_breaker_and_no_other_replica_is_tried(
    tmp_path: Path,
) -> None:
    save_tokenizer(tmp_path)
    engines = [FakeTriton(tokens=ids_of(tmp_path, TEXT), fault="error", step=0) for _ in range(2)]
    for engine in engines:
        engine.error = STEP
    config = write_config(tmp_path / "c.yaml", tenant("a", KEYS["unchecked"], guides="unchecked"))
    asked: dict[str, Any] = {"model": "m", "prompt": "xyz", "max_tokens": 5}
    async with serving(engines[0]) as one, serving(engines[1]) as two:
        async with running(tmp_path, f"{one},{two}", config=config) as (client, service, _):
            client.headers.update(HEADERS["unchecked"])
            free = [await client.post("/v1/completions", json=asked) for _ in range(4)]
            guided = await client.post("/v1/completions", json={**asked, **BAD})
            assert sum(len(engine.requests) for engine in engines) == 5
            assert not any(replica.breaker.is_open for replica in service.replicas)
            for engine in engines:
                engine.fault = None
            well = await client.post("/v1/completions", json=asked)
    for answer in free:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_step_failed")
        assert answer.headers["x-should-retry"] == "true"
        assert answer.headers["retry-after"] == "1"
    assert (guided.status_code, guided.headers["x-should-retry"]) == (500, "false")
    assert well.status_code == 200
