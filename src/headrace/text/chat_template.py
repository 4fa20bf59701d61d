"""Messages -> prompt text -> token ids, by the chat template that came with a model.

Owns: what a template is given and how its faults are told. Runs in: gateway. Must not know: Jinja, HTTP.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.protocol.errors import ErrorCode, ModelError, RequestError
from headrace.protocol.graph import CHAT_TEMPLATE_FILE
from headrace.text.marker_guard import unused_character
from headrace.text.template_sandbox import BrokenTemplateError, SandboxedTemplate
from headrace.text.tokenizer import TextTokenizer

Message = Mapping[str, Any]


def _local_now() -> datetime.datetime:
    return datetime.datetime.now().astimezone()


class ChatTemplate:
    """A model's chat template, compiled. Safe to render from several threads at once."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime.datetime] = _local_now,
    ) -> None:
        """`special_tokens`: names for the template, such as bos_token: "<s>". Raises ModelError when it cannot be compiled."""
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = SandboxedTemplate(source, now)
        except BrokenTemplateError as fault:
            raise ModelError(f"The model's chat template cannot be compiled: {fault.message}.") from fault

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Messages have a role and a content (text or None); parts are joined already.

        `continue_final_message`: the prompt ends where the last message's content ends, so that the model writes on.
        Raises RequestError with the template's own message when it refuses the messages or cannot render them.
        """
        self._check(messages, add_generation_prompt, continue_final_message, variables)
        end_mark = ""
        if continue_final_message:
            end_mark = _free_character(messages, tools, variables)
            messages = [*messages[:-1], {**messages[-1], "content": (messages[-1].get("content") or "") + end_mark}]
        values = {
            **self._special_tokens,
            **(variables or {}),
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._render(values)
        except BrokenTemplateError as fault:
            message = f"The model's chat template does not accept this conversation: {fault.message}."
            raise RequestError(message, code=ErrorCode.CHAT_TEMPLATE_ERROR, param="messages") from fault
        if not end_mark:
            return text
        end = text.rfind(end_mark)
        if end < 0:
            raise RequestError(
                "The model's chat template leaves the last message out, so it cannot be continued.",
                code=ErrorCode.CHAT_TEMPLATE_ERROR,
                param="continue_final_message",
            )
        return text[:end].replace(end_mark, "")

    def _render(self, values: dict[str, Any]) -> str:
        """A message without content (an assistant's tool calls) has null where the template looks for null, else "".

        Templates that do not look for it would fail on null, or write it out: the latter is seen by the word None in its place
        giving the same prompt.
        """
        if all(message.get("content") is not None for message in values["messages"]):
            return self._template.render(values)
        try:
            text = self._template.render(values)
        except BrokenTemplateError:
            return self._template.render(_with_content(values, ""))
        try:
            is_written_out = self._template.render(_with_content(values, "None")) == text
        except BrokenTemplateError:
            is_written_out = False
        return self._template.render(_with_content(values, "")) if is_written_out else text

    def _check(
        self, messages: Sequence[Message], add_generation_prompt: bool, continues: bool, variables: Mapping[str, Any] | None
    ) -> None:
        if continues and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude one another.", param="continue_final_message"
            )
        if continues and not (messages and messages[-1].get("role") == "assistant"):
            raise RequestError(
                "continue_final_message needs an assistant message as the last one.", param="continue_final_message"
            )
        reserved = {*self._special_tokens, "messages", "tools", "documents", "add_generation_prompt"}
        for name in variables or {}:
            if name in reserved:
                raise RequestError(f"chat_template_kwargs may not set {name}.", param="chat_template_kwargs")


def load_chat_template(
    folder: Path, tokenizer: TextTokenizer, *, bos_token_id: int | None, eos_token_ids: Sequence[int]
) -> ChatTemplate | None:
    """The template of a prepared folder; None when the model has none. Raises ModelError when it cannot be read or compiled."""
    path = folder / CHAT_TEMPLATE_FILE
    try:
        source = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"The chat template {path} cannot be read: {error}") from error
    ids = {"bos_token": bos_token_id, "eos_token": eos_token_ids[0] if eos_token_ids else None}
    texts = {name: tokenizer.token_text(token_id) for name, token_id in ids.items() if token_id is not None}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text})


def encode_chat(
    tokenizer: TextTokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the prompt. Only markers that the template itself wrote become control tokens.

    A marker in anybody's words is broken up with a character that no text holds before the template runs, and that character is
    taken out again once the prompt is cut at the true markers. BOS comes first where the model wants it, and never twice.
    Raises RequestError as ChatTemplate.render does, and when the model has no template.
    """
    if template is None:
        raise RequestError("This model has no chat template; use /v1/completions.", code=ErrorCode.CHAT_TEMPLATE_ERROR)
    guard = tokenizer.marker_guard
    sentinel = ""
    try:
        if any(guard.is_risky(_words(message)) for message in messages) or guard.is_risky([tools, variables]):
            sentinel = _free_character(messages, tools, variables)
            messages = [{**message, **guard.break_up(_words(message), sentinel)} for message in messages]
            tools, variables = guard.break_up(tools, sentinel), guard.break_up(variables, sentinel)
    except RecursionError as error:
        raise RequestError(
            "The messages are nested too deeply.", code=ErrorCode.CHAT_TEMPLATE_ERROR, param="messages"
        ) from error
    text = template.render(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        tools=tools,
        variables=variables,
    )
    parts = tokenizer.split_markers(text)
    if sentinel:
        parts = [part.replace(sentinel, "") if isinstance(part, str) else part for part in parts]
    token_ids = tokenizer.with_prefix(tokenizer.encode_parts(parts))
    if not token_ids:
        raise RequestError("The conversation renders to an empty prompt.", code=ErrorCode.CHAT_TEMPLATE_ERROR, param="messages")
    return token_ids


def _with_content(values: dict[str, Any], content: str) -> dict[str, Any]:
    """The values with this content in the messages that have none."""
    messages = [
        message if message.get("content") is not None else {**message, "content": content} for message in values["messages"]
    ]
    return {**values, "messages": messages}


def _words(message: Message) -> dict[str, Any]:
    """The parts of a message that somebody wrote. The role is one of a fixed set, and templates make markers of it."""
    return {key: value for key, value in message.items() if key != "role"}


def _free_character(*values: Any) -> str:
    character = unused_character(*values)
    if character is None:
        raise RequestError("The messages hold every one of the noncharacters U+FDD0 to U+FDEF.", param="messages")
    return character
