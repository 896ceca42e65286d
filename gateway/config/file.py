"""The configuration file: a YAML file that is validated completely before it is applied.

Each error message has a line number. Each section of the file is a field of `Configuration`.
Components that use a section subscribe to `ConfigurationFile`, which calls them with each new valid
configuration.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from adapters.base_names import repeated_alias
from gateway.config.adapters import Aliases, DeclaredAdapter, Folder
from gateway.config.limits import RedisUnavailablePolicies
from gateway.config.mapped import EmbeddingModels, RerankModels
from gateway.config.marked_yaml import MarkedYaml, YamlProblem
from gateway.config.tenants import KeyHash, Tenant
from gateway.scheduling.discovery import DEFAULT_WEIGHT, check_endpoint
from gateway.troubles import Troubles

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
# Secret fields, whose values must not be in error messages. A `source` may contain a password or a
# signature.
_SECRET_FIELDS = {"keys", "admin_keys", "source"}
_MESSAGE_BY_ERROR_TYPE = {
    "missing": "missing",
    "int_type": "must be an integer",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "finite_number": "must be a number",
}


class LimitsSection(BaseModel):
    """Section `limits` of the configuration file, which applies to all tenants."""

    model_config = _STRICT
    when_redis_is_away: RedisUnavailablePolicies = Field(
        default_factory=RedisUnavailablePolicies,
        description="Policy for each limit while Redis cannot count it for all gateways together.",
    )


class ReplicaEntry(BaseModel):
    """Entry of `replicas`: one Triton, or a DNS name with the addresses of several Tritons.

    In the file, an entry may also be a string, which is short for an entry with only `endpoint`.
    """

    model_config = _STRICT
    endpoint: Annotated[str, AfterValidator(check_endpoint)] = Field(
        description="Triton's gRPC endpoint, `host:port`; `grpcs://host:port` for TLS. "
        "`dns:///host:port` (`grpcs+dns:///host:port`) stands for all addresses of a name, each "
        "with this entry's weight.",
    )
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=DEFAULT_WEIGHT,
        description="Share of the requests, in proportion to the weights of the other replicas. "
        "With 0, a replica gets only retries and what no replica with a weight can take or has "
        "slots for.",
    )
    drain: bool = Field(
        default=False,
        description="Whether the replica gets no new requests, except earlier ones that no other "
        "replica can take; its slots do not count. After GATEWAY_REPLICA_DRAIN_GRACE its answers "
        "resume on replicas with the same capabilities.",
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_string(cls, given: Any) -> Any:
        return {"endpoint": given} if isinstance(given, str) else given


class Configuration(BaseModel):
    """The contents of the configuration file.

    A gateway without `tenants` requires no keys, so a file without `tenants` must contain
    `anonymous: true`. Without this rule, an incomplete file, or a file in which the tenants are
    commented out, would turn keys off.
    """

    model_config = _STRICT
    admin_keys: list[KeyHash] = Field(
        default_factory=list,
        description="Hashes of the admins' keys, as `gateway key new --admin` prints them. "
        "GATEWAY_ADMIN_KEY is an admin's key, too.",
    )
    anonymous: bool = Field(
        default=False,
        description="Whether anybody may use every model without a key. Required in a file "
        "without `tenants`, refused in a file with them. It needs GATEWAY_ALLOW_ANONYMOUS=true.",
    )
    tenants: list[Tenant] | None = Field(
        default=None,
        description="Tenants with their keys, models and limits. With an empty list, all requests "
        "are refused.",
    )
    limits: LimitsSection = Field(
        default_factory=LimitsSection,
        description="Policies for the limits of all tenants.",
    )
    replicas: list[ReplicaEntry] | None = Field(
        default=None,
        description="Tritons that requests go to, in place of those of GATEWAY_TRITON_GRPC. An "
        "entry is an endpoint, or an object.",
    )
    base_model_aliases: Aliases = Field(
        default_factory=list,
        description="Other names of the base model, NAME or OWNER/NAME, that adapters may have in "
        "`base_model_name_or_path`; added to GATEWAY_BASE_MODEL_ALIASES.",
    )
    adapters: list[DeclaredAdapter] = Field(
        default_factory=list, description="LoRA adapters that the gateway loads."
    )
    adapters_folder: Folder | None = Field(
        default=None,
        description="Absolute path of a folder whose subfolders are adapters of their names. "
        "Changes in it are applied without a reload. An entry of `adapters` overrides a subfolder "
        "of the same name.",
    )
    prune_adapters: bool = Field(
        default=False,
        description="Whether adapters that came from this file or `adapters_folder` are removed "
        "once they are no longer declared.",
    )
    embedding_models: EmbeddingModels = Field(
        default_factory=dict,
        description="Embedding models of the same Triton, by their names for clients.",
    )
    rerank_models: RerankModels = Field(
        default_factory=dict,
        description="Ranking models of the same Triton, by their names for clients.",
    )


class ConfigurationError(Exception):
    """The configuration file or the settings are invalid.

    The message has one line per problem. A line about the file has the form
    ``FILE:LINE: FIELD: problem``.
    """


FieldPath = Sequence[str | int]
Check = Callable[[Configuration], tuple[FieldPath, str] | None]
"""Function that checks if this gateway can apply a valid configuration.

