"""The configuration file: YAML, checked as a whole, each error with its line, replaced at once.

A section is a field of `Configuration`. Whoever owns one subscribes to `ConfigurationFile` and is
called with every configuration that comes into force.
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
from gateway.config.limits import WhenRedisIsAway
from gateway.config.mapped import EmbeddingModels, RerankModels
from gateway.config.marked_yaml import MarkedYaml, YamlProblem
from gateway.config.tenants import KeyHash, Tenant
from gateway.scheduling.discovery import DEFAULT_WEIGHT, checked
from gateway.troubles import Troubles

log = logging.getLogger(__name__)

_POLL_S = 1.0
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
# A source may have a password or a signature in it.
_SECRET = {"keys", "admin_keys", "source"}
_PLAIN = {
    "missing": "missing",
    "int_type": "must be a whole number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "finite_number": "must be a number",
}


class LimitsSection(BaseModel):
    """How the limits of all tenants are counted."""

    model_config = _STRICT
    when_redis_is_away: WhenRedisIsAway = Field(default_factory=WhenRedisIsAway)


class ReplicaEntry(BaseModel):
    """One Triton, or a name of several, which all have the weight; a string is an endpoint alone.

    Requests go to replicas in proportion to their weights; to one of weight 0 goes only what no
    other can take. A drained one finishes what it has.
    """

    model_config = _STRICT
    endpoint: Annotated[str, AfterValidator(checked)]
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = DEFAULT_WEIGHT
    drain: bool = False

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, given: Any) -> Any:
        return {"endpoint": given} if isinstance(given, str) else given


class Configuration(BaseModel):
    """The whole file. With an empty list of `tenants`, nobody may come.

    Without `tenants` everybody may, and a file must say so with `anonymous`: half of a file that is
    being written, or one whose tenants are commented out, must not turn keys off.
    """

    model_config = _STRICT
    admin_keys: list[KeyHash] = Field(default_factory=list)
    anonymous: bool = False
    tenants: list[Tenant] | None = None
    limits: LimitsSection = Field(default_factory=LimitsSection)
    replicas: list[ReplicaEntry] | None = None
    """Triton's endpoints, in place of GATEWAY_TRITON_GRPC."""
    base_model_aliases: Aliases = Field(default_factory=list)
    """Other names of the base model in adapters; GATEWAY_BASE_MODEL_ALIASES may have more."""
    adapters: list[DeclaredAdapter] = Field(default_factory=list)
    adapters_folder: Folder | None = None
    """Each folder in it is an adapter of its name; changes are taken without a reload."""
    prune_adapters: bool = False
    """Whether names go that came from here and are declared no more."""
    embedding_models: EmbeddingModels = Field(default_factory=dict)
    rerank_models: RerankModels = Field(default_factory=dict)


class ConfigurationError(Exception):
    """All that is wrong with a file: ``FILE:LINE: PLACE: what is wrong``, a line each."""


Place = Sequence[str | int]
Check = Callable[[Configuration], tuple[Place, str] | None]
"""Says what of a configuration cannot be served here, and why; None when all can."""


def load(path: Path, check: Check | None = None) -> tuple[Configuration, MarkedYaml]:
    """Reads and checks the file. Raises ConfigurationError."""
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
        problems = [_problem(dict(one)) for one in error.errors(include_url=False)]
    else:
        problems = list(_contradictions(configuration))
        if not problems and check is not None and (found := check(configuration)) is not None:
            problems = [found]
    if problems:
        lines = sorted((document.line(place), _shown(place), text) for place, text in problems)
        raise ConfigurationError(
            "\n".join(f"{path}:{line}: {place}{text}" for line, place, text in lines)
        )
    return configuration, document


def _shown(place: Place) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return f"{text.lstrip('.')}: " if text else ""


def _problem(error: dict[str, Any]) -> tuple[Place, str]:
    """pydantic's finding in our words; what was found is told unless it may be a key."""
    place: Place = error["loc"]
    found = error.get("input")
    if error["type"] == "extra_forbidden":
        return place, f"unknown; allowed: {', '.join(_fields(place[:-1]))}"
    if error["type"] == "string_pattern_mismatch" and {"keys", "admin_keys"} & set(place):
        return place, "must be `sha256:` and 64 hex digits, as `gateway key new` prints it"
    message = _PLAIN.get(error["type"])
    if message is None:
        message = error["msg"].replace("Input should", "must").replace("String should", "must")
        message = message.replace("List should", "must").removeprefix("Value error, ")
    if isinstance(found, str | int | float) and not _SECRET & set(place):
        return place, f"found {str(found)[:80]!r}; {message}"
    return place, message


