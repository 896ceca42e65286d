"""/v1/embeddings and /v1/rerank with a real embedding model in the stack's Triton."""

from __future__ import annotations

import base64
import importlib.util
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from langchain_openai import OpenAIEmbeddings
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from ops.local_stack.repository import REPOSITORY
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack, Up
from tests.support.metrics import metric
from tests.support.patience import PATIENCE_S
from tests.support.vector_models import BATCH, WIDTH, sections, tokenizer_folder

KEY, SMALL, WORDS_ONLY = "sk-all", "sk-small", "sk-words"
TEXTS = [
    "The cat sat on the mat.",
    "A kitten rests on a rug.",
    "Interest rates rose again.",
    "é 日本",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vectors")


def configured(folder: Path, **more: Any) -> Path:
    return write_config(
        folder / "config.yaml",
        tenant("all", KEY),
        tenant("small", SMALL, tokens_per_minute=20, models=["words", "ranker"]),
        tenant("words", WORDS_ONLY, models=["words"]),
        **sections(tokenizer_folder(folder / "tokenizer")),
        **more,
    )


@pytest.fixture(scope="module")
def gateway(vector_stack: Stack, folder: Path) -> Iterator[GatewayProcess]:
    config, log = configured(folder), folder / "usage.jsonl"
    with GatewayProcess(
        folder / "gateway", vector_stack, config=config, usage_log=log, admin_port=0
    ) as gateway:
        yield gateway


@pytest.fixture
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    with gateway.client(KEY) as client:
        yield client


@pytest.fixture
def sdk(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    url = f"{gateway.url}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@cache
def _model() -> tuple[Any, Any]:
    spec = importlib.util.find_spec("wordllama")
    assert spec is not None
    assert spec.origin is not None
    wheel = Path(spec.origin).parent
    [weights] = load_file(wheel / "weights" / "l2_supercat_256.safetensors").values()
    tokenizer = wheel / "tokenizers" / "l2_supercat_tokenizer_config.json"
    return weights.astype(np.float32), Tokenizer.from_file(str(tokenizer))


def ids_of(text: str) -> list[int]:
    return list(_model()[1].encode(text).ids)


def vector_of(text: str) -> Any:
    return _model()[0][ids_of(text)].mean(axis=0)


def make(client: openai.OpenAI, given: Any, model: str = "words", **more: Any) -> Any:
    answer = client.embeddings.create(model=model, input=given, **more)
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data], np.float32), answer


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_vectors_are_the_models(sdk: openai.OpenAI, encoding: Any) -> None:
    more = {} if encoding is None else {"encoding_format": encoding}
    answer = sdk.embeddings.create(model="words", input=TEXTS, user="somebody", **more)
    found: Any = [each.embedding for each in answer.data]
    if encoding == "base64":  # the package decodes base64 only if it chose the encoding itself
        found = [struct.unpack(f"<{WIDTH}f", base64.b64decode(each)) for each in found]
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose(found, [vector_of(text) for text in TEXTS], atol=1e-6)
    assert answer.usage.prompt_tokens == sum(len(ids_of(text)) for text in TEXTS)
    assert (answer.model, answer.object) == ("words", "list")
    assert np.dot(found[0], found[1]) > np.dot(found[0], found[2])


def test_base64_and_numbers_are_the_same(http: httpx.Client) -> None:
    asked = {"model": "odd", "input": TEXTS}
    numbers = http.post("/v1/embeddings", json=asked).json()["data"]
    text = http.post("/v1/embeddings", json=asked | {"encoding_format": "base64"}).json()["data"]
    for one, other in zip(numbers, text, strict=True):
        exact = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert (np.array(one["embedding"], np.float32) == exact).all()


def test_many_are_cut_into_the_models_batches(sdk: openai.OpenAI) -> None:
    texts = [f"{word} number {n}" for n in range(3 * BATCH) for word in ("cat", "a longer phrase")]
    together, _ = make(sdk, texts)
    alone = np.concatenate([make(sdk, text)[0] for text in texts[:: BATCH + 1]])
    np.testing.assert_array_equal(together[:: BATCH + 1], alone)
    by_ids, _ = make(sdk, texts, "ids")
    np.testing.assert_allclose(by_ids, together, atol=1e-6)


