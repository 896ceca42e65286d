"""Objects of types that this server does not serve."""

from __future__ import annotations

from gateway.api.openai.messages import Lenient


class OtherObject(Lenient):
    """An object of a type that this server does not use.

    The code that reads the surrounding list ignores or refuses such objects.
    """

    type: str

    @property
    def takes_any_field(self) -> bool:
        return True
