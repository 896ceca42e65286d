"""Undocumented parts of uvicorn that the gateway uses: they must still exist."""

from __future__ import annotations

import inspect

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http import server
from tests.support.contracts import missing


def test_what_we_use_is_there() -> None:
    gone = missing(server.UNDOCUMENTED)
    assert not gone, (
        f"uvicorn has changed below {server.__name__}: {'; '.join(gone)}. Read what took its "
        "place, adapt that file and its list, or keep uvicorn below this release in pyproject.toml."
    )


def test_a_connection_is_made_as_ours_is() -> None:
    parameters = list(inspect.signature(HttpToolsProtocol.__init__).parameters)
    assert parameters == ["self", "config", "server_state", "app_state", "_loop"], (
        "This uvicorn gives its protocols other arguments; gateway.http.protocol takes these."
    )
