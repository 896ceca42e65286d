"""Rendering of chats with system messages that are not the first message.

Many chat templates refuse such late system messages. OpenAI clients get the template's error. In
other protocols, clients send late system messages as reminders, so these are rendered as user
messages.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.openai.chat_prompts import PromptsAndForm, render_chat
from gateway.api.openai.messages import Message
from gateway.api.openai.schemas import ChatCompletionRequest
from gateway.api.openai.turns import BETWEEN
from gateway.errors import InvalidRequest
from gateway.tokenization.chat_format import ChatFormat


def render_prompt(chat: ChatCompletionRequest, form: ChatFormat) -> PromptsAndForm:
    """Render a chat like `render_chat`, but accept system messages after the first message.

    If the template refuses the chat, render the later system messages as user messages. Raise
    InvalidRequest if the template also refuses the changed chat, or if the chat has no later system
    messages.
    """
    try:
        return render_chat(chat, form)
    except InvalidRequest:
        if all(message.role != "system" for message in chat.messages[1:]):
            raise
        messages = _move_system_messages(chat.messages)
        return render_chat(chat.model_copy(update={"messages": messages}), form)


def _move_system_messages(messages: Sequence[Message]) -> list[Message]:
    found: list[tuple[Message, list[str]]] = []
    for message in messages:
        role = "user" if message.role == "system" and found else message.role
        if role == "user" and found and found[-1][0].role == role:
            found[-1][1].append(message.text)
        else:
            found.append((message.model_copy(update={"role": role}), [message.text]))
    return [message.model_copy(update={"content": BETWEEN.join(texts)}) for message, texts in found]
