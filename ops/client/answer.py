"""Printer of the model's responses for `gateway client`.

The output format is that of the client scripts in NVIDIA's tensorrtllm_backend.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.tokenization.prompts import Prompts
from gateway.triton.direct import Reply
from ops.client.question import Question
from ops.client.request import LOG_PROBS, REASONS, STATISTICS

PrintLine = Callable[[str], None]


class AnswerPrinter:
    """Printer of the texts and token ids in the responses to one request.

    `failed` is True after a response with an error.
    """

    def __init__(
        self,
        question: Question,
        prompts: Prompts | None,
        prompt_ids: list[int],
        say: PrintLine,
        *,
        accumulates: bool = False,
    ) -> None:
        """Create the printer.

        Args:
            question: the question that was sent.
            prompts: the tokenizer; None prints ids without their text.
            prompt_ids: the prompt's token ids.
            say: prints one line.
            accumulates: True if each streamed response has the complete text so far.
        """
        self._question = question
        self._adds = question.streaming and question.beam_width == 1
        self._adds_text = self._adds and not (question.overwrite or accumulates)
        self._prompts = prompts
        self._prompt_ids = prompt_ids
        self._say = say
        self._ids: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        self.failed = False

    def add_reply(self, reply: Reply, since_ms: float) -> None:
        """Record one response, received `since_ms` milliseconds after the request was sent."""
        if reply.error:
            self.fail(reply.error)
            return
        index = reply.array("sequence_index")
        first = 0 if index is None else int(index.reshape(-1)[0])
        question = self._question
        for beam, text in enumerate(reply.texts()):
            known = self._texts.get(first + beam, "") if self._adds_text else ""
            self._texts[first + beam] = known + text
            if question.verbose:
                self._say(f"[{since_ms:.1f} ms] {text!r}")
        for beam, ids in enumerate(reply.ids()):
            self._ids[first + beam] = (self._ids.get(first + beam, []) if self._adds else []) + ids
            if question.verbose and question.streaming:
                self._say(f"[{since_ms:.1f} ms] {ids}")
        for name in reply.names():
            array = reply.array(name) if self._is_requested(name) else None
            if array is None:
                continue
            if name in LOG_PROBS:
                self._say(f"{name}: {array}")
            elif name in STATISTICS or name in REASONS:
                self._say(f"{name}: {array.reshape(-1)[0]}")
            else:
                self._say(f"{name}.shape: {array.shape}")

    def fail(self, error: str) -> None:
        self.failed = True
        self._say("Received an error from server:")
        self._say(error)

    def print_result(self) -> None:
        """Print the complete text or the token ids of each generated sequence."""
        many = self._question.sequences > 1 and self._question.beam_width == 1
        for index, text in sorted(self._texts.items()):
            self._say(f"0 [{index}]: {text}" if len(self._texts) > 1 else f"0: {text}")
        if self._ids and self._prompts is not None:
            prompt = self._question.text
            if self._question.prompt_ids is not None:
                prompt = self._prompts.decode(self._prompt_ids)
            self._say(f"Input: {prompt}")
        for index in sorted(self._ids):
            ids = self._generated_ids(index)
            kind = "sequence_index" if many else "beam"
            if self._prompts is not None:
                self._say(f"Output {kind} {index}: {self._prompts.tokenizer.decode(ids)}")
            self._say(f"Output sequence: {ids}")

    def _is_requested(self, name: str) -> bool:
        """Return True if the output `name` is printed in addition to the text or the token ids.

        Such outputs are log probabilities, statistics, finish reasons and logits. If the option
        --requested-outputs is given, other outputs than the requested are not printed. A Python
        model may send them nevertheless.
        """
        wanted = self._question.outputs
        if wanted is not None and name not in wanted:
            return False
        return name in (*LOG_PROBS, *STATISTICS, *REASONS) or name.endswith("_logits")

    def _generated_ids(self, index: int) -> list[int]:
        """Return the generated ids of a sequence. If they begin with the prompt, remove it."""
        ids = self._ids[index]
        restated = not (self._question.streaming or self._question.exclude_input)
        if restated and ids[: len(self._prompt_ids)] == self._prompt_ids:
            return ids[len(self._prompt_ids) :]
        return ids

    def report_match(self) -> bool:
        """Compare the answer with the expected ids, and print the result.

        Return True if the fraction of equal ids reaches the threshold, or if no ids are expected.
        """
        expected = self._question.expected_ids
        if expected is None:
            return True
        found = self._generated_ids(0) if self._ids else []
        equal = sum(a == b for a, b in zip(found, expected, strict=False))
        part = equal / max(len(expected), len(found), 1)
        passed = part >= self._question.threshold
        self._say(f"{'PASS!' if passed else 'FAIL!'} {100 * part:.1f} % of the tokens are equal")
        if not passed:
            self._say(f"expected: {expected}")
        return passed
