"""Field types of settings, with validation."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

MIN_ADMIN_KEY_CHARS = 32
"""Minimum length of an admin key.

A key from `gateway key new --admin` has 46 characters, with 256 random bits.
"""

_RELEASE = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")


def _check_admin_key(key: SecretStr) -> SecretStr:
    if len(key.get_secret_value()) < MIN_ADMIN_KEY_CHARS:
        raise ValueError(
            f"has {len(key.get_secret_value())} characters; it must have at least "
            f"{MIN_ADMIN_KEY_CHARS}, as those that `gateway key new --admin` prints"
        )
    return key


def is_service_link(value: str) -> bool:
    """Return True if `value` looks like the URL of a Kubernetes service link.

    For a Service `name`, Kubernetes sets the environment variable NAME_PORT to a URL such as
    ``tcp://10.0.0.1:80`` (a service link). If the Service is called `gateway`, this variable is
    GATEWAY_PORT, which must be a port number.
    """
    return value.startswith(("tcp://", "udp://", "sctp://"))


def _refuse_service_link(value: Any) -> Any:
    if isinstance(value, str) and is_service_link(value):
        raise ValueError(
            f"{value} is what Kubernetes puts there for a Service of that name (a service link); "
            "set enableServiceLinks: false in the pod's spec, or this variable to a number"
        )
    return value


def _check_xgrammar_release(release: str) -> str:
    if release and _RELEASE.fullmatch(release) is None:
        raise ValueError(
            f"found {release[:80]!r}; it must be the release of xgrammar in the engines as X.Y.Z, "
            "such as 0.1.32: schemas and grammars that this release compiles too slowly are "
            "refused; leave it empty for engines with 0.1.25 to 0.1.33"
        )
    return release


AdminKey = Annotated[SecretStr, AfterValidator(_check_admin_key)]
Port = Annotated[int, BeforeValidator(_refuse_service_link), Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
XgrammarRelease = Annotated[str, AfterValidator(_check_xgrammar_release)]
