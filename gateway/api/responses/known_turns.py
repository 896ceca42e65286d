"""Token ids of a conversation's turns, stored with its responses.

Only the new part of a prompt is tokenized, whichever gateway or worker continues the conversation.
"""

from __future__ import annotations

from gateway.api import serving
from gateway.api.responses.chats import ResponsesChat
from gateway.api.system_messages import prompt_of
from gateway.tokenization.chat_format import ChatFormat
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.turn_record import Known

# Storing fewer bytes costs more than it saves. Short turns are stored with the next ones.
_MIN_STORED_BYTES = 2048


class CachedTurns:
    """The token ids of one request: cached ids of its history, then the ids of its new turns.

    Attributes:
        new: The new turns in the format of `turn_record`, for requests that continue this one.
    """

    def __init__(self, prompts: Prompts, known: Known) -> None:
        self.new = b""
        self._prompts = prompts
        self._known = known
        self._prompt: str | GuardedText = ""

    def write_prompt(self, chat: ResponsesChat, form: ChatFormat) -> serving.Prompts:
        """Write the prompt as `system_messages.prompt_of` does, and register cached token ids.
        Thread-safe."""
        (prompt,), message = prompt_of(chat, form)
        assert not isinstance(prompt, list)  # A template writes text
        self._prompt = prompt
        if self._known:
            self._prompts.learn(self._prompts.known_of(prompt, self._known))
        return [prompt], message

    def finish(self, *, store: bool) -> None:
        """Record that the last prompt is tokenized: save its new turns in `new` and release the
        rest."""
        if store:
            new = self._prompts.turns_of(self._prompt, besides=self._known)
            self.new = new if len(new) >= _MIN_STORED_BYTES else b""
        self._prompt, self._known = "", {}
