"""Token ids of a conversation's turns, stored with its responses.

Only the new part of a prompt is tokenized, whichever gateway or worker continues the conversation.
"""

from __future__ import annotations

from gateway.api.openai import chat_prompts
from gateway.api.openai.system_messages import render_prompt
from gateway.api.responses.chats import ResponsesChat
from gateway.tokenization.chat_format import ChatFormat
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.turn_record import StoredTurns

# Storing fewer bytes costs more than it saves. Short turns are stored with the next ones.
_MIN_STORED_BYTES = 2048


class CachedTurns:
    """The token ids of one request: cached ids of its history, then the ids of its new turns.

    Attributes:
        new: The new turns in the format of `turn_record`, for requests that continue this one.
    """

    def __init__(self, prompts: Prompts, known: StoredTurns) -> None:
        self.new = b""
        self._prompts = prompts
        self._known = known
        self._prompt: str | GuardedText = ""

    def write_prompt(self, chat: ResponsesChat, form: ChatFormat) -> chat_prompts.PromptsAndForm:
        """Write the prompt as `system_messages.render_prompt` does, and register cached token ids.
        Thread-safe."""
        (prompt,), message = render_prompt(chat, form)
        assert not isinstance(prompt, list)  # A template writes text
        self._prompt = prompt
        if self._known:
            self._prompts.learn(self._prompts.find_turns(prompt, self._known))
        return [prompt], message

    def finish(self, *, store: bool) -> None:
        """Record that the last prompt is tokenized: save its new turns in `new` and release the
        rest."""
        if store:
            new = self._prompts.pack_turns(self._prompt, stored=self._known)
            self.new = new if len(new) >= _MIN_STORED_BYTES else b""
        self._prompt, self._known = "", {}
