"""Who may come in: keys to tenants and admins, and which models a tenant may use or know of."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from adapters.record import selected_name
from gateway.catalog.router import Route, Router
from gateway.config.file import Configuration, ConfigurationFile
from gateway.config.settings import Settings
from gateway.config.tenants import Tenant, is_common, key_hash
from gateway.errors import InvalidKey, ModelNotAllowed, ModelNotFound, SwitchedOff

log = logging.getLogger(__name__)

_MAX_KEY = 512  # characters; ours have 46


class _Keys(NamedTuple):
    """By the hash of a key; `tenants` is None where no key is needed."""

    tenants: Mapping[str, Tenant] | None
    admins: frozenset[str]


class Access:
    """The keys in force; `update` replaces all of them at once."""

    def __init__(self, settings: Settings) -> None:
        self._base = settings.model_name
        self._own_admin = frozenset[str]()
        if settings.admin_key is not None:
            self._own_admin = frozenset({key_hash(settings.admin_key.get_secret_value())})
        self._keys = _Keys(None, self._own_admin)

    def update(self, configuration: Configuration) -> None:
        tenants = None
        if configuration.tenants is not None:
            tenants = {key: tenant for tenant in configuration.tenants for key in tenant.keys}
        self._keys = _Keys(tenants, self._own_admin.union(configuration.admin_keys))

    @property
    def open(self) -> bool:
        """Whether requests need no key."""
        return self._keys.tenants is None

    def tenant(self, authorization: str | None) -> Tenant | None:
        """Whose request it is, by its header; None where no key is needed. Raises InvalidKey."""
        tenants = self._keys.tenants
        if tenants is None:
            return None
        given = _presented(authorization)
        tenant = tenants.get(given)
        # The look-up was by a hash of the key, which tells a guesser nothing of the right one.
        if tenant is None or not any(hmac.compare_digest(given, key) for key in tenant.keys):
            raise InvalidKey("Incorrect API key provided.")
        return tenant

    def check_admin(self, authorization: str | None) -> None:
        """Raises SwitchedOff where there is no admin at all, InvalidKey for a wrong key."""
        admins = self._keys.admins
        if not admins:
            raise SwitchedOff(
                "The endpoints for admins are off; set GATEWAY_ADMIN_KEY, or admin_keys in the "
                "configuration file.",
                setting="GATEWAY_ADMIN_KEY",
            )
        given = _presented(authorization)
        if not any(hmac.compare_digest(given, key) for key in admins):
            raise InvalidKey("Incorrect admin key provided.")

    def sees(self, tenant: Tenant | None, name: str) -> bool:
        """Whether a model is in this tenant's list."""
        return tenant is None or tenant.may_use(name, self._base)

    def route(self, router: Router, tenant: Tenant | None, model: str) -> Route:
        """What serves `model` to this tenant.

        Raises ModelNotFound for what does not exist and, in the same words, for what the tenant
        must not know of: another's namespace. Raises ModelNotAllowed for a model of the common
        catalogue that it may not use.
        """
        name = selected_name(model)
        if self.sees(tenant, name):
            return router.resolve(model)
        if not is_common(name, self._base):
            raise ModelNotFound(model)
        router.resolve(model)
        raise ModelNotAllowed(model)


def _presented(authorization: str | None) -> str:
    """The hash of the key in a header. Raises InvalidKey when there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        raise InvalidKey(
            "You didn't provide an API key; send it in the header `Authorization: Bearer KEY`."
        )
    if len(key) > _MAX_KEY:
        raise InvalidKey("Incorrect API key provided.")
    return key_hash(key)


def exposure(settings: Settings, configuration: Configuration) -> str | None:
    """Why this gateway must not be reached from other machines; None when all is well."""
    if configuration.tenants is not None or settings.allow_anonymous or _is_loopback(settings.host):
        return None
    return (
        f"without tenants everybody may come in, so GATEWAY_HOST must be a loopback address and "
        f"not {settings.host}; name tenants in the file of GATEWAY_CONFIG, or set "
        "GATEWAY_ALLOW_ANONYMOUS=true"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def configuration_file(settings: Settings) -> ConfigurationFile:
    """The file of these settings. Raises ConfigurationError."""
    return ConfigurationFile(settings.config, partial(exposure, settings))


def warn_if_open(settings: Settings, configuration: Configuration) -> None:
    if configuration.tenants is not None:
        return
    who = "other processes of this machine"
    if not _is_loopback(settings.host):
        who = "whoever reaches this address"
    log.warning(
        "NO KEYS ARE CONFIGURED: %s may use every model without limits; GATEWAY_CONFIG names a "
        "file with tenants",
        who,
    )
