"""`python -m tests.chaos.moved` with one Redis topology, and its report.

`make chaos` runs all topologies and failovers and bounds their durations.
`tests/lora_store/test_primary` tests each topology.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.moved import Case, run, table
from tests.chaos.moved_users import Answer, Upload, Users
from tests.support.moved_redis import binaries


@pytest.mark.slow
@pytest.mark.parametrize("failover", ["one address", "sentinels"])
def test_nothing_is_lost_when_redis_moves(
    failover: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = run(tmp_path, [next(iter(binaries()))], [failover])
    with capsys.disabled():
        print(table(cases))
    assert [sentence for case in cases for sentence in case.wrong()] == []


AWAY = Answer(11, 503, None, '{"error": {"code": "adapter_store_unavailable"}}')


def _wrong(*answers: Answer, lost: int = 0, let_in: int = 20) -> list[str]:
    """Return the report after uploads of ja at second 5 and of zh at second 10."""
    users = Users([], "", {})
    users.uploads = [Upload("ja", 5, is_shared=True), Upload("zh", 10, is_shared=True)]
    users.answers = [Answer(13, 200, "zh"), *answers]
    case = Case("redis", "one address", lost={"keys": lost}, let_in={"across": let_in})
    case.count(users, since=5)
    return [sentence.removeprefix("redis, one address: ") for sentence in case.wrong()]


def test_what_may_happen_is_not_reported() -> None:
    assert _wrong() == []
    assert _wrong(AWAY, Answer(7.5, 200, "ja"), Answer(11, 200, "ja")) == []


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (Answer(12, 200, "ja"), "1 of 2 answers were of an old version"),
        (Answer(7.5, 200, "zh"), "1 of 2 answers were of an old version"),
        (Answer(12, 200, None), "1 of 2 answers were of an old version"),
        (Answer(11, 500, None, "oh"), "1 requests were not answered: 500: oh"),
        (Answer(11, 502, None, ""), "1 requests were not answered: 502: "),
        (Answer(11, 503, None, "full"), "1 requests were not answered: 503: full"),
        (
            Answer(11, 500, None, AWAY.error),
            f"1 requests were not answered: 500: {AWAY.error}",
        ),
    ],
)
def test_a_wrong_answer_is_reported(answer: Answer, told: str) -> None:
    assert _wrong(AWAY, answer) == [told]


def test_what_is_lost_or_let_in_too_often_is_reported() -> None:
    assert _wrong(lost=1) == ["lost {'keys': 1}"]
    assert _wrong(let_in=21) == ["more than 20 a minute were let in: {'across': 21}"]


def test_a_run_that_shows_nothing_is_reported() -> None:
    assert list(Case("redis", "sentinels").wrong()) == [
        "redis, sentinels: 0 of 0 answers were of an old version"
    ]
