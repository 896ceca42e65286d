"""Suggestion of the right endpoint to a client with a wrong base URL."""

from __future__ import annotations

import re
from typing import NamedTuple

_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/models"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    }
)
# A path may be 64 KiB long. So each repetition in this pattern has an upper limit, which bounds the
# time of a match.
_WRITTEN = re.compile(r"/{1,4}((?:v1/{1,4}){0,4})([a-z_/]{1,32}?)/?")


class MeantPath(NamedTuple):
    """The endpoint that a client probably meant, and advice for the client's user."""

    path: str
    advice: str


def find_meant_path(path: str) -> MeantPath | None:
    """Return the endpoint that a client probably meant by an unknown path; None if there is none.

    The unknown path may differ from the right path only in slashes and in the number of times
    `/v1` occurs.
    """
    found = _WRITTEN.fullmatch(path)
    if found is None:
        return None
    versions, rest = found.groups()
    meant = f"/v1/{rest}"
    if meant not in _PATHS or meant == path:
        return None
    count = versions.count("v1")
    if count > 1:
        advice = "This client adds /v1 to its base URL: leave /v1 out of the base URL."
    elif count == 0:
        advice = "This client does not add /v1 to its base URL: end the base URL with /v1."
    else:
        advice = "Leave the slash at the end of the base URL or path out."
    return MeantPath(meant, advice)
