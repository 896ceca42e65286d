"""Reserved tokens count against a limit for as long as the request may still use them."""

from __future__ import annotations

from array import array

import pytest

from gateway.catalog.router import Route
from gateway.config.tenants import Tenant
from gateway.errors import RateLimited
from gateway.generation.batch import Batch
from gateway.generation.engine_request import Generation
from gateway.generation.options import DEFAULT_CALLER
from gateway.observability.request_context import RequestContext
from gateway.tenancy.accounting import Account, Accounting
from gateway.tenancy.limits import limits
from gateway.tenancy.limits.limits import Limits
from gateway.tenancy.usage_log import UsageRecord

ACME = Tenant(name="acme", keys=[], models=["*"], tokens_per_minute=1000)
WANTED = 900


class Clock:
    """A replacement for the `time` module in the limits."""

    def __init__(self) -> None:
        self.now_s = 7_000.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    return clock


def _beam_search() -> Batch:
    generation = Generation(
        request_id="r",
        prompt_ids=array("i", [1] * 100),
        max_tokens=(WANTED - 100) // 4,
        seed=0,
        beams=4,
    )
    return Batch(
        request_id="r",
        generations=[generation],
        prompts=1,
        choices=4,
        prompt_tokens=100,
        fingerprint="",
        caller=DEFAULT_CALLER,
        timeout_s=600.0,
        deadline=600.0,
    )


async def _open(accounting: Accounting, batch: Batch) -> Account:
    return await accounting.open(
        RequestContext("r"),
        batch,
        await accounting.count(ACME, batch.slots),
        tenant=ACME,
        route=Route("base"),
        stated=True,
        status_of=lambda error: 200,
    )


async def test_what_has_no_token_for_a_minute_keeps_its_reservation(clock: Clock) -> None:
    """A beam search reports its tokens only at its end, so its reservation lasts until then."""
    used: list[UsageRecord] = []
    accounting = Accounting(Limits(None), used.append, "base", logs_anonymous=True)
    batch = _beam_search()
    account = await _open(accounting, batch)
    async with account:
        batch.record_sent(0)
        for _ in range(2 * 200):
            clock.now_s += 0.5
            await account.record_usage()
            with pytest.raises(RateLimited):
                await _open(accounting, _beam_search())
        batch.meter.tokens = 300
    # The end releases the tokens that were not used, and counts the used ones from then on.
    assert [one.completion_tokens for one in used] == [300]
    with pytest.raises(RateLimited, match="remaining 600"):
        await _open(accounting, _beam_search())
    clock.now_s += 61
    await _open(accounting, _beam_search())
