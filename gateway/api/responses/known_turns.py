"""Token ids of a conversation's turns, which are kept with its responses.

So only what is new of it is tokenized, whichever worker of whichever gateway goes on with it.
"""

from __future__ import annotations

from gateway.api import serving
from gateway.api.responses.chats import Chat
from gateway.api.system_messages import render_prompt
from gateway.tokenization.chat_format import ChatFormat
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.turn_record import StoredTurns

# To keep fewer bytes costs more than it saves; they are kept with those that follow.
_LEAST = 2048


class KnownTurns:
    """Of one request: of what it goes on from, and then of its prompt those that are new.

    Attributes:
        new: as `turn_record` has them, for whoever goes on from there.
    """

    def __init__(self, prompts: Prompts, known: StoredTurns) -> None:
        self.new = b""
        self._prompts = prompts
        self._known = known
        self._prompt: str | GuardedText = ""

    def render_prompt(self, chat: Chat, form: ChatFormat) -> serving.PromptsAndForm:
        """As the function of that name; what is known of it is not tokenized. In any thread."""
        (prompt,), message = render_prompt(chat, form)
        assert not isinstance(prompt, list)  # a template writes text
        self._prompt = prompt
        if self._known:
            self._prompts.learn(self._prompts.find_turns(prompt, self._known))
        return [prompt], message

    def tokenized(self, *, keep: bool) -> None:
        """The prompt that was written last is ids now; of it there is nothing left but `new`."""
        if keep:
            new = self._prompts.pack_turns(self._prompt, stored=self._known)
            self.new = new if len(new) >= _LEAST else b""
        self._prompt, self._known = "", {}
