"""Probe whether an engine that may be dead still makes tokens.

The llmapi repository's model answers for a dead engine as for a failed request, and Triton reports
it as ready. One failure proves nothing, as it may be the request's own. So the engine is asked for
a token; a token of any other request in the meantime is as good a proof.

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

# Seconds without a token for any request: longer than a step on a long prompt takes.
_PROBE_TIMEOUT_S = 60.0
_PROMPT = "Hello"


class TokenProbe:
    """The probe of one engine. `is_doubted` from a failure on until a token is made."""

    def __init__(self) -> None:
        self.is_doubted = False
        # Since the engine was asked: a later failure may be a request's own.
        self._token_made = False
        self.silences = 0
        """Number of consecutive probes, since the last token, that the engine left unanswered."""
        self.requested = asyncio.Event()
        """Set by a failure, so that the engine is probed."""

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
        """Return when the engine makes a token, for any request; at once if it is not doubted.

        If no token comes by the deadline and `is_silence_fatal` is False, the doubt stays and this
        returns. The doubt also stays if the engine is full and `in_use`. An engine that was
        unavailable does not become available by being full.

        Args:
            ask: begins a generation with a deadline.
            give_up: called if the engine is dead: requests that wait for it wait in vain.
            is_silence_fatal: returns True if no token since that time shows a dead engine.
            in_use: the engine is available now.

        Raises:
            EngineUnavailable: the engine makes no tokens.
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
