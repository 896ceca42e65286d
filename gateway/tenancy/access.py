"""Access control: identifies tenants and admins by API key, and checks which models they may use.

Keys are in the configuration file, or were created by an admin over the API ("issued keys").
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from adapters.record import selected_name
from gateway.config.file import Check, Configuration, ConfigurationFile, FieldPath
from gateway.config.settings import Settings
from gateway.config.tenants import Tenant, is_common, key_hash
from gateway.errors import (
    DatabaseUnavailable,
    InvalidKey,
    ModelNotAllowed,
    ModelNotFound,
    SwitchedOff,
    TooManyWrongKeys,
)
from gateway.tenancy.keys.record import KeyRecord, Records, Uses
from gateway.tenancy.unknown_models import UnknownModels
from gateway.tenancy.wrong_keys import WrongKeys

log = logging.getLogger(__name__)

_MAX_KEY_CHARS = 512  # maximum length of a key; the gateway creates keys with 46 characters
_MAX_WRONG_KEYS = 20
_MAX_NAMES = 10_000
_ADMIN_ID_CHARS = len("sha256:") + 8

R_co = TypeVar("R_co", covariant=True)


class Resolver(Protocol[R_co]):
    """Router that finds the object which serves a model, for example a `Route`."""

    def resolve(self, model: str) -> R_co:
        """Return the object that serves the model of this name.

        Raise ModelNotFound if no model has this name.
        """


class _Keys(NamedTuple):
    """All keys that are accepted, as hashes.

    Attributes:
        tenants: tenants by the hash of their key in the configuration file; None if requests need
            no key.
        admins: hashes of admin keys.
        issued: for each key that was created over the API, its tenant and record, by the key's
            hash. None until these keys are loaded.
    """

    tenants: Mapping[str, Tenant] | None
    admins: frozenset[str]
    issued: Mapping[str, tuple[Tenant, KeyRecord]] | None


class Access:
    """Check of the API keys in requests, and of the models that a tenant may use.

    `update` replaces the keys of the configuration file. `set_issued_keys` replaces the keys that
    were created over the API.
    """

    def __init__(self, settings: Settings, unknown_models: UnknownModels) -> None:
        self._unknown_models = unknown_models
        self._base = settings.model_name
        self._own_admin = frozenset[str]()
        if settings.admin_key is not None:
            self._own_admin = frozenset({key_hash(settings.admin_key.get_secret_value())})
        self._configuration = Configuration()
        self._records: Records | None = None
        self._keys = _Keys(None, self._own_admin, None)
        self._wrong = WrongKeys()
        self._names: dict[tuple[str, ...], tuple[str, float]] = {}
        """Cache of `find_tenant_name`: for the credentials of a request, the tenant's name and the
        Unix time in seconds at which the key expires.
        """
        self.uses: dict[str, int] = {}
        """Time at which each issued key was last used, by the key's id.

        Times are in seconds since 1970, rounded down to a full minute. `take_uses` empties the
        mapping.
        """

    def update(self, configuration: Configuration) -> None:
        """Apply the tenants and keys of a new configuration."""
        self._configuration = configuration
        self._apply_keys()

    def set_issued_keys(self, records: Records) -> None:
        """Replace the keys that were created over the API.

        Before the first call, any key that is not in the configuration file may be a valid issued
        key. `tenant` therefore raises DatabaseUnavailable for such a key. After the first call,
        `tenant` raises InvalidKey for unknown keys.
        """
        if records is not self._records:
            self._records = records
            self._apply_keys()

    def take_uses(self) -> Uses:
        """Return the times of last use (`self.uses`) since the previous call, and forget them."""
        uses, self.uses = self.uses, {}
        return uses

    def _apply_keys(self) -> None:
        tenants, issued = None, None
        if self._configuration.tenants is not None:
            tenants = {key: tenant for tenant in self._configuration.tenants for key in tenant.keys}
        if self._records is not None:
            named = {tenant.name: tenant for tenant in self._configuration.tenants or ()}
            issued = {
                record.hash: (named[record.tenant], record)
                for record in self._records.values()
                if record.revoked is None and record.tenant in named
            }
        self._names.clear()
        admins = self._own_admin.union(self._configuration.admin_keys)
        self._keys = _Keys(tenants, admins, issued)

    @property
    def is_open(self) -> bool:
        """True if requests need no key."""
        return self._keys.tenants is None

    def tenant(self, credentials: Sequence[str]) -> Tenant | None:
        """Return the tenant of a request: the owner of the first valid key in `credentials`.

        Return None if requests need no key. `credentials` are values of `Authorization` headers.

        Raises:
            InvalidKey: no credential has a valid key.
            DatabaseUnavailable: no credential has a key that is known to be valid, but some key
                cannot be checked now.
        """
        tenants = self._keys.tenants
        if tenants is None:
            return None
        refusals: list[InvalidKey | DatabaseUnavailable] = []
        for given in _hash_presented_keys(credentials):
            try:
                return self._match_key(given, tenants)
            except (InvalidKey, DatabaseUnavailable) as error:
                refusals.append(error)
        raise next(
            (error for error in refusals if isinstance(error, DatabaseUnavailable)), refusals[0]
        )

    def find_tenant_name(self, credentials: Sequence[str]) -> str:
        """Return the name of the tenant whose key is in `credentials`. Return "" if unknown.

        A key that has expired counts as unknown, so its holder cannot use up the tenant's part of a
        busy gateway. Never admit a request because of this result: call `tenant`, which compares
        keys in constant time.
        """
        tenants, _, issued = self._keys
        if tenants is None:
            return ""
        asked = tuple(credentials)
        if (known := self._names.get(asked)) is not None and known[1] > time.time():
            return known[0]
        for given in [
            key_hash(key) for key in _parse_keys(credentials) if len(key) <= _MAX_KEY_CHARS
        ]:
            found, expires = tenants.get(given), math.inf
            if found is None and issued is not None and given in issued:
                found, record = issued[given]
                expires = math.inf if record.expires is None else record.expires
            if found is not None and expires > time.time():
                self._remember_name(asked, found.name, expires)
                return found.name
        return ""

    def _remember_name(self, asked: tuple[str, ...], name: str, expires: float) -> None:
        """Cache the tenant's name for these credentials.

        Clients can send any text as credentials. To bound the cache's memory, long credentials are
        not cached, and a full cache is cleared.
        """
        if sum(map(len, asked)) > 2 * _MAX_KEY_CHARS:
            return
        if len(self._names) >= _MAX_NAMES:
            self._names.clear()
        self._names[asked] = (name, expires)

    def _match_key(self, given: str, tenants: Mapping[str, Tenant]) -> Tenant:
        tenant = tenants.get(given)
        if tenant is None:
            return self._find_issued(given)
        # Compare in constant time, so that the duration reveals nothing about a valid key. The
        # duration of the dict lookup above may vary: the lookup uses a hash of the key, and an
        # attacker cannot choose keys by their hash.
        if not _is_one_of(given, tenant.keys):
            raise InvalidKey("Incorrect API key provided.")
        return tenant

    def _find_issued(self, given: str) -> Tenant:
        issued = self._keys.issued
        if issued is None:
            raise DatabaseUnavailable(
                "keys are not loaded yet", "This API key cannot be checked now; try again."
            )
        found = issued.get(given)
        if found is None or not _is_one_of(given, (found[1].hash,)):
            raise InvalidKey("Incorrect API key provided.")
        tenant, record = found
        now = int(time.time())
        if record.expires is not None and record.expires <= now:
            raise InvalidKey("This API key has expired.")
        self.uses[record.id] = now - now % 60
        return tenant

    def admin(self, credentials: Sequence[str], address: str | None) -> str:
        """Return the id of the admin who sent a request.

        The id is ``sha256:`` and the first 8 digits of the key's hash. A request whose keys are all
        wrong is counted once for its address, even if it has several keys. A valid key is accepted
        even after many wrong keys: otherwise, other clients with the same address could lock the
        admin out.

        Args:
            credentials: values of `Authorization` headers.
            address: the client's IP address, None if it is unknown.

        Raises:
            SwitchedOff: no admin key is configured.
            InvalidKey: no credential is an admin's key.
            TooManyWrongKeys: many wrong keys came from this address.
        """
        admins = self._keys.admins
        if not admins:
            raise SwitchedOff(
                "The endpoints for admins are off; set GATEWAY_ADMIN_KEY, or admin_keys in the "
                "configuration file.",
                setting="GATEWAY_ADMIN_KEY",
            )
        for given in _hash_presented_keys(credentials, "admin key"):
            if _is_one_of(given, admins):
                return given[:_ADMIN_ID_CHARS]
        wrong = self._wrong.count(address)
        if wrong <= _MAX_WRONG_KEYS:
            raise InvalidKey("Incorrect admin key provided.")
        if wrong == _MAX_WRONG_KEYS + 1:
            log.warning(
                "MORE THAN %d WRONG ADMIN KEYS in a minute from %s", _MAX_WRONG_KEYS, address
            )
        raise TooManyWrongKeys("Too many wrong admin keys came from this address.")

    def is_admin(self, credentials: Sequence[str]) -> bool:
        """Return True if the credentials of a request include an admin key.

        Endpoints that also accept other keys call this method. It counts no wrong admin keys,
        because a tenant's key is normal there. Clients cannot guess an admin key through these
        endpoints, because an admin key has at least 32 characters.
        """
        try:
            given = _hash_presented_keys(credentials)
            return any(_is_one_of(each, self._keys.admins) for each in given)
        except InvalidKey:
            return False

    def can_see(self, tenant: Tenant | None, name: str) -> bool:
        """Return True if the tenant's list of models includes this model."""
        return tenant is None or tenant.may_use(name, self._base)

    def route(self, router: Resolver[R_co], tenant: Tenant | None, model: str) -> R_co:
        """Return what `router` finds for the model's name, if the tenant may use the model.

        Raises:
            ModelNotFound: the model does not exist, or is in another tenant's namespace. The error
                is the same in both cases, so a tenant cannot discover another tenant's models.
            ModelNotAllowed: the model is in the catalogue for all tenants, but this tenant may not
                use it.
        """
        if tenant is None:
            try:
                return router.resolve(model)
            except ModelNotFound:
                self._unknown_models.count(model)
                raise
        name = selected_name(model)
        if self.can_see(tenant, name):
            return router.resolve(model)
        if not is_common(name, self._base):
            raise ModelNotFound(model)
        router.resolve(model)
        raise ModelNotAllowed(model)


