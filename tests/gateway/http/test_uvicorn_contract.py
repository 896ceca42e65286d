"""uvicorn still is what we build on where its documentation promises nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.http import protocol, server
from tests.support.contracts import missing


@pytest.mark.parametrize("module", [protocol, server])
def test_what_we_use_is_there(module: Any) -> None:
    gone = missing(module.UNDOCUMENTED)
    assert not gone, (
        f"uvicorn has changed below {module.__name__}: {'; '.join(gone)}. Read what took its "
        "place, adapt that file and its list, or keep uvicorn below this release in pyproject.toml."
    )


def test_a_connection_is_made_as_we_make_it() -> None:
    parameters = list(inspect.signature(HttpToolsProtocol.__init__).parameters)
    assert parameters == ["self", "config", "server_state", "app_state", "_loop"], (
        "HttpToolsProtocol of this uvicorn takes other arguments; gateway.http.protocol passes on "
        "these."
    )


def test_status_lines_are_whole() -> None:
    assert STATUS_LINE[400] == b"HTTP/1.1 400 Bad Request\r\n", (
        "STATUS_LINE of this uvicorn has another form; gateway.http.protocol begins answers so."
    )
