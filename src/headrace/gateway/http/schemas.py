"""The bodies of the OpenAI surface as msgspec structs: what is accepted, and what is answered.

Owns: field names, types and their descriptions; the OpenAPI document is made from them. Runs in: gateway.
Must not know: ranges (protocol/sampling.py checks them), how an answer is made.

None always means "not said". Fields of type Any are known but not implemented: `unsupported.py` says which values pass.
"""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from headrace.telemetry.reports import RequestReport

TIMELINE_NOTE = "Of each choice; only when the header x-headrace-timeline asks for it."


def _range(low: float, high: float, description: str) -> Meta:
    return Meta(description=description, extra_json_schema={"minimum": low, "maximum": high})


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed answer."""

    include_usage: Annotated[
        bool | None, Meta(description='One more chunk before [DONE], with "choices": [] and the usage.')
    ] = None
    include_timeline: Annotated[
        bool | None, Meta(description='One more chunk before [DONE], with "choices": [] and each choice\'s timeline.')
    ] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Accepted; no padding is ever added.")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Not implemented: only false is taken.")] = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and completions have in common."""

    model: Annotated[str | None, Meta(description="The served model's id; may be left out.")] = None
    temperature: Annotated[float | None, _range(0, 2, "0 takes the most likely token each time.")] = None
    top_p: Annotated[float | None, _range(0, 1, "Nucleus sampling; above 0.")] = None
    top_k: Annotated[int | None, Meta(description="Only the k most likely tokens; 0 or -1 means all.")] = None
    min_p: Annotated[float | None, _range(0, 1, "Least probability, relative to the most likely token's.")] = None
    seed: Annotated[int | None, Meta(description="The same seed and prompt give the same text. Drawn when left out.")] = None
    repetition_penalty: Annotated[float | None, _range(0, 10, "Over prompt and output; 1 is none.")] = None
    presence_penalty: Annotated[float | None, _range(-2, 2, "Subtracted once for a token that was output before.")] = None
    frequency_penalty: Annotated[float | None, _range(-2, 2, "Subtracted for each time a token was output before.")] = None
    logit_bias: Annotated[dict[str, float] | None, Meta(description="Token id to what is added, from -100 to 100.")] = None
    stop: Annotated[str | list[str] | None, Meta(description="Up to 16 strings that end the text; none may be empty.")] = None
    stop_token_ids: Annotated[list[int] | None, Meta(description="Token ids that end the text.")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on after the end-of-sequence token.")] = None
    min_tokens: Annotated[int | None, Meta(description="No end before so many tokens.")] = None
    max_tokens: Annotated[int | None, Meta(description="Most tokens to generate.")] = None
    n: Annotated[int | None, Meta(description="How many answers to each prompt.", extra_json_schema={"minimum": 1})] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only together with stream.")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Keep the stop string in the text.")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave control tokens out of the text; default true.")] = None
    priority: Annotated[
        int | None, Meta(description="Within its service class, lower is served first; default 0; a 32-bit number.")
    ] = None
    timeout: Annotated[
        float | None,
        Meta(
            description="Seconds from arrival to the last token, above 0 and at most 86400: past them the request ends with "
            "the error deadline_exceeded. One that cannot get its first token in time is refused at once. Default: none.",
            extra_json_schema={"exclusiveMinimum": 0, "maximum": 86400},
        ),
    ] = None
    cache_salt: Annotated[str | None, Meta(description="Share cached prefixes only with requests of the same salt.")] = None
    user: Annotated[Any, Meta(description="Accepted; changes nothing.")] = None
    safety_identifier: Annotated[Any, Meta(description="Accepted; changes nothing.")] = None
    metadata: Annotated[Any, Meta(description="Accepted; changes nothing.")] = None
    spaces_between_special_tokens: Annotated[Any, Meta(description="Accepted; changes nothing.")] = None
    length_penalty: Annotated[Any, Meta(description="Accepted; belongs to beam search.")] = None
    service_tier: Annotated[
        str | None,
        Meta(
            description="priority: the most urgent service class; flex or scale: the least urgent one; auto or default: the "
            "default one. The answer names the one used."
        ),
    ] = None
    logprobs: Annotated[Any, Meta(description="Not implemented.")] = None
    top_logprobs: Annotated[Any, Meta(description="Not implemented.")] = None
    prompt_logprobs: Annotated[Any, Meta(description="Not implemented.")] = None
    logprob_token_ids: Annotated[Any, Meta(description="Not implemented.")] = None
    use_beam_search: Annotated[Any, Meta(description="Not implemented.")] = None
    response_format: Annotated[Any, Meta(description='Only {"type": "text"}.')] = None
    structured_outputs: Annotated[Any, Meta(description="Not implemented.")] = None
    guided_json: Annotated[Any, Meta(description="Not implemented.")] = None
    guided_regex: Annotated[Any, Meta(description="Not implemented.")] = None
    guided_choice: Annotated[Any, Meta(description="Not implemented.")] = None
    guided_grammar: Annotated[Any, Meta(description="Not implemented.")] = None
    grammar: Annotated[Any, Meta(description="Not implemented.")] = None
    allowed_token_ids: Annotated[Any, Meta(description="Not implemented.")] = None
    bad_words: Annotated[Any, Meta(description="Not implemented.")] = None
    logits_processors: Annotated[Any, Meta(description="Not implemented.")] = None
    truncate_prompt_tokens: Annotated[Any, Meta(description="Not implemented: a prompt is never cut.")] = None
    return_token_ids: Annotated[Any, Meta(description="Not implemented.")] = None
    return_tokens_as_token_ids: Annotated[Any, Meta(description="Not implemented.")] = None
    repetition_detection: Annotated[Any, Meta(description="Not implemented.")] = None
    kv_transfer_params: Annotated[Any, Meta(description="Not implemented.")] = None
    vllm_xargs: Annotated[Any, Meta(description="Not implemented.")] = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message. Only type text is taken."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function the assistant called: its name, and its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an assistant's earlier message."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of the conversation so far."""

    role: Annotated[str, Meta(description="system, developer (means system), user, assistant or tool.")]
    content: Annotated[str | list[ContentPart] | None, Meta(description="Text; may be null beside tool_calls only.")] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: Annotated[str | None, Meta(description="Accepted when null.")] = None
    annotations: Annotated[Any, Meta(description="Accepted; changes nothing.")] = None
    audio: Annotated[Any, Meta(description="Not implemented.")] = None
    function_call: Annotated[Any, Meta(description="Not implemented: use tool_calls.")] = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Annotated[
        int | None, Meta(description="Most tokens to generate; wins over max_tokens. Default: all that fit.")
    ] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="Open the assistant's turn; default true.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="Go on with the last message, the assistant's.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="More variables for the template.")] = None
    parallel_tool_calls: Annotated[Any, Meta(description="Accepted; changes nothing without tools.")] = None
    prompt_cache_key: Annotated[Any, Meta(description="Accepted; prefixes are cached anyway.")] = None
    prompt_cache_retention: Annotated[Any, Meta(description="Accepted; changes nothing.")] = None
    store: Annotated[Any, Meta(description="Only false.")] = None
    tools: Annotated[Any, Meta(description="Not implemented: only an empty list.")] = None
    tool_choice: Annotated[Any, Meta(description="none or auto.")] = None
    functions: Annotated[Any, Meta(description="Not implemented.")] = None
    function_call: Annotated[Any, Meta(description="none or auto.")] = None
    modalities: Annotated[Any, Meta(description='Only ["text"].')] = None
    audio: Annotated[Any, Meta(description="Not implemented.")] = None
    prediction: Annotated[Any, Meta(description="Not implemented.")] = None
    web_search_options: Annotated[Any, Meta(description="Not implemented.")] = None
    reasoning_effort: Annotated[Any, Meta(description="Only none.")] = None
    thinking_token_budget: Annotated[Any, Meta(description="Not implemented.")] = None
    include_reasoning: Annotated[Any, Meta(description="Only true.")] = None
    verbosity: Annotated[Any, Meta(description="Only medium.")] = None
    echo: Annotated[Any, Meta(description="Only false.")] = None
    add_special_tokens: Annotated[Any, Meta(description="Only false: the template brings its own.")] = None
    chat_template: Annotated[Any, Meta(description="Refused: the model's own template is used.")] = None
    documents: Annotated[Any, Meta(description="Not implemented.")] = None
    mm_processor_kwargs: Annotated[Any, Meta(description="Not implemented.")] = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A string, a list of strings, a list of token ids, or a list of lists of token ids."),
    ]
    echo: Annotated[bool | None, Meta(description="Begin the text with the prompt; max_tokens may then be 0.")] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Begin with BOS where the model asks for it; default true.")
    ] = None
    best_of: Annotated[int | None, Meta(description="Only the same as n.")] = None
    suffix: Annotated[Any, Meta(description="Not implemented.")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="With prompt, default true; a template brings its own.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class TokenizeResponse(msgspec.Struct):
    """Ids of a text or conversation. token_strs: the text of each, when asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text of the ids, control tokens included."""

    prompt: str


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: prompt tokens whose computation was reused."""

    cached_tokens: int


