"""Every error that can reach a client: its code, HTTP status and whether a retry makes sense.

Owns: the one table of error codes. Runs in: everywhere. Must not know: any API's JSON shape (the gateway renders it).
"""

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """What a client is told about one kind of error. `grpc` is the canonical gRPC status name."""

    code: str
    http_status: int
    grpc: str
    retryable: bool


class ErrorCode(enum.Enum):
    """All kinds. The value travels on the wire as `code`."""

    INVALID_VALUE = ErrorKind("invalid_value", 400, "INVALID_ARGUMENT", False)
    INVALID_JSON = ErrorKind("invalid_json", 400, "INVALID_ARGUMENT", False)
    UNSUPPORTED_VALUE = ErrorKind("unsupported_value", 400, "INVALID_ARGUMENT", False)
    CONTEXT_LENGTH_EXCEEDED = ErrorKind("context_length_exceeded", 400, "INVALID_ARGUMENT", False)
    CHAT_TEMPLATE_ERROR = ErrorKind("chat_template_error", 400, "INVALID_ARGUMENT", False)
    UNAUTHORIZED = ErrorKind("unauthorized", 401, "UNAUTHENTICATED", False)
    FORBIDDEN = ErrorKind("forbidden", 403, "PERMISSION_DENIED", False)
    NOT_FOUND = ErrorKind("not_found", 404, "NOT_FOUND", False)
    MODEL_NOT_FOUND = ErrorKind("model_not_found", 404, "NOT_FOUND", False)
    METHOD_NOT_ALLOWED = ErrorKind("method_not_allowed", 405, "UNIMPLEMENTED", False)
    REQUEST_TIMEOUT = ErrorKind("request_timeout", 408, "DEADLINE_EXCEEDED", True)
    CONTENT_TOO_LARGE = ErrorKind("content_too_large", 413, "INVALID_ARGUMENT", False)
    UNSUPPORTED_MEDIA_TYPE = ErrorKind("unsupported_media_type", 415, "INVALID_ARGUMENT", False)
    TENANT_OVER_SHARE = ErrorKind("tenant_over_share", 429, "RESOURCE_EXHAUSTED", True)
    INTERNAL = ErrorKind("internal_error", 500, "INTERNAL", False)
    EXECUTION_FAILED = ErrorKind("execution_failed", 500, "INTERNAL", True)
    WORKER_LOST = ErrorKind("worker_lost", 503, "UNAVAILABLE", True)
    NOT_READY = ErrorKind("not_ready", 503, "UNAVAILABLE", True)
    OVERLOADED = ErrorKind("overloaded", 503, "UNAVAILABLE", True)
    DRAINING = ErrorKind("draining", 503, "UNAVAILABLE", True)
    DEADLINE_EXCEEDED = ErrorKind("deadline_exceeded", 503, "DEADLINE_EXCEEDED", True)

    @classmethod
    def from_wire(cls, code: str) -> "ErrorCode":
        """The member with this wire code; INTERNAL for one that is not known."""
        return _BY_CODE.get(code, cls.INTERNAL)


class RejectReason(enum.Enum):
    """Why a request was turned away at the door, for programs: the value of the header x-headrace-reject-reason."""

    QUEUE_FULL = "queue_full"  # a bound on what is in flight or waits
    CLASS_QUEUE_FULL = "class_queue_full"  # a bound of its class
    PREDICTED_TTFT = "predicted_ttft"  # its first token would come too late
    TENANT_SHARE = "tenant_share"  # as before, because of what its own tenant has waiting
    SHED = "shed"  # background work, while other classes are near their targets


_BY_CODE = {member.value.code: member for member in ErrorCode}


class HeadraceError(Exception):
    """Base of the errors that a person or client is meant to read. `message` says what to do where that is known."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(HeadraceError):
    """A request that is refused or that failed. `param` names the field at fault; `retry_after_seconds` when to come again.

    `reject_reason`: why the door was closed, where it was.
    """

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode = ErrorCode.INVALID_VALUE,
        param: str | None = None,
        retry_after_seconds: int | None = None,
        reject_reason: RejectReason | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.retry_after_seconds = retry_after_seconds
        self.reject_reason = reject_reason


class ConfigurationError(HeadraceError):
    """The configuration cannot work: shown to the operator at start."""


class ModelError(HeadraceError):
    """A model cannot be found, read or prepared: shown to the operator with the reason and, where known, the way out."""
