"""The OpenAPI document is complete, and the running server conforms to it for any request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from hypothesis import assume

from gateway.api import openapi
from gateway.api.openai.parameter_table import HARMLESS, HINTS
from gateway.app import ROUTES
from gateway.config.tenants import new_key
from ops.commands.up import DEMO_MODEL
from tests.support import vector_models
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.generated_adapters import write_adapter
from tests.support.local_stack import Stack, Up
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    import schemathesis

    from tests.support.documented import Documented

DOCUMENT: dict[str, Any] = json.loads(openapi.build(ROUTES))
MAX_TOKENS = 4
MAX_CHOICES = 2
IN_PATH = {"model": "demo", "name": "documented"}
WITH_TENANTS = {"POST /v1/keys", "GET /v1/keys", "DELETE /v1/keys/{key_id}"}
WITH_MODELS = {"POST /v1/embeddings", "POST /v1/rerank"}
OF_WHAT_IS_KEPT = {
    operation
    for operation in (f"{m.upper()} {p}" for p, item in DOCUMENT["paths"].items() for m in item)
    if "/v1/conversations" in operation or "/v1/responses/{" in operation
}
OF_A_CONSOLE = {
    operation
    for operation in (f"{m.upper()} {p}" for p, item in DOCUMENT["paths"].items() for m in item)
    if "/v1/admin/" in operation or "/v1/requests/" in operation
}
ENDLESS = {"GET /v1/admin/events"}
DEMO_ADAPTERS = ("zh", "ja")  # other tests need these adapters
SECONDS = 60


OPERATIONS = [
    f"{method.upper()} {path}" for path, item in DOCUMENT["paths"].items() for method in item
]


@cache
def _documented() -> Documented:
    from tests.support.documented import Documented

    return Documented(DOCUMENT)


@pytest.fixture(scope="module")
def admin(stack: Stack, up: Up) -> Iterator[httpx.Client]:
    """Yield a client with the admin key. Assert that the tests left the adapters unchanged."""
    key = (up.state_dir / "admin_key").read_text(encoding="utf-8")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=stack.gateway, headers=headers, timeout=SECONDS) as client:
        before = _adapters(client)
        yield client
        for name in _adapters(client).keys() - before:
            client.delete(f"/v1/adapters/{name}")
        assert _adapters(client) == before


def _adapters(admin: httpx.Client) -> dict[str, str]:
    return {record["name"]: record["served"] for record in admin.get("/v1/adapters").json()["data"]}


@pytest.mark.slow
@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each not in ENDLESS])
def test_every_answer_is_documented(operation: str, admin: httpx.Client) -> None:
    _documented().ask(operation, admin, _make_answerable, within_s=SECONDS)


def _make_answerable(case: schemathesis.Case) -> None:
    """Set the served model and small token limits in a generated request. Errors in it remain."""
    assume(case.path_parameters.get("name") not in DEMO_ADAPTERS)
    body = case.body
    if not isinstance(body, dict):
        return
    assume(body.get("lora_name") not in DEMO_ADAPTERS)
    if isinstance(body.get("model"), str):
        body["model"] = "demo"
    if body.get("prompt") in ("", [""]):
        body["prompt"] = "x"
    if not case.path.endswith(("/completions", "/messages", "/responses")):
        return
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) == -1 and case.path.endswith("/completions"):  # as many tokens as fit
            body[name] = MAX_TOKENS
    if body.get("max_tokens") is None and case.path.endswith("/completions"):
        body["max_tokens"] = MAX_TOKENS
    if body.get("max_output_tokens") is None and case.path.endswith("/responses"):
        body["max_output_tokens"] = MAX_TOKENS
    for name, few, allowed in (
        ("max_tokens", MAX_TOKENS, 2**63),
        ("max_completion_tokens", MAX_TOKENS, 2**63),
        ("max_output_tokens", MAX_TOKENS, 2**63),
        ("n", MAX_CHOICES, 128),
        ("best_of", MAX_CHOICES, 20),
    ):
        if type(body.get(name)) is int and few < body[name] <= allowed:
            body[name] = few


@pytest.mark.slow
def test_every_operation_succeeds_as_documented(
    admin: httpx.Client, up: Up, tmp_path: Path
) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    text = {"model": "demo", "prompt": "Hi", "max_tokens": 4}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    asked = {"model": "demo", "messages": chat["messages"]}
    able = {"name": "f", "input_schema": function["parameters"]}
    called = {"tools": [able], "tool_choice": {"type": "any"}, "max_tokens": 50}
    items = {"model": "demo", "input": chat["messages"], "max_output_tokens": 4}
    counted = {"model": "demo", "input": "Hi"}
    flat = [{"type": "function", **function}, {"type": "custom", "name": "note"}]
    chosen = {"tools": flat, "tool_choice": "required", "max_output_tokens": 50}
    loaded = write_adapter(up.adapter_root / "documented", DEMO_MODEL, seed=23)
    requests: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/chat/completions", {"json": chat}),
        ("POST", "/v1/chat/completions", {"json": chat | {"logprobs": True, "n": 2}}),
        ("POST", "/v1/chat/completions", {"json": chat | tools | {"max_tokens": 50}}),
        ("POST", "/v1/chat/completions", {"json": chat | stream}),
        ("POST", "/v1/chat/completions", {"json": chat | tools | stream | {"max_tokens": 50}}),
        ("POST", "/v1/completions", {"json": text | {"logprobs": 0}}),
        ("POST", "/v1/completions", {"json": text | stream}),
        ("POST", "/v1/messages", {"json": chat}),
        ("POST", "/v1/messages", {"json": chat | {"stream": True}}),
        ("POST", "/v1/messages", {"json": chat | called}),
        ("POST", "/v1/messages/count_tokens", {"json": asked}),
        ("POST", "/v1/responses", {"json": items}),
        ("POST", "/v1/responses", {"json": items | {"stream": True}}),
        ("POST", "/v1/responses", {"json": items | chosen}),
        ("POST", "/v1/responses", {"json": items | {"stream": True, "background": True}}),
        ("POST", "/v1/responses/input_tokens", {"json": counted}),
        ("POST", "/tokenize", {"json": {"prompt": "Hi", "return_token_strs": True}}),
        ("POST", "/tokenize", {"json": {"messages": chat["messages"]}}),
        ("POST", "/detokenize", {"json": {"tokens": [1, 2]}}),
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models/{model}", {}),
        ("POST", "/v1/adapters", _upload(tmp_path / "1", seed=21)),
        ("POST", "/v1/adapters", _upload(tmp_path / "2", seed=22)),
        ("GET", "/v1/adapters", {}),
        ("POST", "/v1/adapters/{name}/rollback", {}),
        ("POST", "/v1/adapters/{name}/verify", {}),
        ("GET", "/v1/adapters/{name}", {}),
        ("GET", "/v1/audit", {}),
        ("DELETE", "/v1/adapters/{name}", {}),
        (
            "POST",
            "/v1/load_lora_adapter",
            {"json": {"lora_name": "documented", "lora_path": str(loaded)}},
        ),
        ("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": "documented"}}),
        ("GET", "/health/live", {}),
        ("GET", "/health/ready", {}),
        ("GET", "/version", {}),
        ("GET", "/metrics", {}),
        ("GET", "/openapi.json", {}),
    ]
    for method, path, parts in requests:
        _succeeds(admin, method, path, parts, IN_PATH)
    succeeded = {f"{method} {path}" for method, path, _ in requests}
    apart = WITH_TENANTS | WITH_MODELS | OF_WHAT_IS_KEPT | OF_A_CONSOLE
    assert succeeded == set(OPERATIONS) - apart


@pytest.mark.slow
def test_every_operation_on_other_models_succeeds_as_documented(
    vector_stack: Stack, tmp_path: Path
) -> None:
    models = vector_models.sections(vector_models.tokenizer_folder(tmp_path / "tokenizer"))
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme"), **models)
    embeddings = {"model": "words", "input": ["Hi", "Ho"]}
    rerank = {"model": "ranker", "query": "Hi", "documents": ["Ho"], "return_documents": True}
    with (
        GatewayProcess(tmp_path / "g", vector_stack, config=config) as gateway,
        gateway.client("sk-acme") as client,
    ):
        _succeeds(client, "POST", "/v1/embeddings", {"json": embeddings}, {})
        base64 = embeddings | {"encoding_format": "base64"}
        _succeeds(client, "POST", "/v1/embeddings", {"json": base64}, {})
        _succeeds(client, "POST", "/v1/rerank", {"json": rerank}, {})


@pytest.mark.slow
def test_every_operation_on_what_is_kept_succeeds_as_documented(admin: httpx.Client) -> None:
    said = [{"role": "user", "content": "Hi"}]
    asked = {"model": "demo", "input": said, "max_output_tokens": 4}
    made = _succeeds(admin, "POST", "/v1/responses", {"json": asked}, {}).json()
    names = {"response_id": made["id"]}
    base = "/v1/responses/{response_id}"
    succeeded = set()

    def succeeds(method: str, path: str, **parts: Any) -> dict[str, Any]:
        succeeded.add(f"{method} {path}")
        answer: dict[str, Any] = _succeeds(admin, method, path, parts, names).json()
        return answer

    succeeds("GET", base)
    succeeds("GET", f"{base}/input_items", params={"order": "asc", "limit": 1})
    succeeds("DELETE", base)
    later = _succeeds(admin, "POST", "/v1/responses", {"json": asked | {"background": True}}, {})
    names["response_id"] = later.json()["id"]
    succeeds("POST", f"{base}/cancel")
    new = {"items": said, "metadata": {"k": "v"}}
    names["conversation_id"] = succeeds("POST", "/v1/conversations", json=new)["id"]
    base = "/v1/conversations/{conversation_id}"
    added = succeeds("POST", f"{base}/items", json={"items": said})
    names["item_id"] = added["first_id"]
    succeeds("GET", base)
    succeeds("POST", base, json={"metadata": None})
    succeeds("GET", f"{base}/items")
    succeeds("GET", f"{base}/items/{{item_id}}")
    succeeds("DELETE", f"{base}/items/{{item_id}}")
    succeeds("DELETE", base)
    assert succeeded == OF_WHAT_IS_KEPT


@pytest.mark.slow
def test_every_operation_on_keys_succeeds_as_documented(stack: Stack, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme"))
    key = new_key()
    with (
        GatewayProcess(tmp_path / "g", stack, config=config, admin_key=key) as gateway,
        gateway.client(key) as admin,
    ):
        wanted = {"tenant": "acme", "note": "documented", "expires_in": 60}
        made = _succeeds(admin, "POST", "/v1/keys", {"json": wanted}, {}).json()
        _succeeds(admin, "GET", "/v1/keys", {}, {})
        _succeeds(admin, "DELETE", "/v1/keys/{key_id}", {}, {"key_id": made["id"]})


@pytest.mark.slow
def test_every_operation_of_a_console_succeeds_as_documented(
    long_stack: Stack, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme", requests_per_minute=100))
    key = new_key()
    asked = {"model": "demo", "prompt": "Hi", "stream": True, "ignore_eos": True}
    succeeded = set()
    with (
        GatewayProcess(tmp_path / "g", long_stack, config=config, admin_key=key) as gateway,
        gateway.client(key) as admin,
        gateway.client("sk-acme") as client,
        client.stream("POST", "/v1/completions", json=asked) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        names = {
            "request_id": answer.headers["x-request-id"],
            "endpoint": long_stack.triton_grpc,
        }

        def succeeds(as_who: httpx.Client, operation: str, **parts: Any) -> dict[str, Any]:
            succeeded.add(operation)
            method, path = operation.split()
            told: dict[str, Any] = _succeeds(as_who, method, path, parts, names).json()
            return told

        running = succeeds(client, "GET /v1/requests/{request_id}")
        assert running["state"] == "running"
        [own] = succeeds(admin, "GET /v1/admin/state")["requests"]
        names["request_id"] = own
        succeeds(admin, "POST /v1/admin/requests/{request_id}/cancel")
        assert "ended_by_operator" in "".join(lines)
        succeeds(admin, "POST /v1/admin/replicas/{endpoint}", json={"weight": 3})
        succeeds(admin, "DELETE /v1/admin/replicas/{endpoint}")
        with admin.stream("GET", "/v1/admin/events") as events:
            told = DOCUMENT["paths"]["/v1/admin/events"]["get"]["responses"]["200"]["content"]
            assert events.headers["content-type"].partition(";")[0] in told
    assert succeeded == OF_A_CONSOLE - ENDLESS


def _succeeds(
    admin: httpx.Client, method: str, path: str, parts: dict[str, Any], in_path: dict[str, str]
) -> httpx.Response:
    names = {name: value for name, value in in_path.items() if f"{{{name}}}" in path}
    request = admin.build_request(method, path.format(**names), **parts)
    request.read()  # so that a failure report can show the body
    response = admin.send(request)
    assert response.status_code in {200, 201}, (method, path, response.text)
    _documented().check(f"{method} {path}", names, response)
    return response


def _upload(folder: Path, seed: int) -> dict[str, Any]:
    write_adapter(folder, DEMO_MODEL, seed=seed)
    files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    return {"data": {"name": "documented", "base": "demo"}, "files": files}


def test_every_route_is_in_the_document(stack: Stack) -> None:
    assert httpx.get(f"{stack.gateway}/openapi.json", timeout=PATIENCE_S).json() == DOCUMENT
    routes = {
        f"{method} {route.path_format}"
        for route in ROUTES
        for method in route.methods
        # HEAD works wherever GET does. Other servers' names of health checks are undocumented.
        if route.include_in_schema and method != "HEAD"
    }
    assert set(OPERATIONS) == routes


def test_the_document_is_openapi_3_1() -> None:
    _documented().validate()


@pytest.mark.parametrize("name", ["ChatCompletionRequest", "CompletionRequest"])
def test_parameters_that_are_refused_are_not_listed(name: str) -> None:
    listed = set(DOCUMENT["components"]["schemas"][name]["properties"])
    assert listed >= HARMLESS | HINTS
    assert "web_search_options" not in listed


def test_the_allowed_methods_of_a_path_are_all_named(stack: Stack) -> None:
    response = httpx.put(f"{stack.gateway}/v1/adapters", timeout=PATIENCE_S)
    assert response.headers["allow"] == "GET, HEAD, POST"


def test_an_object_of_a_known_type_is_valid_where_one_of_any_type_is() -> None:
    namespace = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
    reference = {"$ref": "#/components/schemas/NamespaceTool"}
    jsonschema.validate(namespace, reference | {"components": DOCUMENT["components"]})
