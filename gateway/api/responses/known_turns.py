"""Token ids of a conversation's turns, stored with its responses.

A turn is the part of a prompt from the end of one message to the end of the next message. The token
ids of earlier turns are stored. So any gateway or worker that continues the conversation only
tokenizes the new turns.
"""

from __future__ import annotations

from gateway.api.openai import chat_prompts
from gateway.api.openai.system_messages import render_prompt
from gateway.api.responses.chats import ResponsesChat
from gateway.tokenization.chat_format import ChatFormat
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.turn_record import StoredTurns

# Minimum size in bytes of a record with token ids. Storing a smaller record costs more time than it
# saves. The token ids of turns that are not stored now are stored with a later response.
_MIN_STORED_BYTES = 2048


class CachedTurns:
    """Cache of the token ids of one request's prompt, so that only the new turns are tokenized.

    Attributes:
        new: The token ids of the new turns, in the format of `turn_record`. They are stored for
            requests that continue this conversation.
    """

    def __init__(self, prompts: Prompts, known: StoredTurns) -> None:
        self.new = b""
        self._prompts = prompts
        self._known = known
        self._prompt: str | GuardedText = ""

    def write_prompt(self, chat: ResponsesChat, form: ChatFormat) -> chat_prompts.PromptsAndForm:
        """Return the prompt like `system_messages.render_prompt`. Thread-safe.

        Also give the stored token ids of earlier turns to the tokenizer's cache. The tokenizer then
        only processes the new turns.
        """
        (prompt,), message = render_prompt(chat, form)
        assert not isinstance(prompt, list)  # A template writes text
        self._prompt = prompt
        if self._known:
            self._prompts.learn(self._prompts.find_turns(prompt, self._known))
        return [prompt], message

    def finish(self, *, store: bool) -> None:
        """Free the prompt and the token ids. If `store` is True, first set `new` from them.

        The bytes `new` have the token ids of the turns that are not stored yet. Call this method
        after the prompt is tokenized.
        """
        if store:
            new = self._prompts.pack_turns(self._prompt, stored=self._known)
            self.new = new if len(new) >= _MIN_STORED_BYTES else b""
        self._prompt, self._known = "", {}
