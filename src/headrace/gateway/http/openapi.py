"""The OpenAPI 3.1 document, made from the request and response structs.

Owns: paths, examples and their words. Runs in: gateway. Must not know: handlers.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from headrace import __version__
from headrace.gateway.http import schemas
from headrace.protocol.errors import ErrorCode, RejectReason
from headrace.telemetry.reports import DebugRequests

GROUPS = {
    "Generate": "Text from a model, whole or as a stream of events.",
    "Models and tokens": "What is served, and how text becomes tokens.",
    "Operate": "For probes, dashboards and people.",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A header or a query parameter; all may be left out."""

    name: str
    place: Literal["header", "query"]
    description: str
    kind: str = "string"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `answer` is a struct, or the media type of an answer that is not JSON."""

    method: str
    path: str
    group: str
    summary: str
    description: str
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    example: dict[str, Any] | None = None
    errors: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()


_GENERATION_ERRORS = (400, 404, 408, 413, 415, 429, 500, 503)
_STREAM_NOTE = (
    'With "stream": true the answer is text/event-stream: chunks of the same id, the first of each choice with its first text, '
    "the last with its finish_reason, then data: [DONE]. A fault after the start is one event with an error object. "
    "Lines that begin with a colon are comments."
)
_GENERATION_HEADERS = (
    Parameter("x-request-id", "header", "The request's name in answers, logs and timelines; made up when left out."),
    Parameter("x-headrace-class", "header", "The service class; wins over service_tier. An unknown one is refused."),
    Parameter("x-headrace-tenant", "header", "Who asks. Names that the configuration does not know share one tenant, other."),
    Parameter("x-headrace-timeout", "header", "Seconds; wins over the field timeout."),
    Parameter(
        "x-headrace-timeline",
        "header",
        "true: the answer tells the timeline of each choice (streams: one more chunk before [DONE]; else: the member timeline, "
        "beside error too) and has a header Server-Timing. A stream's headers know only tokenize.",
    ),
    Parameter("traceparent", "header", "W3C Trace Context: the request's trace goes on from there."),
    Parameter("tracestate", "header", "W3C Trace Context."),
)
_GUARD_NOTE = (
    "Open to clients on the server's own machine that ask by a loopback name and through no proxy; when the server has an "
    "admin token, to whoever sends it as Authorization: Bearer TOKEN, and to nobody else."
)

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Generate",
        "Answer a conversation",
        "The model's chat template makes the prompt. Fields that are known but not implemented are refused with 400 and their "
        "name in param; unknown ones are named in the response header x-headrace-ignored-fields. " + _STREAM_NOTE,
        schemas.ChatCompletion,
        schemas.ChatCompletionRequest,
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 32},
        _GENERATION_ERRORS,
        _GENERATION_HEADERS,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Generate",
        "Continue a text",
        "One or many prompts, as text or token ids; index = number of the prompt * n + number of the answer. "
        "max_tokens is 16 when left out. " + _STREAM_NOTE,
        schemas.TextCompletion,
        schemas.CompletionRequest,
        {"prompt": "Once upon a time", "max_tokens": 32, "seed": 7},
        _GENERATION_ERRORS,
        _GENERATION_HEADERS,
    ),
    Operation("get", "/v1/models", "Models and tokens", "List the served model", "One entry.", schemas.ModelList),
    Operation(
        "get",
        "/v1/models/{model}",
        "Models and tokens",
        "Describe the served model",
        "404 with code model_not_found for any other id.",
        schemas.ModelEntry,
        errors=(404,),
    ),
    Operation(
        "post",
        "/tokenize",
        "Models and tokens",
        "Text or conversation to token ids",
        "Either prompt or messages.",
        schemas.TokenizeResponse,
        schemas.TokenizeRequest,
        {"prompt": "Hello, world"},
        (400, 404, 408, 413, 415, 503),
    ),
    Operation(
        "post",
        "/detokenize",
        "Models and tokens",
        "Token ids to text",
        "Control tokens are shown.",
        schemas.DetokenizeResponse,
        schemas.DetokenizeRequest,
        {"tokens": [19556, 28, 905]},
        (400, 404, 408, 413, 415, 503),
    ),
    Operation(
        "get",
        "/health/live",
        "Operate",
        "Does the process answer?",
        "200 as long as it does, also while it drains.",
        schemas.HealthReport,
    ),
    Operation(
        "get",
        "/health/ready",
        "Operate",
        "Are requests welcome?",
        "200 when the model is loaded and the worker makes progress; else 503 with the reason and Retry-After.",
        schemas.HealthReport,
        errors=(503,),
    ),
    Operation(
        "get", "/health", "Operate", "Are requests welcome?", "The same as /health/ready.", schemas.HealthReport, errors=(503,)
    ),
    Operation("get", "/metrics", "Operate", "Metrics", "In Prometheus' text format.", "text/plain"),
    Operation(
        "get",
        "/debug/requests",
        "Operate",
        "What each request waits for",
        "Requests that run or wait, the oldest first, and those that ended lately, the newest first, each with its timeline. "
        "No text of a request is in it. " + _GUARD_NOTE,
        DebugRequests,
        errors=(400, 401, 403),
        parameters=(Parameter("limit", "query", "Most of each kind: 1 to 1000, default 50.", "integer"),),
    ),
    Operation(
        "get",
        "/debug/log-level",
        "Operate",
        "The level of the log",
        _GUARD_NOTE,
        schemas.LogLevelReport,
        errors=(401, 403),
    ),
    Operation(
        "put",
        "/debug/log-level",
        "Operate",
        "Change the level of the log",
        "In all processes, until the server ends: debug, info, warning or error. " + _GUARD_NOTE,
        schemas.LogLevelReport,
        schemas.LogLevelRequest,
        {"level": "debug"},
        (400, 401, 403, 408, 413, 415),
    ),
    Operation("get", "/version", "Operate", "Version", "Of this program.", schemas.VersionReport),
    Operation("get", "/openapi.json", "Operate", "This interface as OpenAPI 3.1", "JSON.", "application/json"),
    Operation("get", "/docs", "Operate", "This page", "HTML, with no script and nothing loaded from elsewhere.", "text/html"),
)

_RETRY_HEADERS: dict[str, Any] = {
    "Retry-After": {
        "description": "Whole seconds. Whoever sends the same request again then has a place kept for it.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "x-headrace-reject-reason": {
        "description": "Why the request was turned away at the door.",
        "schema": {"type": "string", "enum": [reason.value for reason in RejectReason]},
    },
}
_REASONS = {
    400: "The request is at fault; param names the field.",
    401: "The admin token is missing or wrong.",
    403: "Only clients on the server's own machine may ask.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body is not JSON in UTF-8.",
    429: "The tenant's requests that wait use its share; Retry-After says when to come again.",
    500: "The server is at fault.",
    503: "Not now; Retry-After says when, where that is known.",
}


def openapi_document() -> dict[str, Any]:
    """The document as plain objects."""
    structs = {operation.answer for operation in OPERATIONS if not isinstance(operation.answer, str)}
    structs |= {operation.body for operation in OPERATIONS if operation.body is not None}
    ordered = sorted(structs | {schemas.ErrorResponse}, key=lambda struct: struct.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    codes = ", ".join(sorted(member.value.code for member in ErrorCode))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "description": f"An LLM inference server with the OpenAI API. Errors carry one of these codes: {codes}.",
        },
        "tags": [{"name": name, "description": description} for name, description in GROUPS.items()],
        "paths": paths,
        "components": {"schemas": dict(sorted(components.items()))},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    words = [word.strip("{}") for word in operation.path.split("/") if word]
    document: dict[str, Any] = {
        "operationId": "_".join([operation.method, *words]).replace(".", "_"),
        "tags": [operation.group],
        "summary": operation.summary,
        "description": operation.description,
        "responses": {"200": _success(operation)} | {str(status): _failure(operation, status) for status in operation.errors},
    }
    parameters: list[dict[str, Any]] = [
        {"name": word.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}
        for word in operation.path.split("/")
        if word.startswith("{")
    ]
    parameters += [
        {"name": item.name, "in": item.place, "description": item.description, "schema": {"type": item.kind}}
        for item in operation.parameters
    ]
    if parameters:
        document["parameters"] = parameters
    if operation.body is not None:
        content = {"schema": _reference(operation.body), "example": operation.example}
        document["requestBody"] = {"required": True, "content": {"application/json": content}}
    return document


def _success(operation: Operation) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        return {"description": "Success.", "content": {operation.answer: {}}}
    content: dict[str, Any] = {"application/json": {"schema": _reference(operation.answer)}}
    if operation.group == "Generate":
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "Success.", "content": content}


def _failure(operation: Operation, status: int) -> dict[str, Any]:
    document: dict[str, Any]
    body = schemas.HealthReport if operation.path.startswith("/health") else schemas.ErrorResponse
    document = {"description": _REASONS[status], "content": {"application/json": {"schema": _reference(body)}}}
    if status in (429, 503):
        document["headers"] = (
            _RETRY_HEADERS if operation.group == "Generate" else {"Retry-After": _RETRY_HEADERS["Retry-After"]}
        )
    return document


def _reference(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