def test_token_ids(sdk: openai.OpenAI) -> None:
    ids = [ids_of(text) for text in TEXTS]
    found, answer = make(sdk, ids, "ids")
    np.testing.assert_allclose(found, [vector_of(text) for text in TEXTS], atol=1e-6)
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    np.testing.assert_array_equal(make(sdk, ids[0], "ids")[0], make(sdk, [ids[0]], "ids")[0])


def test_cut_vectors_have_length_1(sdk: openai.OpenAI) -> None:
    found, _ = make(sdk, TEXTS, dimensions=64)
    cut = np.array([vector_of(text)[:64] for text in TEXTS])
    np.testing.assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-6)
    whole, _ = make(sdk, TEXTS, dimensions=WIDTH)
    np.testing.assert_array_equal(whole, make(sdk, TEXTS)[0])


def test_langchain(gateway: GatewayProcess) -> None:
    with openai.DefaultHttpxClient() as client:
        embeddings = OpenAIEmbeddings(
            model="words",
            base_url=f"{gateway.url}/v1",
            api_key=KEY,  # type: ignore[arg-type]
            check_embedding_ctx_length=False,
            http_client=client,
        )
        found = embeddings.embed_documents(TEXTS)
    np.testing.assert_allclose(found, [vector_of(text) for text in TEXTS], atol=1e-6)


def test_documents_are_ranked(http: httpx.Client) -> None:
    documents = [TEXTS[2], {"text": TEXTS[1]}, "Feline animals like carpets."] * 4
    asked = {"model": "ranker", "query": TEXTS[0], "documents": documents}
    answer = http.post("/v1/rerank", json=asked | {"return_documents": True}).json()
    results = answer["results"]
    assert sorted(each["index"] for each in results) == list(range(len(documents)))
    found = [each["relevance_score"] for each in results]
    assert found == sorted(found, reverse=True)
    assert results[0]["index"] == 1  # documents with equal scores stay in their original order
    assert results[0]["document"] == {"text": TEXTS[1]}
    a, b = vector_of(TEXTS[0]), vector_of(TEXTS[1])
    assert found[0] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        best = http.post(path, json=asked | {"top_n": 2}).json()["results"]
        assert best == [{k: each[k] for k in ("index", "relevance_score")} for each in results[:2]]


