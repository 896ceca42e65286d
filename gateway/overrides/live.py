"""The overrides of replicas (weights and drains), in memory and in the database.

See decision 010 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from gateway.database.database import Database
from gateway.database.sharing import Sharing
from gateway.errors import DatabaseUnavailable
from gateway.overrides.rows import read_overrides, write_override
from gateway.scheduling.override import Override, Overrides


class LiveOverrides:
    """The current overrides by the replica's endpoint.

    Whenever they have changed, `apply` is called with all overrides. They remain in force while the
    database is unavailable.
    """

    def __init__(
        self,
        database: Database,
        sharing: Sharing,
        apply: Callable[[Overrides], None],
        before_first: Callable[[], Awaitable[None]],
    ) -> None:
        """Create the object without overrides. `refresh` loads them.

        `before_first` is awaited before the overrides are loaded first. It raises
        DatabaseUnavailable if the database does not have all overrides yet.
        """
        self._database = database
        self._sharing = sharing
        self._apply = apply
        self._before_first = before_first
        self._is_loaded = False
        self._why_not_loaded = ""
        self.current: Overrides = {}

    async def refresh(self, _: int, __: bool) -> None:
        """Load all overrides. This is a `Refresh` function of a `ChangeFeed`."""
        try:
            if not self._is_loaded:
                await self._before_first()
            self._set(await self._database.read(read_overrides))
        except DatabaseUnavailable as error:
            self._why_not_loaded = error.why
            raise
        self._is_loaded = True

    @property
    def problem(self) -> str:
        """Text for operators until the overrides are loaded; then empty."""
        if self._is_loaded:
            return ""
        why = self._why_not_loaded or self._database.problem
        return f"weights and drains that admins have set do not apply yet: {why}"

    async def put(self, endpoint: str, override: Override | None) -> None:
        """Set the override of the replica with this endpoint, or remove it with None.

        The change takes effect in this process at once, and in other processes within a second.

        Raises:
            DatabaseUnavailable: The override cannot be stored.
            InvalidRequest: There are too many overrides.
            SwitchedOff: Other gateways would not see the override.
        """
        self._sharing.require("Changing weights and drains")
        if not self._is_loaded:
            raise DatabaseUnavailable("overrides are not loaded yet")
        self._set(
            await self._database.write(
                partial(write_override, endpoint=endpoint, override=override)
            )
        )

    def _set(self, found: Overrides) -> None:
        if found != self.current:
            self.current = found
            self._apply(found)
