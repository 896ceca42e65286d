"""The model list as the anthropic package reads it, against the real stack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx
import pytest

from ops.commands.up import DEMO_ADAPTERS
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S

EVERY, NARROW = "sk-every-0001", "sk-narrow-0002"
VERSION = {"anthropic-version": "2023-06-01"}
ADAPTERS = ["ja", "zh", "zh-2", "zh-3"]


@pytest.fixture(scope="module")
def gateway(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("models")
    tenants = [tenant("every", EVERY), tenant("narrow", NARROW, models=["ja"])]
    config = write_config(folder / "gateway.yaml", *tenants)
    adapters = {name: str(DEMO_ADAPTERS / name[:2]) for name in ADAPTERS}
    with GatewayProcess(folder, stack, config=config, adapters=json.dumps(adapters)) as gateway:
        yield gateway


def _claude(gateway: GatewayProcess, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=PATIENCE_S)


def _list(gateway: GatewayProcess, key: str = EVERY, **query: Any) -> httpx.Response:
    headers = VERSION | {"x-api-key": key}
    return httpx.get(f"{gateway.url}/v1/models", params=query, headers=headers, timeout=PATIENCE_S)


def test_the_package_lists_and_retrieves_models(gateway: GatewayProcess) -> None:
    with gateway.client(EVERY) as http:
        others = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    with _claude(gateway, EVERY) as client:
        models = list(client.models.list())
        assert [model.id for model in models] == [*others]
        assert {"demo", *ADAPTERS} == others.keys()
        for model in models:
            other = others[model.id]
            assert (model.type, model.display_name, model.lifecycle) == (
                "model",
                model.id,
                "active",
            )
            assert model.created_at == datetime.fromtimestamp(other["created"], UTC)
            assert model.max_input_tokens == model.max_tokens == other["max_model_len"] > 0
            assert client.models.retrieve(model.id) == model


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 1000])
def test_pages_join_to_the_list_in_both_directions(gateway: GatewayProcess, limit: int) -> None:
    with _claude(gateway, EVERY) as client:
        ids = [model.id for model in client.models.list()]
        assert [model.id for model in client.models.list(limit=limit)] == ids
        pages = client.models.list(limit=limit, before_id=ids[-1]).iter_pages()
        backwards = [[model.id for model in page.data] for page in pages]
        assert [name for page in reversed(backwards) for name in page] == ids[:-1]
    page = _list(gateway, limit=limit).json()
    got = [model["id"] for model in page["data"]]
    assert (page["first_id"], page["last_id"]) == (got[0], got[-1])
    assert page["has_more"] == (limit < len(ids))


def test_an_empty_page_has_no_ids(gateway: GatewayProcess) -> None:
    empty = {"data": [], "has_more": False, "first_id": None, "last_id": None}
    last = _list(gateway).json()["last_id"]
    assert _list(gateway, after_id=last).json() == empty
    assert _list(gateway, **{"lifecycle[]": "retired"}).json() == empty
    assert _list(gateway, **{"lifecycle[]": ["retired", "active"]}).json()["data"]


def test_a_key_finds_only_its_models(gateway: GatewayProcess) -> None:
    with _claude(gateway, NARROW) as client:
        assert [model.id for model in client.models.list()] == ["ja"]
        assert client.models.retrieve("ja").id == "ja"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.models.retrieve("nothing")
        body: Any = unknown.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    hidden, absent = [_list(gateway, NARROW, after_id=name) for name in ("zh", "no")]
    assert hidden.status_code == absent.status_code == 400
    assert hidden.text.replace("'zh'", "'no'") == absent.text


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"limit": 0}, "limit: found '0'; allowed: an integer from 1 to 1000."),
        ({"limit": 1001}, "limit: found '1001'"),
        ({"limit": "x"}, "limit: found 'x'"),
        ({"limit": "9" * 5000}, "limit: found '9999"),
        ({"limit": ""}, "limit: found ''"),
        ({"after_id": "no"}, "after_id: found 'no'; allowed: the id of a model in this list."),
        ({"before_id": "no"}, "before_id: found 'no'"),
        ({"before_id": "ja", "after_id": "zh"}, "before_id and after_id exclude each other."),
        ({"lifecycle": "old"}, "lifecycle: found 'old'; allowed: active, deprecated, retired."),
    ],
)
def test_a_bad_query_is_refused_in_anthropics_form(
    gateway: GatewayProcess, query: dict[str, Any], said: str
) -> None:
    answer = _list(gateway, **query)
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].startswith(said)


def test_a_wrong_key_is_refused_in_the_form_of_the_request(gateway: GatewayProcess) -> None:
    told = _list(gateway, "sk-wrong").json()
    assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
    with gateway.client("sk-wrong") as http:
        assert http.get("/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_without_the_header_openais_form_stays(gateway: GatewayProcess) -> None:
    with gateway.client(EVERY) as http:
        listed = http.get("/v1/models", params={"limit": 1}).json()
        assert listed["object"] == "list"
        assert len(listed["data"]) == 1 + len(ADAPTERS)
        assert listed["data"][0]["context_length"] == listed["data"][0]["max_model_len"] > 0
        assert http.get("/v1/models/nothing").json()["error"]["code"] == "model_not_found"