LONG = "word " * 600
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
RANKED = {"model": "ranker", "query": "a", "documents": ["b", "c"]}
REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    (EMBEDDINGS, {"model": "words"}, 400, "input"),
    (EMBEDDINGS, {"model": "words", "input": ""}, 400, "input"),
    (EMBEDDINGS, {"model": "words", "input": []}, 400, "input"),
    (EMBEDDINGS, {"model": "words", "input": ["a", ""]}, 400, "input[1]"),
    (EMBEDDINGS, {"model": "words", "input": ["a"] * 2049}, 400, "input"),
    (EMBEDDINGS, {"model": "words", "input": ["a", [1]]}, 400, "input[1]"),
    (EMBEDDINGS, {"model": "words", "input": [1, 2]}, 400, "input"),
    (EMBEDDINGS, {"model": "words", "input": ["a", LONG]}, 400, "input"),
    (EMBEDDINGS, {"model": "words", "input": "a" * 2**20}, 400, "input"),
    (EMBEDDINGS, {"model": "ids", "input": [[1], []]}, 400, "input[1]"),
    (EMBEDDINGS, {"model": "ids", "input": [1, 32_000]}, 400, "input"),
    (EMBEDDINGS, {"model": "ids", "input": [1, -1]}, 400, "input[1]"),
    (EMBEDDINGS, {"model": "ids", "input": [1] * 513}, 400, "input"),
    (EMBEDDINGS, {"model": "ids", "input": "a", "dimensions": 8}, 400, "dimensions"),
    (EMBEDDINGS, {"model": "words", "input": "a", "dimensions": 257}, 400, "dimensions"),
    (EMBEDDINGS, {"model": "words", "input": "a", "dimensions": 0}, 400, "dimensions"),
    (EMBEDDINGS, {"model": "words", "input": "a", "encoding_format": "x"}, 400, "encoding_format"),
    (EMBEDDINGS, {"model": "words", "input": "a", "truncate": 1}, 400, "truncate"),
    (EMBEDDINGS, {"model": "demo", "input": "a"}, 400, "model"),
    (EMBEDDINGS, {"model": "ranker", "input": "a"}, 400, "model"),
    (EMBEDDINGS, {"model": "nobody", "input": "a"}, 404, "model"),
    (EMBEDDINGS, {"model": "absent", "input": "a"}, 503, None),
    (EMBEDDINGS, {"model": "odd", "input": ["a", "nan"]}, 502, None),
    (EMBEDDINGS, {"model": "odd", "input": ["a", "unpooled"]}, 502, None),
    (EMBEDDINGS, {"model": "odd", "input": ["a", "one row"]}, 502, None),
    (EMBEDDINGS, {"model": "odd", "input": ["a", "raise"]}, 500, None),
    (RERANK, {"model": "ranker", "documents": ["a"]}, 400, "query"),
    (RERANK, {"model": "ranker", "query": "", "documents": ["a"]}, 400, "query"),
    (RERANK, {"model": "ranker", "query": "a", "documents": []}, 400, "documents"),
    (RERANK, {"model": "ranker", "query": "a", "documents": ["a", ""]}, 400, "documents[1]"),
    (
        RERANK,
        {"model": "ranker", "query": "a", "documents": [{"txt": "a"}]},
        400,
        "documents[0].text",
    ),
    (RERANK, {"model": "ranker", "query": "a", "documents": [LONG]}, 400, "documents"),
    (RERANK, {"model": "ranker", "query": "a" * 2**18, "documents": ["a"] * 200}, 400, "query"),
    (RERANK, {"model": "ranker", "query": "a", "documents": ["a"], "top_n": 0}, 400, "top_n"),
    (RERANK, {"model": "words", "query": "a", "documents": ["a"]}, 400, "model"),
    ("/v1/completions", {"model": "words", "prompt": "a"}, 400, "model"),
    ("/tokenize", {"model": "ranker", "prompt": "a"}, 400, "model"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), REFUSED)
