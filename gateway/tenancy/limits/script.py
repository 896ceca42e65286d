"""What `script.lua` is given, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import NamedTuple

from gateway.config.limits import LIMITS, LimitName
from gateway.errors import Quota
from gateway.tenancy.limits.budgets import BudgetReport
from gateway.tenancy.limits.request import NEVER, Decision, LimitRequest, Settlement

SCRIPT = files(__package__).joinpath("script.lua").read_text(encoding="utf-8")
_MAX_NUMBER = 2**53
_DECISION = 4
"""Numbers before those of the limits."""


@dataclass(slots=True)
class Own:
    """What one gateway process has of a tenant's limits."""

    places: int = 0
    held: int = 0
    """Tokens of budgets that running requests have reserved."""
    spent: int = 0
    """Tokens of budgets that were used since the process began."""
    known: int = 0
    """Of those, how many Redis is known to have counted."""
    budgets: Mapping[LimitName, int] = field(default_factory=dict)
    changed: bool = False
    """Since what there is was last told as a whole."""


class Call(NamedTuple):
    """One run of the script. `spent` is what it tells of its tenant's `budgets`."""

    tenant: str
    key: str
    operation: str
    arguments: Sequence[object]
    limits: int
    """How many the answer tells of."""
    budgets: Mapping[LimitName, int]
    spent: int

    def command(self, sha: str, gateway: str, lease_ms: int) -> tuple[object, ...]:
        _, key, operation, arguments, _, budgets, _ = self
        if not budgets:
            return ("EVALSHA", sha, 1, key, operation, gateway, lease_ms, *arguments)
        keys = (2, key, f"budgets:{{{self.tenant}}}")
        return ("EVALSHA", sha, *keys, operation, gateway, lease_ms, *arguments)


def take(request: LimitRequest, own: Own) -> Call:
    arguments: list[object] = []
    for name, limit in request.limits.items():
        arguments += (LIMITS[name].code, limit, request.wanted(name))
    return _call(request.tenant, "take", arguments, request.budgets, own, len(request.limits))


def settle(settlement: Settlement, own: Own) -> Call:
    request = settlement.request
    arguments = [_codes(request.limits), *settlement[1:]]
    return _call(request.tenant, "settle", arguments, request.budgets, own)


def renew(tenant: str, own: Own) -> Call:
    return _call(tenant, "renew", [own.places, own.held], own.budgets, own)


def decision_of(request: LimitRequest, numbers: Sequence[int]) -> Decision:
    """What the script says of a request."""
    quotas: dict[str, Quota] = {}
    place = _DECISION
    for name, limit in request.limits.items():
        used, held, reset_ms = numbers[place : place + 3]
        quotas[name] = Quota(limit, used, reset_ms, held)
        place += 3
    refused, wait_ms, now_ms, _ = numbers[:_DECISION]
    name_of_it = list(request.limits)[refused - 1] if refused else None
    return Decision(name_of_it, wait_ms, quotas, now_ms)


def reports_of(call: Call, numbers: Sequence[int]) -> Iterator[BudgetReport]:
    """What the script says of each budget that a call tells of."""
    counted, *told = numbers[-1 - 2 * len(call.budgets) :]
    for place, (name, limit) in enumerate(call.budgets.items()):
        used, reset_ms = told[2 * place :][:2]
        yield BudgetReport(
            call.tenant, name, limit=limit, used=used, counted=counted, reset_ms=reset_ms
        )


def is_an_answer(call: Call, answer: object) -> bool:
    """Whether it has the numbers that belong to the call, and none that make no sense."""
    expected = _DECISION + 3 * call.limits if call.limits else 0
    if call.budgets:
        expected += 1 + 2 * len(call.budgets)
    if not isinstance(answer, list) or len(answer) != expected:
        return False
    for number in answer:
        if type(number) is not int or not NEVER <= number <= _MAX_NUMBER:
            return False
    return not call.limits or 0 <= answer[0] <= call.limits


def _call(
    tenant: str,
    operation: str,
    arguments: list[object],
    budgets: Mapping[LimitName, int],
    own: Own,
    limits: int = 0,
) -> Call:
    if budgets:
        # One total for all budgets, so all of them are told.
        budgets = {**own.budgets, **budgets}
        arguments += (_codes(budgets), own.spent, own.known)
    key = f"limits:{{{tenant}}}"
    return Call(tenant, key, operation, arguments, limits=limits, budgets=budgets, spent=own.spent)


def _codes(limits: Mapping[LimitName, int]) -> str:
    return "".join([LIMITS[name].code for name in limits])
