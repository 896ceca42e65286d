"""Unknown parameter names in requests to each API, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.metrics.metrics import Metrics
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, metric_of, running, save_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/conversations": {},
}
WITHOUT_MODEL = {"/v1/conversations"}
COUNTED = "gateway_unknown_parameters_total"


@pytest.fixture
async def endpoint(tmp_path: Path) -> AsyncIterator[str]:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    engine = FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)
    async with serving(engine) as address:
        yield address


async def _ask(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    model = {} if path in WITHOUT_MODEL else {"model": "m"}
    return await client.post(path, json=model | BODIES[path] | fields)


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_name_is_told_and_counted(
    tmp_path: Path, endpoint: str, path: str
) -> None:
    async with running(tmp_path, endpoint) as (client, service, _):
        answer = await _ask(client, path, next_months=1, **{"a\r\nset-cookie: b": 1})
        assert answer.status_code == 200, answer.text
        named = answer.headers["x-ignored-parameters"]
        assert named == "next_months, a\\u000d\\u000aset-cookie:\\u0020b"
        assert metric_of(service, COUNTED, parameter="next_months") == 1
        assert metric_of(service, COUNTED, parameter="other") == 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "settings", [{"unknown_parameters": "refuse"}, {"strict_parameters": True}]
)
async def test_a_setting_refuses_it(
    tmp_path: Path, endpoint: str, path: str, settings: dict[str, Any]
) -> None:
    async with running(tmp_path, endpoint, **settings) as (client, _, _):
        answer = await _ask(client, path, next_months=1)
        assert answer.status_code == 400
        assert "next_months" in answer.json()["error"]["message"]


FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "made_up": 1}}
OWN = {"name": "f", "input_schema": {"type": "object", "made_up": 1}}
HERMES: dict[str, Any] = {"tool_form": "hermes", "max_seq_len": 4096}
HOSTED = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
TOOLS: list[tuple[str, list[dict[str, Any]], str]] = [
    (
        "/v1/chat/completions",
        [
            {"type": "function", "cache_control": {}, "function": FUNCTION},
            {"type": "function", "function": FUNCTION | {"descripton": "d", "name": "g"}},
            {"type": "function", "function": FUNCTION | {"descripton": "d", "name": "h"}},
            {"type": "custom", "custom": {"name": "c", "format": {"type": "text"}, "x": 1}, "y": 1},
        ],
        "tools[1].function.descripton, tools[3].custom.x, tools[3].y",
    ),
    (
        "/tokenize",
        [{"type": "function", "function": FUNCTION, "strct": True}],
        "tools[0].strct",
    ),
    (
        "/v1/responses",
        [
            {"type": "function", "defer_loading": True, "paramters": {}} | FUNCTION,
            {
                "type": "namespace",
                "name": "n",
                "tools": [{"type": "function", "name": "m", "x": 1}],
            },
            {"type": "web_search", "search_context_size": "low"},
        ],
        "tools[2].type=web_search, tools[0].paramters, tools[1].tools[0].x",
    ),
    (
        "/v1/messages",
        [OWN, OWN | {"name": "g", "input_exmples": []}, HOSTED, OWN | {"cache_control": {}}],
        "tools.2.type=web_search_20250305, tools.1.input_exmples",
    ),
    ("/v1/messages/count_tokens", [OWN | {"input_exmples": []}], "tools.0.input_exmples"),
]


@pytest.mark.parametrize(("path", "tools", "named"), TOOLS, ids=[case[0] for case in TOOLS])
async def test_an_unknown_field_of_a_tool_is_told_and_counted(
    tmp_path: Path, endpoint: str, path: str, tools: list[dict[str, Any]], named: str
) -> None:
    messages = {"messages": USER, "prompt": None} if path == "/tokenize" else {}
    async with running(tmp_path, endpoint, **HERMES) as (client, service, _):
        answer = await _ask(client, path, tools=tools, **messages)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-parameters"] == named
        fields = {
            "tools.function.descripton",
            "tools.strct",
            "tools.tools.x",
            "tools.input_exmples",
        }
        counts = [metric_of(service, COUNTED, parameter=field) for field in fields]
        assert [count for count in counts if count] == [1]
    async with running(tmp_path, endpoint, **HERMES, unknown_parameters="refuse") as (client, _, _):
        answer = await _ask(client, path, tools=tools, **messages)
        assert answer.status_code == 400, answer.text
        assert "Unrecognized request argument" in answer.json()["error"]["message"]
        first = next(name for name in named.split(", ") if "=" not in name)
        assert first in answer.json()["error"]["message"]


async def test_hostile_fields_of_tools_are_few_names(tmp_path: Path, endpoint: str) -> None:
    tool = {"type": "function", "function": {"name": "f"} | {f"n{n}": 1 for n in range(4000)}}
    async with running(tmp_path, endpoint, **HERMES) as (client, _, _):
        answer = await _ask(client, "/v1/chat/completions", tools=[tool])
        assert answer.status_code == 200, answer.text
        assert len(answer.headers["x-ignored-parameters"]) <= 2048
        assert answer.headers["x-ignored-parameters"].count("tools[0].function.n") <= 64


async def test_a_conversations_changes_name_what_they_ignore(tmp_path: Path, endpoint: str) -> None:
    items = [{"type": "message", "role": "user", "content": "hi"}]
    async with running(tmp_path, endpoint) as (client, _, _):
        made = (await client.post("/v1/conversations", json={})).json()["id"]
        for path, fields in (
            (f"/v1/conversations/{made}", {"metadata": {}}),
            (f"/v1/conversations/{made}/items", {"items": items}),
        ):
            answer = await client.post(path, json=fields | {"next_months": 1})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ignored-parameters"] == "next_months"
        # Another endpoint supports this parameter, so it is refused instead of ignored.
        refused = await client.post("/tokenize", json={"prompt": "hi", "logit_bias": {"1": 5}})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "logit_bias"


async def test_other_servers_probes_and_preflights_of_private_networks(
    tmp_path: Path, endpoint: str
) -> None:
    origin = "https://app.example"
    async with running(tmp_path, endpoint, cors_origins=[origin]) as (client, _, _):
        for path in ("/healthz", "/v1/health/ready", "/v2/health/ready", "/health"):
            assert (await client.get(path)).status_code == 200
        headers = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-private-network": "true",
        }
        answer = await client.options("/v1/chat/completions", headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-private-network"] == "true"
        listed = (await client.get("/v1/models")).json()["data"]
        assert listed[0]["context_length"] == listed[0]["max_model_len"] == 64


async def test_minus_one_cuts_a_prompt_to_what_the_model_takes(
    tmp_path: Path, endpoint: str
) -> None:
    async with running(tmp_path, endpoint) as (client, _, _):
        for limit, kept in ((None, 63), (10, 54)):
            answer = await client.post(
                "/v1/completions",
                json={
                    "model": "m",
                    "prompt": "x" * 500,
                    "truncate_prompt_tokens": -1,
                    "max_tokens": limit,
                },
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["prompt_tokens"] == kept


@pytest.mark.parametrize(("tenant", "names"), [("", 64), ("acme", 16)])
def test_hostile_names_make_a_bounded_number_of_series(tenant: str, names: int) -> None:
    metrics = Metrics()
    for request in range(100):
        metrics.count_unknown_parameters([f"n{request}_{n}" for n in range(40)], tenant)
    counted = _counted(metrics)
    assert len(counted) == names + 1
    assert sum(counted.values()) == 4000


def test_the_names_of_one_tenant_leave_room_for_those_of_others() -> None:
    metrics = Metrics()
    for request in range(100):
        metrics.count_unknown_parameters([f"n{request}_{n}" for n in range(16)], "flood")
    for tenant in ("acme", "globex"):
        metrics.count_unknown_parameters([f"of_{tenant}", "of_both"], tenant)
    counted = _counted(metrics)
    assert {name: counted[name] for name in counted if name.startswith("of_")} == {
        "of_acme": 1,
        "of_globex": 1,
        "of_both": 2,
    }


def _counted(metrics: Metrics) -> dict[str, float]:
    [family] = [f for f in metrics.registry.collect() if f.name == COUNTED.removesuffix("_total")]
    return {s.labels["parameter"]: s.value for s in family.samples if s.name == COUNTED}
