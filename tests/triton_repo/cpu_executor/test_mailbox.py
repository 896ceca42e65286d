"""The mailbox between client threads and the executor's loop thread."""

from __future__ import annotations

from tests.support.executor_client import request
from triton_repo.cpu_executor.mailbox import Mailbox
from triton_repo.cpu_executor.result import Response, Result


def final(request_id: int) -> Response:
    return Response(request_id, Result(is_final=True))


def test_ids_leave_room_for_samples() -> None:
    mailbox = Mailbox(None, 10)
    three = request([1], 1, num_return_sequences=3)
    beams = request([1], 1, beam_width=3, num_return_sequences=3)
    assert mailbox.enqueue([three, beams, request([1], 1)]) == [1, 4, 5]


def test_fetch_stops_at_the_first_that_is_not_admitted() -> None:
    mailbox = Mailbox(None, 10)
    ids = mailbox.enqueue([request([1], 1, priority=p) for p in (0.1, 0.9, 0.5)])
    assert mailbox.fetch(lambda entry: entry.id != ids[2])[0].id == ids[1]
    assert mailbox.fetch(lambda entry: entry.id != ids[2]) == []
    assert [entry.id for entry in mailbox.fetch(lambda _: True)] == [ids[2], ids[0]]
    assert mailbox.queue_length == 0


def test_fetched_requests_leave_room_in_the_queue() -> None:
    mailbox = Mailbox(2, 10)
    mailbox.enqueue([request([1], 1, num_return_sequences=2)])
    mailbox.fetch(lambda _: True)
    assert mailbox.enqueue([request([1], 1), request([1], 1)]) == [3, 4]


def test_a_cancel_after_the_end_leaves_nothing_behind() -> None:
    mailbox = Mailbox(None, 10)
    first, second = mailbox.enqueue([request([1], 1), request([1], 1)])
    mailbox.cancel(first)
    assert mailbox.pending_cancels == {first}
    mailbox.publish([final(first), final(second)])
    mailbox.cancel(first)
    mailbox.cancel(second)
    mailbox.cancel(99)
    assert mailbox.pending_cancels == set()


def test_take_all_takes_everything_once() -> None:
    mailbox = Mailbox(None, 10)
    first, second = mailbox.enqueue([request([1], 1), request([1], 1)])
    part = Response(first, Result())
    mailbox.publish([part, final(second)])
    mailbox.publish([final(first)])
    taken = mailbox.take_all(0.0)
    assert [(r.request_id, r.result.is_final) for r in taken] == [
        (first, False),
        (first, True),
        (second, True),
    ]
    assert mailbox.take_all(0.0) == []
    (gone,) = mailbox.take(first, 0.0)
    assert "has already been processed" in gone.error_msg


def test_an_unfinished_request_stays_open() -> None:
    mailbox = Mailbox(None, 10)
    (only,) = mailbox.enqueue([request([1], 1)])
    mailbox.publish([Response(only, Result())])
    assert len(mailbox.take(only, 0.0)) == 1
    assert mailbox.take(only, 0.0) == []