def test_refusals_name_what_is_wrong(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "secret" not in error["message"]
    # A client's bad request does not make the model unavailable for other clients.
    if body["model"] == "odd":
        assert http.post(path, json=body | {"input": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [(EMBEDDINGS, {"model": "words", "input": "a"}), (RERANK, RANKED)],
)
def test_unknown_names_follow_the_setting(
    vector_stack: Stack, http: httpx.Client, folder: Path, path: str, fields: dict[str, Any]
) -> None:
    asked = fields | {"next_months": 1}
    answer = http.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-parameters"] == "next_months"
    refusing = folder / "refusing"
    with (
        GatewayProcess(
            refusing, vector_stack, config=configured(folder), unknown_parameters="refuse"
        ) as gateway,
        gateway.client(KEY) as client,
    ):
        refused = client.post(path, json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("Unrecognized request argument: next")
        assert client.post(path, json=fields).status_code == 200


def test_models_are_listed(http: httpx.Client, gateway: GatewayProcess) -> None:
    found = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert {"demo", "words", "ids", "ranker"} <= found.keys()
    assert (found["words"]["modes"], found["words"]["max_model_len"]) == (["embeddings"], 512)
    assert found["ranker"] == http.get("/v1/models/ranker").json()
    with gateway.client(WORDS_ONLY) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["words"]
        assert client.get("/v1/models/ranker").status_code == 403
        asked = {"model": "ids", "input": "a"}
        assert client.post("/v1/embeddings", json=asked).status_code == 403
        assert client.post("/v1/embeddings", json=asked | {"model": "words"}).status_code == 200
    assert (
        httpx.post(f"{gateway.url}/v1/embeddings", json=asked, timeout=PATIENCE_S).status_code
        == 401
    )


def test_tokens_are_limited_and_billed(gateway: GatewayProcess, folder: Path) -> None:
    cost = len(ids_of("one two three four"))
    with gateway.client(SMALL) as client:
        asked = {"model": "words", "input": "one two three four"}
        first = client.post("/v1/embeddings", json=asked, headers={"x-request-id": "first"})
        assert first.headers["x-ratelimit-remaining-tokens"] == str(20 - cost)
        for _ in range(20 // cost - 1):
            assert client.post("/v1/embeddings", json=asked).status_code == 200
        refused = client.post("/v1/embeddings", json=asked)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
    lines = [json.loads(line) for line in (folder / "usage.jsonl").read_text().splitlines()]
    [line] = [line for line in lines if line["request_id"] == "first"]
    assert (line["tenant"], line["model"], line["status"]) == ("small", "words", 200)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (cost, 0)
    assert len([line for line in lines if line["tenant"] == "small"]) == 20 // cost
    labels = {"tenant": "small", "model": "words", "kind": "prompt"}
    page = f"http://127.0.0.1:{gateway.admin_port}/metrics"
    assert metric(page, "gateway_tenant_tokens_total", **labels) == 20 // cost * cost
    assert metric(page, "gateway_prompt_tokens_total", model="words") >= 20 // cost * cost
    assert metric(page, "gateway_inputs_total", model="words") >= 20 // cost


def _until(told: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not (told.exists() and told.read_text() == text):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_that_leaves_frees_the_model(
    http: httpx.Client, gateway: GatewayProcess, up: Up
) -> None:
    """Check that a disconnect cancels the input `wait`, which blocks the model's only instance."""
    told = up.state_dir / REPOSITORY / "odd" / "told"
    told.unlink(missing_ok=True)
    body = json.dumps({"model": "odd", "input": "wait"}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        _until(told, "waits")
    _until(told, "cancelled")
    gateway.wait_for("/v1/embeddings 499")
    assert http.post("/v1/embeddings", json={"model": "odd", "input": "a"}).status_code == 200


def test_a_deadline(http: httpx.Client) -> None:
    asked = {"model": "odd", "input": "wait"}
    answer = http.post("/v1/embeddings", json=asked, headers={"x-request-timeout": "0.2"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert http.post("/v1/embeddings", json=asked | {"input": "a"}).status_code == 200


def test_many_wide_vectors_stand_in_nobodys_way(gateway: GatewayProcess) -> None:
    """Check that other requests are served while 90 MB of JSON are written, in little memory.

    The response has 2048 vectors of 4096 numbers.
    """
    process = psutil.Process(gateway.process.pid)
    before, peak = process.memory_info().rss, 0
    page = f"http://127.0.0.1:{gateway.admin_port}/metrics"
    texts = [f"{n} " * 100 for n in range(2048)]
    made = metric(page, "gateway_inputs_total", model="odd") + len(texts)
    begun = threading.Event()
    sizes: list[int] = []

    def ask() -> None:
        body = {"model": "odd", "input": texts}
        with (
            gateway.client(KEY) as client,
            client.stream("POST", "/v1/embeddings", json=body) as answer,
        ):
            begun.set()
            sizes.append(sum(map(len, answer.iter_bytes())))

    thread = threading.Thread(target=ask)
    thread.start()
    while_written = 0
    with gateway.client(WORDS_ONLY) as client:
        while thread.is_alive():
            peak = max(peak, process.memory_info().rss)
            all_made = metric(page, "gateway_inputs_total", model="odd") == made
            asked = {"model": "words", "input": "a"}
            assert client.post("/v1/embeddings", json=asked).status_code == 200
            while_written += all_made and not begun.is_set()
    thread.join()
    assert sizes[0] > 70e6
    assert peak - before < 400e6
    # If the event loop wrote the response, no other request would be answered before it is sent.
    assert while_written > 1