def _fields(place: Place) -> list[str]:
    """The names that are allowed in the mapping at `place`."""
    model: type[BaseModel] = Configuration
    for part in place:
        # Others are places in a list, and names that the file gives.
        if isinstance(part, str) and part in model.model_fields:
            model = next(_models_in(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _unlike(replicas: Sequence[ReplicaEntry]) -> Iterator[tuple[Place, str]]:
    """What is said of one endpoint in different ways."""
    known: dict[str, ReplicaEntry] = {}
    for number, entry in enumerate(replicas):
        if known.setdefault(entry.endpoint, entry) != entry:
            yield ("replicas", number), f"{entry.endpoint!r} is there twice, in different ways"


def _twice(
    section: str, names: Iterable[str], taken: Mapping[str, str]
) -> Iterator[tuple[Place, str]]:
    """Names that have another meaning already."""
    for name in names:
        if name in taken:
            yield (section, name), f"used twice; first by {taken[name]}"


def _contradictions(configuration: Configuration) -> Iterator[tuple[Place, str]]:
    """What no field can see alone: who may come, and that names and keys are one tenant's."""
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
    yield from _twice("embedding_models", configuration.embedding_models, taken)
    taken |= dict.fromkeys(configuration.embedding_models, "embedding_models")
    yield from _twice("rerank_models", configuration.rerank_models, taken)
    yield from _unlike(configuration.replicas or ())
    names: dict[str, int] = {}
    owners: dict[str, str] = {}
    for number, key in enumerate(configuration.admin_keys):
        if key in owners:
            yield ("admin_keys", number), "used twice"
        owners[key] = "the admin"
    for index, tenant in enumerate(configuration.tenants or ()):
        if tenant.name in names:
            place: Place = ("tenants", index, "name")
            yield place, f"{tenant.name!r} is used twice; first by tenants[{names[tenant.name]}]"
        names.setdefault(tenant.name, index)
        for number, key in enumerate(tenant.keys):
            if key in owners:
                place = ("tenants", index, "keys", number)
                yield place, f"used twice; it is already a key of {owners[key]}"
            owners.setdefault(key, tenant.name)


class ConfigurationFile:
    """The file and the configuration in force: the last one that was right."""

    def __init__(
        self,
        path: Path | None,
        check: Check | None = None,
        *,
        problem: Callable[[], str] = lambda: "",
    ) -> None:
        """Read the file.

        Args:
            path: None for an empty configuration.
            check: asked of each configuration before it comes into force.
            problem: returns why a configuration in force has less effect than it should, or "".

        Raises:
            ConfigurationError: the file cannot be read, or `check` refuses it.
        """
        self._path = path
        self._check = check
        self._stamp = self._glimpsed = self._seen()
        self._subscribers: list[Callable[[Configuration], None]] = []
        self._wake = asyncio.Event()
        self.on_reload: Callable[[bool], None] = lambda applied: None
        self.problem = problem
        self.current = Configuration() if path is None else load(path, check)[0]
        if path is None and check is not None and (found := check(self.current)) is not None:
            raise ConfigurationError(found[1])

    def subscribe(self, subscriber: Callable[[Configuration], None]) -> None:
        """Calls it now and whenever another configuration comes into force; it must not raise."""
        self._subscribers.append(subscriber)
        subscriber(self.current)

    def reload_now(self) -> None:
        """Makes `watch` read the file, changed or not."""
        self._wake.set()

    async def watch(self, troubles: Troubles) -> None:
        """Reloads when the file has changed and been left alone for a while; until cancelled.

        A file that is still being written may be right and say less than it will: a tenant whose
        limits are not there yet has none.
        """
        if self._path is None:
            return
        while True:
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                before, self._glimpsed = self._glimpsed, await asyncio.to_thread(self._seen)
                if self._glimpsed == self._stamp or self._glimpsed != before:
                    continue
            self._wake.clear()
            await self._reload(self._path, troubles)

    async def _reload(self, path: Path, troubles: Troubles) -> None:
        # Looked at before it is read: a change meanwhile is found by the next look.
        self._stamp = await asyncio.to_thread(self._seen)
        try:
            configuration, _ = await asyncio.to_thread(load, path, self._check)
        except Exception as error:  # whatever is wrong with a file, the old one goes on
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

    def _seen(self) -> tuple[int, int, int] | None:
        """What tells one content of the file from the next, linked in its place or written."""
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
