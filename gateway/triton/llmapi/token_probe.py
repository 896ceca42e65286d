"""Probe of an llmapi engine: a request for one token, to find out if the engine is dead.

If the engine of the llmapi repository's model is dead, Triton still reports the model as ready. The
model then answers every request with the same error as for an invalid request. A failed request
therefore does not show whether the engine is dead, but a request for one token does. If any other
request gets a token in the meantime, the engine works.

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

# Seconds after which the probe times out if no request has got a token. Even an engine step with a
# long prompt takes less time.
_PROBE_TIMEOUT_S = 60.0
_PROMPT = "Hello"


class TokenProbe:
    """Sender of probes to one engine.

    `is_doubted` is True while the engine may be dead: from a failed request until the engine
    generates a token for any request.
    """

    def __init__(self) -> None:
        self.is_doubted = False
        # True if any request has got a token since the start of the probe. This shows that the
        # engine works, even if the probe's own request fails.
        self._token_made = False
        self.silences = 0
        """Number of probes that have timed out since a request last got a token."""
        self.requested = asyncio.Event()
        """Set by a failed request, to start a probe at once."""

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
        """Send a probe if `is_doubted` is True. Return when any request has got a token.

        In two cases, return without a token, and leave `is_doubted` True:

        - The probe has timed out, and `is_silence_fatal` has returned False.
        - The engine is overloaded, and `in_use` is True.

        Args:
            ask: starts the generation that is its first argument. The second argument is the
                deadline, in seconds of the event loop's clock.
            give_up: called if the engine is dead, to end the requests that wait for it.
            is_silence_fatal: called with the start time of the probe if no request has got a token
                since then. Returns True if the engine counts as dead.
            in_use: True if the engine counts as available now.

        Raises:
            EngineUnavailable: the engine is dead, because it generates no tokens.
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