def _is_one_of(given: str, keys: Iterable[str]) -> bool:
    return any(hmac.compare_digest(given, key) for key in keys)


def _hash_presented_keys(credentials: Sequence[str], wanted: str = "API key") -> list[str]:
    """Return the hashes of the keys in a request's credentials. Raise InvalidKey if none has a key.

    `wanted` names the expected type of key in the error message.
    """
    keys = _parse_keys(credentials)
    if not keys:
        found = f"You didn't provide an {wanted}"
        if any(credential.strip() for credential in credentials):
            found = "The header `Authorization` does not have the form `Bearer KEY`"
        raise InvalidKey(
            f"{found}; send the key in the header `Authorization: Bearer KEY` or `x-api-key: KEY`."
        )
    hashes = [key_hash(key) for key in keys if len(key) <= _MAX_KEY_CHARS]
    if not hashes:
        raise InvalidKey(f"Incorrect {wanted} provided.")
    return hashes


def _parse_keys(credentials: Sequence[str]) -> list[str]:
    keys = []
    for credential in credentials:
        scheme, _, key = credential.partition(" ")
        if scheme.lower() == "bearer" and (key := key.strip()):
            keys.append(key)
    return keys


class KeysLatch:
    """Flag that prevents a running gateway from turning off its API keys.

    The first configuration with API keys sets the flag until the gateway is restarted. While the
    flag is set, a configuration without keys is refused. Workers share the flag through a file in
    their common folder. A worker that replaces a crashed worker therefore also requires keys.
    """

    def __init__(self, folder: Path | None) -> None:
        self._mark = None if folder is None else folder / "keys-are-on"
        self._on = False
        self.problem = ""
        """Error text if the file for the other workers could not be written, else ""."""

    @property
    def on(self) -> bool:
        return self._on or (self._mark is not None and self._mark.exists())

    def update(self, configuration: Configuration) -> None:
        """Set the flag if the configuration requires keys.

        Call this for each configuration that is applied.
        """
        if configuration.tenants is not None and not self.on:
            self._on = True
            try:
                if self._mark is not None:
                    self._mark.touch()
            except OSError as error:
                self.problem = f"other workers cannot learn that keys are on: {error}"
                log.error("%s", self.problem)


