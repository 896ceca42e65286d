"""Circuit breaker, choice of a replica, and discovery of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import StoreUnavailable
from gateway.errors import EngineBroken, EngineError, EngineSilent, EngineUnavailable
from gateway.observability.request_context import RequestContext
from gateway.scheduling.balancer import choose
from gateway.scheduling.breaker import Breaker
from gateway.scheduling.discovery import Target, resolve
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.triton.engine import Engine


@dataclass
class _Place:
    endpoint: str
    in_flight: int = 0
    weight: float = 100.0


def _places(count: int) -> list[_Place]:
    return [_Place(f"10.0.0.{i}:8001") for i in range(count)]


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _fail(breaker: Breaker, clock: _Clock, times: int) -> None:
    for _ in range(times):
        clock.now += 0.2
        breaker.record_failure(clock.now - 0.1, probe=False)


def test_three_failures_in_a_row_open_the_breaker() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    _fail(breaker, clock, 2)
    breaker.record_success()
    _fail(breaker, clock, 2)
    assert breaker.allows
    _fail(breaker, clock, 1)
    assert not breaker.allows


def _replica(breaker: Breaker) -> Replica:
    engine = Engine(
        "127.0.0.1:1",
        "tensorrt_llm",
        vocab_size=10,
        max_seq_len=None,
        on_stop=lambda _: None,
        on_upload=lambda _: None,
    )
    return Replica("127.0.0.1:1", engine, breaker)


def _end(replica: Replica, failure: BaseException) -> None:
    """Run a request on the replica that ends with `failure`."""
    with contextlib.suppress(type(failure)):
        with ReplicaLease(replica, RequestContext("id"), lambda _: None):
            assert replica.in_flight == 1
            raise failure


@pytest.mark.parametrize(
    ("failure", "blamed"),
    [
        (EngineUnavailable("away"), True),
        (EngineBroken("nonsense"), True),
        (EngineError("not this one"), False),
        (StoreUnavailable("away"), False),
        (TimeoutError(), False),  # a deadline that the client chose
        (EngineSilent("nothing came"), True),
        (asyncio.CancelledError(), False),
    ],
)
async def test_what_a_replica_is_blamed_for(failure: BaseException, blamed: bool) -> None:
    replica = _replica(Breaker())
    for _ in range(3):
        _end(replica, failure)
    assert replica.in_flight == 0
    assert replica.breaker.allows is not blamed
    await replica.engine.close()


async def test_a_probe_whose_client_leaves_makes_room_for_another() -> None:
    clock = _Clock()
    replica = _replica(Breaker(clock))
    for _ in range(3):
        clock.now += 1.0
        _end(replica, EngineUnavailable("away"))
    assert not replica.breaker.allows
    clock.now += 1.0
    _end(replica, asyncio.CancelledError())
    assert replica.breaker.is_open
    assert replica.breaker.allows
    await replica.engine.close()


def test_a_broken_connection_is_one_failure() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    clock.now = 5.0
    for began in range(50):
        breaker.record_failure(began / 10, probe=False)
    assert breaker.allows


def test_what_was_sent_before_does_not_lengthen_the_pause() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    _fail(breaker, clock, 3)
    opened = clock.now
    _fail(breaker, clock, 4)
    clock.now = opened + 1.01
    assert breaker.allows


def test_one_probe_at_a_time_decides() -> None:
    clock = _Clock()
    breaker = Breaker(clock)
    _fail(breaker, clock, 3)
    clock.now = 0.0 + clock.now + 1.0
    start = clock.now - 1.0
    assert breaker.allows
    assert breaker.begin()
    assert not breaker.allows
    breaker.record_failure(clock.now, probe=True)
    clock.now = start + 2.9
    assert not breaker.allows  # the pause has doubled
    clock.now = start + 3.1
    assert breaker.begin()
    breaker.record_unknown(probe=True)
    assert breaker.begin()  # the last probe ended without a result
    breaker.record_success()
    assert breaker.allows
    assert not breaker.is_open


@given(st.binary(min_size=1), st.integers(2, 8))
def test_a_key_stays_at_home_while_there_is_room(key: bytes, count: int) -> None:
    places = _places(count)
    homes = {choose(places, key).endpoint for _ in range(20)}
    assert len(homes) == 1
    [home] = homes
    without = [place for place in places if place.endpoint != home]
    # Removing another replica does not move the key.
    assert choose([p for p in places if p != without[0]], key).endpoint == home


@given(st.integers(2, 8), st.lists(st.binary(min_size=1, max_size=2), max_size=200))
def test_load_is_bounded_however_the_keys_are_spread(count: int, keys: list[bytes]) -> None:
    places = _places(count)
    for key in keys:
        choose(places, key).in_flight += 1
    assert max(p.in_flight for p in places) <= max(1.25 * len(keys) / count + 2, 5)


def test_without_a_key_the_least_loaded_is_taken() -> None:
    places = _places(3)
    for _ in range(30):
        choose(places, None).in_flight += 1
    assert [p.in_flight for p in places] == [10, 10, 10]


def test_many_adapters_live_on_one_replica_each() -> None:
    places = _places(4)
    homes = Counter(choose(places, f"adapter {i}".encode()).endpoint for i in range(200))
    assert len(homes) == 4
    assert min(homes.values()) > 25


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lookup(host: str, port: int, **_: object) -> list[object]:
        if host == "gone":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        if host == "away":
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [(0, 0, 0, "", (a, port)) for a in ("10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup, raising=False)
    one, name = Target("a:1"), Target("dns:///triton:8001", 7, drain=True)
    found, away = await resolve([one, name, Target("10.0.0.1:8001", 3)])
    assert not away
    addresses = ["10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]
    assert found == {"a:1": one} | dict.fromkeys(addresses, name)
    assert list(found) == ["a:1", *addresses]
    found, _ = await resolve([Target("grpcs+dns:///triton:8001")])
    assert list(found) == [
        *("grpcs://10.0.0.1:8001#triton", "grpcs://10.0.0.2:8001#triton"),
        "grpcs://[fd00::1]:8001#triton",
    ]
    assert await resolve([Target("dns:///gone:8001")]) == ({}, False)
    assert await resolve([one, Target("dns:///away:8001")]) == ({"a:1": one}, True)


weights = st.lists(st.sampled_from([0.5, 1.0, 10.0, 90.0, 100.0]), min_size=2, max_size=5)


@given(weights)
def test_keys_and_requests_without_one_are_shared_by_weight(given_weights: list[float]) -> None:
    places = [_Place(f"10.0.0.{i}:8001", weight=w) for i, w in enumerate(given_weights)]
    keys = [f"key {number}".encode() for number in range(2000)]
    found = Counter(choose(places, key).endpoint for key in keys)
    drawn = found
    if len(set(given_weights)) > 1:  # for equal weights the least loaded replica is chosen
        drawn = Counter(choose(places, None).endpoint for _ in keys)
    for place in places:
        share = place.weight / sum(given_weights)
        assert abs(found[place.endpoint] / len(keys) - share) < 0.06
        assert abs(drawn[place.endpoint] / len(keys) - share) < 0.06


@given(weights, st.integers(0, 4), st.binary(min_size=1))
def test_a_greater_weight_takes_keys_and_gives_none_away(
    given_weights: list[float], which: int, key: bytes
) -> None:
    places = [_Place(f"10.0.0.{i}:8001", weight=w) for i, w in enumerate(given_weights)]
    home = choose(places, key)
    greater = places[which % len(places)]
    greater.weight *= 4
    assert choose(places, key) in (home, greater)


@given(weights, st.lists(st.binary(min_size=1, max_size=2), max_size=200))
def test_load_is_bounded_by_weight(given_weights: list[float], keys: list[bytes]) -> None:
    places = [_Place(f"10.0.0.{i}:8001", weight=w) for i, w in enumerate(given_weights)]
    for key in keys:
        choose(places, key).in_flight += 1
    for place in places:
        share = place.weight / sum(given_weights)
        assert place.in_flight <= max(1.25 * share * (len(keys) + 1) + 1, 4)


def test_without_any_weight_the_least_loaded_is_taken() -> None:
    places = [_Place(f"10.0.0.{i}:8001", weight=0.0) for i in range(3)]
    for number in range(30):
        choose(places, None if number % 2 else b"key").in_flight += 1
    assert sum(place.in_flight for place in places) == 30
