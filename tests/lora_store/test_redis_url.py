"""Redis URLs: which settings they give, and that no error message repeats a password."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.config.settings import Settings
from lora_store import redis_url
from lora_store.connect import close, connect


def test_what_a_url_says() -> None:
    url = redis_url.parse(
        "rediss+sentinel://u:p,%2F@one,two:5,[::1]:7/main/3"
        "?ssl_ca_certs=a%20b&sentinel_username=s&sentinel_password=t"
    )
    assert (url.kind, url.service) == ("sentinel", "main")
    assert url.hosts == (("one", 26379), ("two", 5), ("::1", 7))
    assert url.sentinel_login == {"username": "s", "password": "t"}
    assert url.at("::1", 6) == "rediss://u:p,%2F@[::1]:6/3?ssl_ca_certs=a+b"
    url = redis_url.parse("redis+cluster://one,two:5")
    assert (url.kind, url.hosts) == ("cluster", (("one", 6379), ("two", 5)))
    assert url.server == "redis://one:6379"
    for one in ("redis://h/1", "rediss://u:p,@h", "unix:///a/b.sock?db=2"):
        assert (redis_url.parse(one).kind, redis_url.parse(one).server) == ("server", one)


def test_tls_and_logins_reach_servers_and_sentinels() -> None:
    options = "ssl_ca_certs=/ca.pem&ssl_check_hostname=false&sentinel_password=t"
    client = connect(
        redis_url.parse(f"rediss+sentinel://u:p@one/main/3?{options}"),
        timeout_s=1,
        connect_timeout_s=2,
    )
    server = client.connection_pool.connection_kwargs
    sentinel = client.connection_pool.sentinel_manager.sentinels[0].connection_pool
    assert (server["username"], server["password"], server["db"]) == ("u", "p", 3)
    assert (server["socket_timeout"], server["socket_connect_timeout"]) == (1, 2)
    assert "SSL" in client.connection_pool.connection_class.__name__
    assert "SSL" in sentinel.connection_class.__name__
    assert sentinel.connection_kwargs["password"] == "t"
    assert sentinel.connection_kwargs.get("username") is None
    for place in (server, sentinel.connection_kwargs):
        assert (place["ssl_ca_certs"], place["ssl_check_hostname"]) == ("/ca.pem", False)
    close(client)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("one:6379", "begins with"),
        ("http://one", "begins with"),
        ("redis+cluster:one", "begins with"),
        ("unix+cluster://one", "begins with"),
        ("redis://one,two", "one host"),
        ("redis+sentinel://one", "/SERVICE"),
        ("redis+sentinel://one/main/x", "/SERVICE"),
        ("redis+sentinel://one/main/1/2", "/SERVICE"),
        ("redis+cluster://one,,two", "single commas"),
        ("redis+cluster://", "single commas"),
        ("redis+cluster://one/1", "database 0"),
        ("redis+cluster://one?db=1", "database 0"),
        ("redis+cluster://one:x", "not a URL"),
        ("redis+cluster://one:99999", "not a URL"),
        ("redis+cluster://[x]", "not a URL"),
        ("redis://u:p[@one/0", "not a URL"),
        ("rediss+cluster://u:p[::1]w@one", "not a URL"),
    ],
)
def test_a_wrong_url_is_refused_at_the_start(url: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=why) as caught:
        Settings(tokenizer_dir=tmp_path, redis_url=url)
    assert [problem["loc"] for problem in caught.value.errors()] == [("redis_url",)]


@given(
    st.sampled_from(["redis", "redis+cluster", "redis+sentinel", "rediss+x", ""]),
    st.text(min_size=1),
)
def test_no_refusal_repeats_a_password(scheme: str, rest: str) -> None:
    secret = "XXsecretXX"
    told = ""
    try:
        redis_url.parse(f"{scheme}://u:{secret}{rest}{secret}@host{rest}/m")
    except ValueError as error:
        told = "".join(traceback.format_exception(error))
    assert secret not in told