def find_exposure(settings: Settings, latch: KeysLatch, configuration: Configuration) -> str | None:
    """Return the reason why a configuration that requires no API keys must be refused.

    Return None if the configuration requires keys. If it requires none, return None only if `latch`
    is not set and one of these conditions is true:

    - GATEWAY_ALLOW_ANONYMOUS is true;
    - there is no configuration file, and only this machine can reach the gateway.
    """
    if configuration.tenants is not None:
        return None
    if latch.on:
        return (
            "KEYS STAY ON: they were when this gateway was started or since; to turn them off, "
            "start it again with GATEWAY_ALLOW_ANONYMOUS=true"
        )
    if settings.allow_anonymous:
        return None
    if settings.config is not None:
        return "anonymous: true needs GATEWAY_ALLOW_ANONYMOUS=true as well"
    if _is_loopback(settings.host):
        return None
    return (
        f"without tenants everybody may come in, so GATEWAY_HOST must be a loopback address and "
        f"not {settings.host}; name tenants in the file of GATEWAY_CONFIG, or set "
        "GATEWAY_ALLOW_ANONYMOUS=true"
    )


def find_unservable(
    settings: Settings, latch: KeysLatch, configuration: Configuration
) -> tuple[FieldPath, str] | None:
    """Return a field of the configuration that this gateway cannot apply, and the reason.

    For example, a model may have the same name as the base model in the settings. Return None if
    the gateway can apply the configuration.
    """
    if (reason := find_exposure(settings, latch, configuration)) is not None:
        return (), reason
    for section in ("embedding_models", "rerank_models"):
        for name in getattr(configuration, section):
            if name == settings.model_name:
                return (section, name), "is the base model's name"
            if name in settings.adapters:
                return (section, name), "is a name in GATEWAY_ADAPTERS"
    for index, tenant in enumerate(configuration.tenants or ()):
        if settings.redis_url is None and tenant.budgets:
            reason = "needs GATEWAY_REDIS_URL: a process would forget at its end what was used"
            return ("tenants", index, next(iter(tenant.budgets))), reason
    return None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_configuration_file(
    settings: Settings, workers: Path | None = None, also: Check = lambda _: None
) -> ConfigurationFile:
    """Load the configuration file that the settings name.

    Args:
        settings: the settings of this process.
        workers: folder that all workers of a gateway share; None without workers.
        also: additional check, called with each configuration that has passed the other checks.

    Raises:
        ConfigurationError: the file cannot be read, or a check refuses the configuration.
    """
    latch = KeysLatch(workers)

    def check(configuration: Configuration) -> tuple[FieldPath, str] | None:
        return find_unservable(settings, latch, configuration) or also(configuration)

    file = ConfigurationFile(settings.config, check, problem=lambda: latch.problem)
    file.subscribe(latch.update)
    return file


_OPEN = (
    "NO KEYS ARE CONFIGURED: {} may use every model without limits; if only some may, name them as "
    "tenants in the file of GATEWAY_CONFIG"
)


def warn_if_open(settings: Settings, configuration: Configuration) -> None:
    if configuration.tenants is None:
        local = _is_loopback(settings.host)
        who = "other processes of this machine" if local else "everybody who reaches this address"
        log.warning("%s", _OPEN.format(who))


def describe_exposure(settings: Settings, configuration: Configuration) -> str:
    """Return a warning text if other machines can use the gateway without a key, else ""."""
    if configuration.tenants is not None or _is_loopback(settings.host):
        return ""
    return _OPEN.format("everybody who reaches this address")
