"""Parser of Redis URLs.

``redis://``, ``rediss://`` and ``unix://`` are URLs of one server, in the syntax of redis-py. URLs
of sentinels or a cluster have one or more hosts, separated by commas. The syntax after the hosts is
the same as in ``redis://``:

``redis+sentinel://[user:password@]host[:26379],.../service[/database][?option=value]``
``redis+cluster://[user:password@]host[:6379],...[?option=value]``

``rediss+`` instead of ``redis+`` selects TLS, also for connections to sentinels. User, password and
options apply to the Redis servers. The options ``sentinel_username`` and ``sentinel_password``
apply to the sentinels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

_PLAIN = ("redis", "rediss", "unix")
_TLS = ("redis", "rediss")
_ADDRESS = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")
_NOT_A_URL = "not a URL; has the password a / ? # @ [ or ] that is not %-encoded?"
_PORTS = {"sentinel": 26379, "cluster": 6379}
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """A parsed URL, whose repr shows no password.

    Attributes:
        kind: type of the Redis installation.
        hosts: (host, port) of the sentinels or cluster servers; empty for a single server.
        service: name of the sentinels' service; "" without sentinels.
    """

    kind: Literal["server", "sentinel", "cluster"]
    hosts: tuple[tuple[str, int], ...]
    service: str = ""
    sentinel_login: dict[str, str] = field(default_factory=dict, repr=False)
    """`username` and `password` for the sentinels, if the URL contains them."""
    _before: str = field(default="", repr=False)
    _after: str = field(default="", repr=False)

    def at(self, host: str, port: int) -> str:
        """Return the URL of the server ``host:port``, in the syntax of redis-py.

        The login, database and options are the same as in the parsed URL.
        """
        bracketed = f"[{host}]" if ":" in host else host
        return f"{self._before}{bracketed}:{port}{self._after}"

    @property
    def server(self) -> str:
        """URL of the single server, or of the first host, in the syntax of redis-py."""
        return self.at(*self.hosts[0]) if self.hosts else self._before


def parse(url: str) -> RedisUrl:
    """Parse a Redis URL. Raise ValueError if it is invalid.

    The error's text does not quote the URL, which may contain a password.
    """
    scheme, separator, after_scheme = url.partition("://")
    tls, _, kind = scheme.partition("+")
    if not separator or (scheme not in _PLAIN and (tls not in _TLS or kind not in _PORTS)):
        raise ValueError(
            "a Redis URL begins with redis://, rediss://, unix://, redis+sentinel://, "
            "rediss+sentinel://, redis+cluster:// or rediss+cluster://"
        )
    authority = re.split("[/?#]", after_scheme, maxsplit=1)[0]
    login, at, addresses = authority.rpartition("@")
    if "[" in login or "]" in login:
        raise ValueError(_NOT_A_URL)
    try:
        # Parse the hosts separately, with a placeholder in the URL: newer releases of Python reject
        # a list of hosts that contains an IPv6 address.
        parts = urlsplit(f"//host{after_scheme.removeprefix(authority)}")
        hosts = tuple(_host(address, _PORTS.get(kind, 6379)) for address in addresses.split(","))
    except ValueError:
        raise ValueError(_NOT_A_URL) from None
    if not kind:
        if len(hosts) > 1:
            raise ValueError("redis:// and rediss:// name one host")
        return RedisUrl(kind="server", hosts=(), _before=url)
    if not all(host for host, _ in hosts):
        raise ValueError("the hosts of a Redis URL are separated by single commas")
    options = dict(parse_qsl(parts.query))
    before = f"{tls}://{login}{at}"
    if kind == "cluster":
        if parts.path not in ("", "/", "/0") or options.get("db", "0") != "0":
            raise ValueError("a Redis cluster has the database 0 alone")
        return RedisUrl(kind="cluster", hosts=hosts, _before=before, _after=_query(options))
    service, _, database = parts.path.removeprefix("/").partition("/")
    if not service or not (database or "0").isdecimal():
        raise ValueError("a sentinel's URL ends with /SERVICE or /SERVICE/DATABASE, a number")
    sentinel_login = {
        name: options.pop(option) for option, name in _SENTINEL_OPTIONS.items() if option in options
    }
    after = f"/{database or 0}{_query(options)}"
    return RedisUrl(
        kind="sentinel",
        hosts=hosts,
        service=unquote(service),
        sentinel_login=sentinel_login,
        _before=before,
        _after=after,
    )


def _host(address: str, default: int) -> tuple[str, int]:
    if not _ADDRESS.fullmatch(address):
        raise ValueError(_NOT_A_URL)
    parts = urlsplit(f"//{address}")
    return parts.hostname or "", parts.port or default


def _query(options: dict[str, str]) -> str:
    return f"?{urlencode(options)}" if options else ""
