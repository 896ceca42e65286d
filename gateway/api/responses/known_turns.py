"""Token ids of a conversation's turns, stored with its responses.

A turn is a part of a prompt that ends with the token that ends a message. As the token ids of
earlier turns are stored, any gateway or worker that continues the conversation tokenizes only the
new turns.
"""

from __future__ import annotations

from gateway.api.openai import chat_prompts
from gateway.api.openai.system_messages import render_prompt
from gateway.api.responses.chats import ResponsesChat
from gateway.tokenization.chat_format import ChatFormat
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.turn_record import StoredTurns

# Fewer bytes are not stored, as storing them costs more than it saves. The turns of such a prompt
# are stored with a later response.
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
        """Return the prompt as `system_messages.render_prompt` does, and register the stored token
        ids, so that only new turns are tokenized. Thread-safe."""
        (prompt,), message = render_prompt(chat, form)
        assert not isinstance(prompt, list)  # A template writes text
        self._prompt = prompt
        if self._known:
            self._prompts.learn(self._prompts.find_turns(prompt, self._known))
        return [prompt], message

    def finish(self, *, store: bool) -> None:
        """Save the new turns of the last prompt in `new` if `store` is set, and free the rest. Call
        this once the prompt is tokenized."""
        if store:
            new = self._prompts.pack_turns(self._prompt, stored=self._known)
            self.new = new if len(new) >= _MIN_STORED_BYTES else b""
        self._prompt, self._known = "", {}
