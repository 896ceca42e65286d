"""The undocumented parts of redis-py that the project uses."""

from __future__ import annotations

from redis.connection import parse_url

from lora_store import connect
from tests.support.contracts import missing


def test_what_we_use_is_there() -> None:
    gone = missing(connect.list_undocumented())
    assert not gone, (
        f"redis-py has changed below lora_store/connect.py: {'; '.join(gone)}. Read what took its "
        "place, adapt that file and its list, or keep redis below this release in pyproject.toml."
    )


def test_a_url_becomes_the_arguments_of_a_connection() -> None:
    parsed = parse_url("rediss://user:secret@host:1234/3")
    kind = parsed.pop("connection_class").__name__
    assert kind == "SSLConnection"
    assert parsed == {
        "host": "host",
        "port": 1234,
        "db": 3,
        "username": "user",
        "password": "secret",
    }, "parse_url of this redis-py gives other arguments; lora_store/connect.py passes them on."
