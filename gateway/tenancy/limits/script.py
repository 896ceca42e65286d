"""Arguments and answers of the Redis script `script.lua`, which counts the tenants' limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import orjson

from gateway.config.limits import LIMITS, LimitName
from gateway.errors import Quota
from gateway.tenancy.limits.budgets import BudgetReport, BudgetTotal, find_first_day
from gateway.tenancy.limits.request import NEVER, LimitRequest

SCRIPT = files(__package__).joinpath("script.lua").read_text(encoding="utf-8")
_MAX_NUMBER = 2**53
_DAY_MS = 24 * 3600 * 1000
_DECISION_NUMBERS, _UNIT_NUMBERS, _LIMIT_NUMBERS = 5, 6, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """Call of the script for one tenant.

    The call reports the tenant's usage in this process, and asks the script to decide about a
    request.

    Attributes:
        tenant: the tenant's name.
        state: fields of the script's JSON argument: the tenant's usage in this process, and the
            units that `Lease` asks for.
        limits: the tenant's limits, in the same order as in the answer.
        budgets: the tenant's budgets.
        totals: the usage of the budgets that this process knows.
        used: number of requests and number of tokens that this process has used in total.
        spent: total number of used tokens that this process has counted in the tenant's budgets.
        spare: numbers of granted requests, tokens and slots that no request has taken yet. The
            process may use them while the call is in flight.
        head: the first waiting request, which the script admits or refuses; None if no request
            waits.
        epoch: `ScriptCaller.epoch` when the call was made.
        sent_at: time at which `state` was read, in seconds of the lease's clock.
    """

    tenant: str
    state: Mapping[str, object]
    limits: Mapping[LimitName, int]
    budgets: Mapping[LimitName, int]
    totals: Sequence[BudgetTotal]
    used: Sequence[int]
    spent: int
    spare: Sequence[int]
    head: LimitRequest | None
    epoch: int
    sent_at: float

    @property
    def key(self) -> str:
        return f"limits:{{{self.tenant}}}"

    def command(self, sha: str, gateway: str, lease_ms: int) -> tuple[object, ...]:
        head = self.head
        asked = head.limits if head is not None else {}
        limits = [
            (LIMITS[name].code, limit, head.amount_of(name) if head and name in asked else -1)
            for name, limit in self.limits.items()
        ]
        state = {**self.state, "gateway": gateway, "lease_ms": lease_ms, "limits": limits}
        keys = [self.key]
        if self.budgets:
            # Send all budgets, not only those of `head`: the script adds `spent` to each budget.
            state["codes"] = "".join([LIMITS[name].code for name in self.budgets])
            state["totals"] = [
                (LIMITS[each.name].code, each.first_day, each.used) for each in self.totals
            ]
            keys.append(f"budgets:{{{self.tenant}}}")
        return ("EVALSHA", sha, len(keys), *keys, orjson.dumps(state))


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer of the script to a call.

    Attributes:
        refused: name of the exceeded limit with the longest wait; None if the request is admitted,
            or if the call has no request.
        wait_ms: milliseconds until the request could be admitted, or NEVER.
        now_ms: time in milliseconds of Redis' clock.
        may_return: True if Redis can admit the request as soon as other gateways give back their
            spare units.
        granted: numbers of requests, tokens and slots that this process gets as new spare units.
        shares: maximum numbers of requests, tokens and slots that one process may have as spare
            units.
        quotas: usage of the limits. All units that were granted to processes count as used.
    """

    refused: LimitName | None
    wait_ms: int
    now_ms: int
    may_return: bool
    granted: Sequence[int]
    shares: Sequence[int]
    quotas: Mapping[LimitName, Quota]


def parse_grant(call: ScriptCall, numbers: Sequence[int]) -> Grant:
    """Parse the script's answer to `call`. The answer must have passed `is_answer`."""
    refused, wait_ms, now_ms, _, may_return = numbers[:_DECISION_NUMBERS]
    units = numbers[_DECISION_NUMBERS:][:_UNIT_NUMBERS]
    index = _DECISION_NUMBERS + _UNIT_NUMBERS
    quotas: dict[LimitName, Quota] = {}
    for name, limit in call.limits.items():
        used, held, reset_ms = numbers[index : index + _LIMIT_NUMBERS]
        quotas[name] = Quota(limit, used, reset_ms, held)
        index += _LIMIT_NUMBERS
    name_of_it = list(call.limits)[refused - 1] if refused else None
    return Grant(name_of_it, wait_ms, now_ms, bool(may_return), units[::2], units[1::2], quotas)


def count_unfit_fields(numbers: Sequence[int]) -> int:
    """Return the number of invalid fields that the script found in the tenant's Redis keys."""
    return numbers[3]


def parse_reports(call: ScriptCall, numbers: Sequence[int]) -> Iterator[BudgetReport]:
    """Yield a report for each budget of a call, from the script's answer."""
    if not call.budgets:
        return
    counted, *numbers_of_budgets = numbers[-1 - 2 * len(call.budgets) :]
    for index, (name, limit) in enumerate(call.budgets.items()):
        used, reset_ms = numbers_of_budgets[2 * index :][:2]
        first_day = find_first_day(name, (numbers[2] + reset_ms) // _DAY_MS)
        yield BudgetReport(
            *(call.tenant, name),
            limit=limit,
            used=used,
            counted=counted,
            reset_ms=reset_ms,
            first_day=first_day,
        )


def is_answer(call: ScriptCall, answer: object) -> bool:
    """Return True if the script's answer is valid: a list of integers of the right length.

    All integers must also be in the range that the script can return.
    """
    expected = _DECISION_NUMBERS + _UNIT_NUMBERS + _LIMIT_NUMBERS * len(call.limits)
    if call.budgets:
        expected += 1 + 2 * len(call.budgets)
    if not isinstance(answer, list) or len(answer) != expected:
        return False
    for number in answer:
        if type(number) is not int or not NEVER <= number <= _MAX_NUMBER:
            return False
    refused: int = answer[0]
    return 0 <= refused <= len(call.limits)
