"""Check that the gateway and Triton's engine use the same tokenizer.

With different tokenizers, the engine would take the gateway's token ids for other words, and would
generate nonsense without any error. If Triton serves the model `preprocessing`, the gateway
requests the token ids of some texts from this model. Otherwise, it compares Triton's configuration:
the folder of Triton's tokenizer, the engine's vocabulary size, and the end and padding ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gateway.errors import EngineUnavailable, EngineUnreachable, GatewayError
from gateway.triton.model_capabilities import ModelCapabilities, parameter
from gateway.triton.tokenizer.comparison import (
    TEXT,
    Findings,
    OwnTokenizer,
    compare,
    read_engine,
    size_difference,
)
from gateway.triton.tokenizer.question import QuestionFailed, ask_ids, can_be_asked
from gateway.triton.tokenizer.triton_api import TritonApi

log = logging.getLogger(__name__)

TokenizerPolicy = Literal["refuse", "warn"]

# Number of failed calls after which calls are not repeated any more. The check then works without
# the results of these calls. For example, if `preprocessing` does not return token ids, only the
# configuration is compared.
_MAX_FAILURES = 3
# Number of timeouts of `preprocessing` after which calls are not repeated any more, if the policy
# is "refuse". All timeouts together, with a pause of 1 s after each, take about a minute. In this
# time, even a model that is still warming up has answered.
_MAX_SILENT_TRIES = 10
_ANSWER_WITHIN_S = 5.0
# Shortest and longest pause in seconds before `preprocessing` is called again. The model may load
# later than the engine. Until it has answered, each pause is twice as long as the pause before.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_SHOWN_IDS = 6
_MAX_SPECIAL_TOKENS = 8
_PARTS = ("preprocessing", "postprocessing")


class TokenizerCheck:
    """Comparison of the gateway's tokenizer with the tokenizer of one Triton server."""

    def __init__(
        self,
        server: TritonApi,
        own: OwnTokenizer,
        policy: TokenizerPolicy,
        *,
        answer_within_s: float = _ANSWER_WITHIN_S,
    ) -> None:
        """Create a check.

        Args:
            server: calls to the Triton server.
            own: the gateway's tokenizer.
            policy: what to do if the tokenizers differ: raise an error or return a warning.
            answer_within_s: timeout in seconds of one call to preprocessing.
        """
        self._server = server
        self._own = own
        self._policy = policy
        self._answer_within_s = answer_within_s
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all results. Call this if Triton is unavailable, because its models may change."""
        self._tries = 0
        self._answered = False
        self._pause_s = _FIRST_PAUSE_S
        self._due_at = 0.0

    @property
    def due(self) -> bool:
        """True if preprocessing has not answered yet and should be asked again now."""
        return not self._answered and asyncio.get_running_loop().time() >= self._due_at

    async def check(self, core: str, capabilities: ModelCapabilities, *, ready: bool) -> str | None:
        """Compare the tokenizers. Return a warning for operators; None if nothing differs.

        Args:
            core: name of the core model.
            capabilities: capabilities of the selected model.
            ready: True if the model is already in use. A failed call then raises no error, except
                EngineUnreachable.

        Raises:
            EngineUnavailable: the tokenizers differ and the policy is "refuse", or a call has
                failed and will be repeated.
        """
        self._due_at = asyncio.get_running_loop().time() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        found = Findings()
        configs = await self._configs(core, capabilities, found, ready=ready)
        await self._ask(configs, found, ready=ready)
        engine = await asyncio.to_thread(read_engine, capabilities.engine_dir, found)
        if self._answered:
            # Preprocessing has answered, so the token ids themselves were compared. A difference in
            # the vocabulary sizes then causes only a warning.
            if size := size_difference(self._own, engine):
                found.doubts.append(size)
        else:
            await compare(self._own, configs, engine, found)
            if not (found.compared or found.doubts or ready):
                log.info(
                    "GATEWAY_TOKENIZER_DIR is not compared: Triton serves no preprocessing, and "
                    "neither its engine's config.json nor its tokenizer_dir can be read here"
                )
        if not found.differences:
            return " ".join(found.doubts) or None
        message = (
            f"GATEWAY_TOKENIZER_DIR: {self._own.folder} is not the tokenizer of Triton's model "
            f"{capabilities.model!r}. {' '.join(found.differences)} Set it to the folder of the "
            "tokenizer that the engine was built with, or GATEWAY_TOKENIZER_CHECK=warn to serve "
            "in spite of that."
        )
        if self._policy == "refuse":
            raise EngineUnavailable(message)
        return message

    async def _configs(
        self, core: str, capabilities: ModelCapabilities, found: Findings, *, ready: bool
    ) -> dict[str, Any]:
        """Return the ModelConfigs of the served models that may describe the tokenizer, by name."""
        configs: dict[str, Any] = {}
        wanted = [core]
        if capabilities.llmapi is None:  # an llmapi model has its tokenizer inside
            wanted = list(dict.fromkeys([core, capabilities.model, "ensemble", *_PARTS]))
        for name in wanted:
            try:
                if not await self._server.model_ready(name):
                    continue
                configs[name] = config = await self._server.model_config(name)
            except (GatewayError, TimeoutError) as error:
                what = f"the configuration of Triton's {name!r} cannot be read"
                self._note_failure(what, error, found, ready=ready)
                continue
            steps = [step.model_name for step in config.ensemble_scheduling.step]
            if core in steps or name == capabilities.model:
                wanted += [step for step in steps if step not in wanted]
            elif steps:  # leave out the steps of another model's ensemble, with another tokenizer
                wanted[:] = [each for each in wanted if each not in steps]
        return configs

    async def _ask(self, configs: Mapping[str, Any], found: Findings, *, ready: bool) -> None:
        """Request the token ids of texts from all models that tokenize. Add differences to `found`.

        If a call to a model fails, raise EngineUnavailable, or add a doubt to `found` (see
        `_note_failure`).
        """
        for name, config in configs.items():
            if not can_be_asked(config):
                continue
            try:
                await self._compare_answers(name, config, found)
            except (QuestionFailed, GatewayError, TimeoutError) as error:
                what = f"Triton's {name!r} did not return the ids of a text"
                silent = isinstance(error, TimeoutError) and self._policy == "refuse"
                tries = _MAX_SILENT_TRIES if silent else _MAX_FAILURES
                self._note_failure(what, error, found, ready=ready, tries=tries)
            else:
                self._answered = True

    def _note_failure(
        self,
        what: str,
        error: Exception,
        found: Findings,
        *,
        ready: bool,
        tries: int = _MAX_FAILURES,
    ) -> None:
        """Raise EngineUnavailable if the failed call should be repeated. Otherwise, record a doubt.

        Args:
            what: description of the failure.
            error: the error of the call. EngineUnreachable is raised again in any case.
            found: gets the failure as a doubt if the call is not repeated.
            ready: True if the model is already in use. The call is then not repeated.
            tries: number of failed calls after which the call is not repeated any more.
        """
        if isinstance(error, EngineUnreachable):
            raise error
        message = error.message if isinstance(error, GatewayError) else str(error) or "timeout"
        why = f"GATEWAY_TOKENIZER_DIR: {what}: {message.rstrip('.')}."
        self._tries += 1
        if self._tries < tries and not ready:
            raise EngineUnavailable(
                f"{why} So nothing shows yet whether {self._own.folder} is the engine's tokenizer; "
                "it is tried again."
            ) from error
        found.doubts.append(f"{why} The tokenizer is compared without that.")

    async def _compare_answers(self, name: str, config: Any, found: Findings) -> None:
        named = parameter(config, "tokenizer_dir")
        of = f"Triton's {name!r}" + (f" (tokenizer_dir {named})" if named else "")
        ids = await self._ids(config, TEXT)
        expected = self._own_ids(TEXT)
        if ids not in expected:
            found.differences.append(_where_ids_differ(of, ids, expected))
            return
        special = dict(list(self._own.special_tokens.items())[:_MAX_SPECIAL_TOKENS])
        if not special:
            return
        text, known = "".join(special), set(special.values())
        # Compare only the ids of special tokens, because some tokenizers insert a space before each
        # token.
        answered = [each for each in await self._ids(config, text) if each in known]
        wanted = [[each for each in ids if each in known] for ids in self._own_ids(text)]
        if answered in wanted:
            return
        missing = [token for token, token_id in special.items() if token_id not in answered]
        if any(answered == [each for each in ids if each in answered] for ids in wanted):
            # Report the missing tokens only as a doubt, because the tokenizer may still be right. A
            # missing token may be a padding token that was added for training.
            found.doubts.append(f"{of} does not know the special tokens {', '.join(missing)}.")
            return
        found.differences.append(
            f"{of} has the special tokens {', '.join(special)} as {answered}; here: {wanted[-1]}."
        )

    async def _ids(self, config: Any, text: str) -> list[int]:
        return await ask_ids(self._server, config, text, self._answer_within_s)

    def _own_ids(self, text: str) -> list[list[int]]:
        """Return a text's token ids in the gateway's tokenizer, with and without special tokens.

        Triton's token ids may be equal to either result, because its preprocessing may add special
        tokens or not.
        """
        return [self._own.encode(text, special=special) for special in (True, False)]


def _where_ids_differ(of: str, ids: list[int], expected: Sequence[list[int]]) -> str:
    """Return a sentence that describes where `ids` first differs from the expected ids.

    `expected` has several sequences of ids. `ids` is compared with the most similar of them.
    """
    at, own = max((_common(ids, each), each) for each in expected)
    has, here = ids[at : at + _SHOWN_IDS], own[at : at + _SHOWN_IDS]
    return (
        f"{of} makes {len(ids)} ids of a text in several scripts, from number {at} on {has}; "
        f"here: {len(own)}, {here}."
    )


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal ids at the beginning of both sequences."""
    equal = zip(ids, others, strict=False)
    return next((at for at, (one, other) in enumerate(equal) if one != other), len(ids))