class UsageBlock(msgspec.Struct):
    """What a request consumed; over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerMessage(msgspec.Struct):
    """The assistant's answer."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of n answers. finish_reason is stop or length; stop_reason the stop string that ended it, if one did."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: None = None
    stop_reason: str | None = None


class ChatCompletion(msgspec.Struct):
    """Answer of POST /v1/chat/completions when not streamed."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBlock
    object: str = "chat.completion"
    service_tier: str | UnsetType = UNSET
    timeline: Annotated[list[RequestReport] | UnsetType, Meta(description=TIMELINE_NOTE)] = UNSET


class TextChoice(msgspec.Struct):
    """One completion. index = number of the prompt * n + number of the answer."""

    index: int
    text: str
    finish_reason: str
    logprobs: None = None
    stop_reason: str | None = None


class TextCompletion(msgspec.Struct):
    """Answer of POST /v1/completions when not streamed."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: UsageBlock
    object: str = "text_completion"
    service_tier: str | UnsetType = UNSET
    timeline: Annotated[list[RequestReport] | UnsetType, Meta(description=TIMELINE_NOTE)] = UNSET


class ModelEntry(msgspec.Struct):
    """The served model. max_model_len: most tokens of one sequence, prompt and output together."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "headrace"
    parent: None = None


class ModelList(msgspec.Struct):
    """Answer of GET /v1/models."""

    data: list[ModelEntry]
    object: str = "list"


class HealthReport(msgspec.Struct, omit_defaults=True):
    """status is ok, or the code of what is wrong; reason says it in words."""

    status: str
    reason: str | None = None


class VersionReport(msgspec.Struct):
    """Answer of GET /version."""

    version: str


class LogLevelRequest(msgspec.Struct):
    """Body of PUT /debug/log-level."""

    level: Annotated[str, Meta(description="debug, info, warning or error.")]


class LogLevelReport(msgspec.Struct):
    """The least level of lines that are logged: debug, info, warning or error."""

    level: str


class ErrorDetail(msgspec.Struct):
    """What went wrong. param names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    """Body of every answer that is not a success."""

    error: ErrorDetail
    timeline: Annotated[
        list[RequestReport] | UnsetType, Meta(description="Of requests that had begun, when it was asked for.")
    ] = UNSET
