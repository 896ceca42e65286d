"""The table of failures: each exception has a row, and no row discloses internal details."""

from __future__ import annotations

import errno
import importlib
import pkgutil
from collections.abc import Iterator

import orjson
import pytest

import adapters
import gateway
import lora_store
from adapters.errors import (
    AdapterError,
    ChangeUnknown,
    ShapeMismatch,
    StoreError,
    StoreUnavailable,
)
from gateway.api.failures import TABLE, Failure, build_response, status_of
from gateway.errors import (
    ClientDisconnected,
    GatewayError,
    InsufficientQuota,
    InvalidRequest,
    Overloaded,
    Quota,
    RateLimited,
)
from gateway.http.http_errors import MethodNotAllowed

_PACKAGES = (gateway, adapters, lora_store)
# Base classes, which are never raised themselves.
_ABSTRACT = {GatewayError, AdapterError}
# Exceptions that never reach `gateway.api`, or that are raised before the server starts.
_INTERNAL = {
    "adapters.config_json.ConfigError",
    "adapters.config_json.ConfigMissing",
    "adapters.patterns.NotAllowed",
    "gateway.config.file.ConfigurationError",
    "gateway.config.marked_yaml.YamlProblem",
    "gateway.conversations.disk.ForeignFile",
    "gateway.conversations.disk_thread.DiskUnavailable",
    "gateway.conversations.redis_threads.RedisDown",
    "gateway.database.database.InvalidUrl",
    "gateway.database.database.SchemaMismatch",
    "gateway.errors.EngineSilent",
    "gateway.errors.NotTakenInTime",
    "gateway.errors.ReplicaLeft",
    "gateway.former_state.move.RedisNotRead",
    "gateway.former_state.move._DryRun",
    "gateway.parsers.tools.parser.NotACall",
    "gateway.triton.http2.frames.ConnectionFault",
    "gateway.triton.pbtxt.PbtxtError",
    "gateway.triton.tokenizer.question.QuestionFailed",
    "lora_store.codec.CorruptBlob",
    "lora_store.primary.RedisUnavailable",
}


def _exceptions() -> Iterator[type[Exception]]:
    """Yield each exception class that the packages in `_PACKAGES` define."""
    for package in _PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for found in vars(importlib.import_module(module.name)).values():
                is_failure = isinstance(found, type) and issubclass(found, Exception)
                if is_failure and found.__module__ == module.name:
                    yield found


def _name(kind: type[Exception]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def test_every_failure_has_a_row() -> None:
    kinds = {kind for kind in _exceptions() if _name(kind) not in _INTERNAL} - _ABSTRACT
    assert {_name(kind) for kind in kinds - TABLE.keys()} == set()
    assert {_name(kind) for kind in TABLE.keys() - kinds} == set()
    assert [kind for kind in kinds if not issubclass(kind, Failure)] == []


@pytest.mark.parametrize(("kind", "row"), TABLE.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_rows_are_such_that_clients_understand_them(kind: type[Exception], row: object) -> None:
    status, told, code, retry_after_s = TABLE[kind]
    assert 400 <= status < 600
    if issubclass(kind, RateLimited):
        assert told == ("insufficient_quota" if kind is InsufficientQuota else "requests")
    else:
        assert told == ("server_error" if status >= 500 else "invalid_request_error")
    # Only a 503 has a time after which to retry: such a failure passes by itself.
    assert (retry_after_s is not None) == (status == 503)
    assert code is None or code.replace("_", "").isalpha()


def test_headers_say_whether_to_try_again() -> None:
    assert build_response(InvalidRequest("No.")).headers == {}
    assert build_response(Overloaded("Full.")).headers == {
        "x-should-retry": "true",
        "retry-after": "1",
    }
    assert build_response(Overloaded("Full.", 7.2)).headers["retry-after"] == "8"


def test_a_limit_in_openais_headers() -> None:
    quotas = {"tokens_per_minute": Quota(100, 93, 59_500)}
    told = build_response(
        RateLimited("Slow down.", limit="tokens_per_minute", wait_ms=1001, quotas=quotas)
    )
    assert told.status == 429
    assert orjson.loads(told.body)["error"]["type"] == "tokens"
    assert told.headers == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "7",
        "x-ratelimit-reset-tokens": "59.5s",
        "x-should-retry": "true",
        "retry-after": "2",
        "retry-after-ms": "1001",
    }
    # The reset header never exceeds one minute, the period of the limit.
    quotas = {"tokens_per_minute": Quota(100, 93, 60_600)}
    told = build_response(
        RateLimited("Slow down.", limit="tokens_per_minute", wait_ms=60_600, quotas=quotas)
    )
    assert told.headers["x-ratelimit-reset-tokens"] == "1m0s"
    assert told.headers["retry-after"] == "61"
    never = RateLimited("Never.", limit="requests_per_minute", wait_ms=None, quotas={})
    assert build_response(never).headers == {"x-should-retry": "false"}


def test_a_budget_that_is_used_up_is_not_worth_another_try() -> None:
    """The code is OpenAI's `insufficient_quota`. `retry-after` is for clients that wait anyway."""
    quotas = {"tokens_per_day": Quota(100, 93, 7_200_500)}
    told = build_response(
        InsufficientQuota("", limit="tokens_per_day", wait_ms=7_200_500, quotas=quotas)
    )
    error = orjson.loads(told.body)["error"]
    assert (told.status, error["type"], error["code"]) == (429, *["insufficient_quota"] * 2)
    assert told.headers["x-should-retry"] == "false"
    assert told.headers["retry-after"] == "7201"
    assert not [name for name in told.headers if name.startswith("x-ratelimit")]


def test_other_methods_are_named() -> None:
    told = build_response(MethodNotAllowed("PUT", "/v1/models", ["GET", "HEAD"]))
    assert told.headers == {"allow": "GET, HEAD"}


def test_adapters_name_the_field_and_stores_hide_their_addresses() -> None:
    told = orjson.loads(build_response(ShapeMismatch("a.npy", "lora_A", 3, 4)).body)["error"]
    assert (told["param"], told["code"]) == ("lora_A", "adapter_shape_mismatch")
    away = orjson.loads(build_response(StoreUnavailable("redis://10.0.0.1 is away")).body)["error"]
    assert "10.0.0.1" not in away["message"]
    assert away["code"] == "adapter_store_unavailable"


def test_no_client_repeats_a_change_that_may_have_been_made() -> None:
    told = build_response(ChangeUnknown("zh", OSError(errno.ENOSPC, "No space left on device")))
    assert (told.status, told.headers["x-should-retry"]) == (500, "false")
    assert orjson.loads(told.body)["error"]["code"] == "adapter_change_unknown"


def test_what_a_client_sent_comes_back_short_and_as_json() -> None:
    error = InvalidRequest("\ud800" + "x" * 10_000_000, param="y" * 10_000_000)
    body = build_response(error).body
    assert len(body) < 4000
    assert orjson.loads(body)["error"]["message"].startswith("?xx")


def test_the_status_that_an_answer_ended_with() -> None:
    assert status_of(None) == 200
    assert status_of(ClientDisconnected()) == 499
    assert status_of(StoreError("broken")) == 500
    assert status_of(ZeroDivisionError()) == 500
