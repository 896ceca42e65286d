"""Whether an engine that may be dead still makes tokens.

The llmapi repository's model answers for a dead engine as it does for a request that fails, and
Triton calls it ready. A failure says nothing, as a tenant's request may be the reason of its own;
so the engine is asked for a token, and whoever else is given one meanwhile is a proof as good.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable

from gateway.errors import EngineUnavailable, GatewayError, Overloaded
from gateway.generation import Generation, GenerationParams, Sampling, TextPrompt
from gateway.triton.token_stream import TokenStream

log = logging.getLogger(__name__)

# With no token for anybody: longer than a step on a long prompt takes.
_PROBE_TIMEOUT_S = 60.0
_PROMPT = "Hello"


class TokenProbe:
    """What is known of one engine. `doubted` from a failure on until a token is made."""

    def __init__(self) -> None:
        self.is_doubted = False
        # Since the engine was asked: a failure after that may be a request's own.
        self._token_made = False
        self.silences = 0
        """Number of proofs in a row, since the last token, that the engine left unanswered."""
        self.requested = asyncio.Event()
        """Set by the failure, for whoever asks for the token."""

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
        """Returns when the engine makes a token, for whomever, and at once where it is not doubted.
        Raises EngineUnavailable when it makes none.

        `ask` begins a generation with a deadline. If nobody is given a token by then,
        `silence_tells` is asked whether that shows a dead engine, with the time from which on there
        was none. If so, `give_up` is called: what others wait for will not come either. If not, the
        doubt stays. So it does where no room is left for the question, of an engine that is
        `in_use`; one that was out is not taken for well by that.
        """
        if not self.is_doubted:
            return
        generation = Generation(
            request_id=secrets.token_hex(16),
            prompt_ids=array("i"),
            max_tokens=1,
            seed=1,
            params=GenerationParams(sampling=Sampling(temperature=0), usage=False),
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