If a field conflicts, for example with a setting, the function returns the path of the field and an
error message. If the configuration can be applied, it returns None.
"""


def load(path: Path, check: Check | None = None) -> tuple[Configuration, MarkedYaml]:
    """Read and validate the file, and return (configuration, parsed YAML).

    If the file is valid, `check` is called with the configuration, and may refuse it. Raise
    ConfigurationError if the file is invalid, or if `check` refuses the configuration. The error
    message has a line for each problem.
    """
    try:
        document = MarkedYaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigurationError(f"{path}: {reason}") from None
    except YamlProblem as problem:
        raise ConfigurationError(f"{path}:{problem.line}: {problem.message}") from None
    try:
        configuration = Configuration.model_validate({} if document.data is None else document.data)
    except ValidationError as error:
        problems = [_describe_error(dict(one)) for one in error.errors(include_url=False)]
    else:
        problems = list(_find_contradictions(configuration))
        if not problems and check is not None and (found := check(configuration)) is not None:
            problems = [found]
    if problems:
        lines = sorted(
            (document.find_line(field), _format_path(field), text) for field, text in problems
        )
        raise ConfigurationError(
            "\n".join(f"{path}:{line}: {field}{text}" for line, field, text in lines)
        )
    return configuration, document


def _format_path(field: FieldPath) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field)
    return f"{text.lstrip('.')}: " if text else ""


def _describe_error(error: dict[str, Any]) -> tuple[FieldPath, str]:
    """Return (field, message) for a pydantic error.

    The message quotes the value of the field, unless the value may be a secret.
    """
    field: FieldPath = error["loc"]
    found = error.get("input")
    if error["type"] == "extra_forbidden":
        return field, f"unknown; allowed: {', '.join(_list_allowed_fields(field[:-1]))}"
    if error["type"] == "string_pattern_mismatch" and {"keys", "admin_keys"} & set(field):
        return field, "must be `sha256:` and 64 hex digits, as `gateway key new` prints it"
    message = _MESSAGE_BY_ERROR_TYPE.get(error["type"])
    if message is None:
        message = error["msg"].replace("Input should", "must").replace("String should", "must")
        message = message.replace("List should", "must").removeprefix("Value error, ")
    if isinstance(found, str | int | float) and not _SECRET_FIELDS & set(field):
        return field, f"found {str(found)[:80]!r}; {message}"
    return field, message


def _list_allowed_fields(field: FieldPath) -> list[str]:
    """Return the names that are allowed in the mapping at `field`."""
    model: type[BaseModel] = Configuration
    for part in field:
        # Skip parts that are not field names: list indices, and keys such as names of models.
        if isinstance(part, str) and part in model.model_fields:
            model = next(_find_models(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _find_models(argument)


def _find_conflicting_replicas(replicas: Sequence[ReplicaEntry]) -> Iterator[tuple[FieldPath, str]]:
    """Yield an error for each entry that contradicts an earlier entry for the same endpoint."""
    known: dict[str, ReplicaEntry] = {}
    for number, entry in enumerate(replicas):
        if known.setdefault(entry.endpoint, entry) != entry:
            yield ("replicas", number), f"{entry.endpoint!r} is there twice, in different ways"


def _find_repeated_names(
    section: str, names: Iterable[str], taken: Mapping[str, str]
) -> Iterator[tuple[FieldPath, str]]:
    """Yield an error for each name that is already in use.

    `taken` maps names in use to the fields that use them.
    """
    for name in names:
        if name in taken:
            yield (section, name), f"used twice; first by {taken[name]}"


def _find_contradictions(configuration: Configuration) -> Iterator[tuple[FieldPath, str]]:
    """Yield errors that concern several fields.

    The errors are:

    - both `anonymous` and `tenants`, or neither of them
    - `watch` for a source that is not on this machine's disk
    - repeated names, aliases or keys
    - different entries for the same endpoint
    """
    if configuration.anonymous and configuration.tenants is not None:
        yield ("anonymous",), "not together with tenants, who have keys"
    elif not configuration.anonymous and configuration.tenants is None:
        yield (
            ("tenants",),
            "missing, which DOES NOT TURN KEYS OFF; add the tenants (docs/tenants.md), or, if "
            "everybody may use every model, say `anonymous: true` and set "
            "GATEWAY_ALLOW_ANONYMOUS=true",
        )
    aliases = configuration.base_model_aliases
    if (again := repeated_alias(aliases)) is not None:
        yield ("base_model_aliases", again), f"found {aliases[again]!r}; it is there already"
    declared: dict[str, int] = {}
    for index, adapter in enumerate(configuration.adapters):
        if adapter.name in declared:
            first = f"adapters[{declared[adapter.name]}]"
            yield ("adapters", index, "name"), f"{adapter.name!r} is used twice; first by {first}"
        declared.setdefault(adapter.name, index)
        if adapter.watch and not adapter.may_be_watched:
            yield ("adapters", index, "watch"), "only what is on this machine's disk can be watched"
    taken = {name: f"adapters[{index}]" for name, index in declared.items()}
    yield from _find_repeated_names("embedding_models", configuration.embedding_models, taken)
    taken |= dict.fromkeys(configuration.embedding_models, "embedding_models")
    yield from _find_repeated_names("rerank_models", configuration.rerank_models, taken)
    yield from _find_conflicting_replicas(configuration.replicas or ())
    names: dict[str, int] = {}
    owners: dict[str, str] = {}
    for number, key in enumerate(configuration.admin_keys):
        if key in owners:
            yield ("admin_keys", number), "used twice"
        owners[key] = "the admin"
    for index, tenant in enumerate(configuration.tenants or ()):
        if tenant.name in names:
            field: FieldPath = ("tenants", index, "name")
            yield field, f"{tenant.name!r} is used twice; first by tenants[{names[tenant.name]}]"
        names.setdefault(tenant.name, index)
        for number, key in enumerate(tenant.keys):
            if key in owners:
                field = ("tenants", index, "keys", number)
                yield field, f"used twice; it is already a key of {owners[key]}"
            owners.setdefault(key, tenant.name)


class ConfigurationFile:
    """The configuration file, which is read at start and after each change.

    `current` is the configuration that the gateway uses: the last valid version of the file.
    """

    def __init__(
        self,
        path: Path | None,
        check: Check | None = None,
        *,
        problem: Callable[[], str] = lambda: "",
    ) -> None:
        """Read the file.

        Args:
            path: the file; None for an empty configuration.
            check: called with each configuration before it is applied.
            problem: returns an error text if the gateway could apply only a part of the current
                configuration, else "".

        Raises:
            ConfigurationError: the file cannot be read or is invalid, or `check` refuses it.
        """
        self._path = path
        self._check = check
        self._stamp = self._last_stamp = self._read_stamp()
        self._subscribers: list[Callable[[Configuration], None]] = []
        self._wake = asyncio.Event()
        self.on_reload: Callable[[bool], None] = lambda applied: None
        self.problem = problem
        self.current = Configuration() if path is None else load(path, check)[0]
        if path is None and check is not None and (found := check(self.current)) is not None:
            raise ConfigurationError(found[1])

    def subscribe(self, subscriber: Callable[[Configuration], None]) -> None:
        """Call `subscriber` now with the current configuration, and later with each new one.

        `subscriber` must not raise an exception.
        """
        self._subscribers.append(subscriber)
        subscriber(self.current)

    def reload_now(self) -> None:
        """Make `watch` read the file now, even if it has not changed."""
        self._wake.set()

    async def watch(self, troubles: Troubles) -> None:
        """Reload the file after each change. Run until cancelled.

        A changed file is reloaded once it has remained unmodified from one poll to the next. A file
        that is still being written may be valid but incomplete: for example, a tenant would have no
        limits.
        """
        if self._path is None:
            return
        while True:
            try:
                async with asyncio.timeout(_POLL_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                before, self._last_stamp = (
                    self._last_stamp,
                    await asyncio.to_thread(self._read_stamp),
                )
                if self._last_stamp == self._stamp or self._last_stamp != before:
                    continue
            self._wake.clear()
            await self._reload(self._path, troubles)

    async def _reload(self, path: Path, troubles: Troubles) -> None:
        # Read the file's status before its content. If the file changes during the read, the next
        # poll then detects the change.
        self._stamp = await asyncio.to_thread(self._read_stamp)
        try:
            configuration, _ = await asyncio.to_thread(load, path, self._check)
        except Exception as error:  # on any error, continue with the old configuration
            log.error("the configuration was refused, the old one stays in force:\n%s", error)
            text = f"the configuration was refused, the old one stays in force: {error}"
            troubles.hold("configuration", logging.ERROR, text, logs=False)
            self.on_reload(False)
            return
        self.current = configuration
        for subscriber in self._subscribers:
            subscriber(configuration)
        log.info("the configuration of %s is in force", path)
        troubles.clear("configuration", logs=False)
        self.on_reload(True)

    def _read_stamp(self) -> tuple[int, int, int] | None:
        """Return (inode, mtime in ns, size), which changes when the file is replaced or rewritten.

        Return None if there is no file, or if it cannot be read.
        """
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
