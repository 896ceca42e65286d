"""Probe of an engine that may be dead: does it still generate tokens?

If its engine is dead, the llmapi repository's model answers as for any failed request, and Triton
still reports the model as ready. So a failed request does not show whether the engine is dead. The
probe requests one token from the engine. A token for any other request in the meantime also shows
that the engine works.

See decision 065 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable

from gateway.errors import EngineUnavailable, GatewayError, Overloaded
from gateway.generation.engine_request import Generation, TextPrompt
from gateway.generation.options import GenerationParams
from gateway.triton.token_stream import TokenStream

log = logging.getLogger(__name__)

# Seconds without a token for any request after which a probe fails. A step on a long prompt takes
# less.
_PROBE_TIMEOUT_S = 60.0
_PROMPT = "Hello"


class TokenProbe:
    """The probe of one engine.

    `is_doubted` is True from a failed request on, until the engine generates a token for any
    request.
    """

    def __init__(self) -> None:
        self.is_doubted = False
        # True if any request has got a token since the probe began. Then the engine works, even if
        # the probe's own request fails.
        self._token_made = False
        self.silences = 0
        """Number of consecutive probes, since the last token, that the engine left unanswered."""
        self.requested = asyncio.Event()
        """Set by a failed request, so that the engine is probed at once."""

    def doubt(self) -> None:
        if not self.is_doubted:
            self.is_doubted = True
            self.requested.set()

    def record_token(self) -> None:
        self.is_doubted = False
        self._token_made = True
        self.silences = 0

    async def probe(
        self,
        ask: Callable[[Generation, float], TokenStream],
        give_up: Callable[[], None],
        is_silence_fatal: Callable[[float], bool],
        *,
        in_use: bool,
    ) -> None:
        """Return when the engine generates a token, for any request; at once if not `is_doubted`.

        The doubt stays in two cases in which this returns without a token: none came by the
        deadline and `is_silence_fatal` returns False, or the engine is full and `in_use`. An engine
        that was unavailable does not become available by being full.

        Args:
            ask: begins a generation, given its deadline.
            give_up: called if the engine is dead, to end the requests that wait for it in vain.
            is_silence_fatal: called with the time at which the probe began. Returns True if the
                engine must be dead, given that no request has got a token since then.
            in_use: True if the engine counts as available now.

        Raises:
            EngineUnavailable: the engine generates no tokens.
        """
        if not self.is_doubted:
            return
        generation = Generation(
            request_id=secrets.token_hex(16),
            prompt_ids=array("i"),
            max_tokens=1,
            seed=1,
            params=GenerationParams(temperature=0, usage=False),
            text=TextPrompt(_PROMPT),
        )
        self._token_made = False
        why = "it ended a request without one"
        since = asyncio.get_running_loop().time()
        try:
            with ask(generation, since + _PROBE_TIMEOUT_S) as tokens:
                if not (await tokens.first()).final and not self._token_made:
                    await tokens.feed_deltas(lambda delta: not (self._token_made or delta.final))
        except TimeoutError:
            why = f"nothing came in {_PROBE_TIMEOUT_S:g} s"
            if not self._token_made:
                self.silences += 1
                if not is_silence_fatal(since):
                    return
                give_up()
        except Overloaded as error:
            if in_use or self._token_made:
                return
            raise EngineUnavailable(
                f"Nothing shows that the engine makes tokens again: {error.message}"
            ) from None
        except GatewayError as error:
            why = error.message
        if not self._token_made:
            raise EngineUnavailable(f"The engine makes no tokens, though its model is ready: {why}")
        log.info("an engine that was doubted has made a token")
