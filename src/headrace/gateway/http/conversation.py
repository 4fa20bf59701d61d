"""Chat messages: from the request's structs to what a chat template takes.

Owns: the rules on roles and content. Runs in: gateway. Must not know: any template.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.gateway.http.schemas import ChatMessage, ContentPart, ToolCall
from headrace.gateway.http.unsupported import not_implemented
from headrace.protocol.errors import RequestError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_MESSAGES = 4096

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as plain objects: text parts joined by line ends, developer as system, only the keys that are set.

    Raises RequestError naming the message and field at fault.
    """
    if not messages:
        raise RequestError("messages must not be empty.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"At most {MAX_MESSAGES} messages are taken.", param="messages")
    return [_template_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def num_text_chars(messages: list[ChatMessage], variables: Mapping[str, Any] | None) -> int:
    """How much text a template has to handle, roughly."""
    num_chars = len(msgspec.json.encode(variables)) if variables else 0
    for message in messages:
        content = message.content or ""
        num_chars += len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)
        num_chars += len(message.reasoning_content or "") + len(message.name or "")
        num_chars += sum(len(call.function.arguments) for call in message.tool_calls or ())
    return num_chars


def prompt_mode(
    add_generation_prompt: bool | None, continue_final_message: bool | None, messages: list[dict[str, Any]]
) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message) with defaults: a turn is opened unless the last one is continued."""
    continues = bool(continue_final_message)
    if continues and add_generation_prompt:
        message = "continue_final_message and add_generation_prompt exclude one another."
        raise RequestError(message, param="continue_final_message")
    if continues and messages[-1]["role"] != "assistant":
        message = "continue_final_message needs an assistant message at the end."
        raise RequestError(message, param="continue_final_message")
    return (not continues if add_generation_prompt is None else add_generation_prompt), continues


def template_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """chat_template_kwargs, which may add variables but not replace the conversation itself."""
    if variables and not _RESERVED.isdisjoint(variables):
        names = ", ".join(sorted(_RESERVED.intersection(variables)))
        raise RequestError(f"chat_template_kwargs must not set {names}.", param="chat_template_kwargs")
    return variables or None


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    for field in ("audio", "function_call", "refusal"):
        if getattr(message, field) is not None:
            raise not_implemented(f"{where}.{field}")
    if message.tool_calls and role != "assistant":
        raise RequestError(f"{where}.tool_calls belong to an assistant message.", param=f"{where}.tool_calls")
    content = _content(message.content, f"{where}.content")
    if content is None and not message.tool_calls:
        raise RequestError(f"{where}.content is required; only beside tool_calls may it be null.", param=f"{where}.content")
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{number}]") for number, call in calls]
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            plain[field] = value
    return plain


def _content(content: str | list[ContentPart] | None, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not content:
        raise RequestError(f"{where} must not be an empty list.", param=where)
    texts = []
    for number, part in enumerate(content):
        if part.type != "text":
            raise not_implemented(f"{where}[{number}].type")
        if part.text is None:
            raise RequestError(f"{where}[{number}].text is required.", param=f"{where}[{number}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """Templates want the arguments as an object, the API carries them as text."""
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        param = f"{where}.function.arguments"
        raise RequestError(f"{param} must be a JSON object as text.", param=param) from None
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
