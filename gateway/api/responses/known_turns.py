"""Token ids of a conversation's turns, which are kept with its responses.

So only what is new of it is tokenized, whichever worker of whichever gateway goes on with it.
"""

from __future__ import annotations

from gateway.api import serving
from gateway.api.responses.chats import ResponsesChat
from gateway.api.system_messages import prompt_of
from gateway.tokenization.chat_format import ChatFormat
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.tokenization.turn_record import Known

# To keep fewer bytes costs more than it saves; they are kept with those that follow.
_MIN_STORED_BYTES = 2048


class CachedTurns:
    """Of one request: of what it goes on from, and then of its prompt those that are new.

    Attributes:
        new: as `turn_record` has them, for whoever goes on from there.
    """

    def __init__(self, prompts: Prompts, known: Known) -> None:
        self.new = b""
        self._prompts = prompts
        self._known = known
        self._prompt: str | GuardedText = ""

    def write_prompt(self, chat: ResponsesChat, form: ChatFormat) -> serving.Prompts:
        """As the function of that name; what is known of it is not tokenized. In any thread."""
        (prompt,), message = prompt_of(chat, form)
        assert not isinstance(prompt, list)  # a template writes text
        self._prompt = prompt
        if self._known:
            self._prompts.learn(self._prompts.known_of(prompt, self._known))
        return [prompt], message

    def finish(self, *, store: bool) -> None:
        """The prompt that was written last is ids now; of it there is nothing left but `new`."""
        if store:
            new = self._prompts.turns_of(self._prompt, besides=self._known)
            self.new = new if len(new) >= _MIN_STORED_BYTES else b""
        self._prompt, self._known = "", {}
