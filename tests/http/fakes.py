"""A scripted generation service and a tokenizer of one token for each byte, for tests of the HTTP surface."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace.gateway.deltas import CallOutline, GenerationSpec, ModelCard, TextDelta
from headrace.gateway.http.app import Application, create_app
from headrace.gateway.http.settings import HttpSettings
from headrace.protocol.errors import RequestError
from headrace.protocol.messages import Usage, WorkerLimits
from headrace.protocol.traffic import TrafficPolicy
from headrace.telemetry.reports import DebugRequests, RequestReport, StallReport

MODEL = "tiny"
BOS, EOS, NUM_BYTES, VOCAB_SIZE = 256, 257, 256, 260
MAX_MODEL_LEN = 128
STALL_THRESHOLD_NS = 20_000_000

Script = Callable[[GenerationSpec, int], list[TextDelta | None]]


class ByteTokenizer:
    """Token i < 256 is byte i. With `add_bos`, texts begin with BOS as some models ask."""

    vocab_size = VOCAB_SIZE

    def __init__(self, add_bos: bool = False) -> None:
        self.add_bos = add_bos
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        self.encoded.append(text)
        return [BOS] * (self.add_bos and add_special_tokens) + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        parts = [bytes([i]) if i < NUM_BYTES else b"" if skip_special_tokens else b"<%d>" % i for i in token_ids]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < NUM_BYTES else b""


def words(*texts: str, finish: str = "stop", stop_string: str | None = None) -> Script:
    """Each choice says these texts, one token each, and ends. The answer's number is in no text."""

    def script(spec: GenerationSpec, number: int) -> list[TextDelta | None]:
        usage = Usage(len(spec.prompt_token_ids), len(texts), num_cached_tokens=number)
        deltas: list[TextDelta | None] = [TextDelta(text, 1) for text in texts[:-1]]
        last = texts[-1] if texts else ""
        return [*deltas, TextDelta(last, 1, finish_reason=finish, stop_string=stop_string, usage=usage)]

    return script


def breaks_after(error: RequestError | Exception, *texts: str) -> Script:
    """Says the texts, then fails: with an error delta, or by raising what is no RequestError."""

    def script(spec: GenerationSpec, number: int) -> list[Any]:
        del spec, number
        return [*[TextDelta(text, 1) for text in texts], TextDelta(error=error) if isinstance(error, RequestError) else error]

    return script


def hangs_after(*texts: str) -> Script:
    """Says the texts, then nothing more."""
    return lambda spec, number: [*[TextDelta(text, 1) for text in texts], None]


def report_on(
    spec: GenerationSpec, state: str = "finished", age_ms: float = 30.0, reason: str | None = "stop"
) -> RequestReport:
    """A report as the service would make it, with made-up durations."""
    origin = spec.origin
    return RequestReport(
        request_id=origin.client_request_id,
        choice=origin.choice_index,
        api=origin.api,
        model=MODEL,
        service_class=spec.service_class,
        tenant=spec.tenant_id,
        priority=spec.priority,
        state=state,
        finish_reason=reason,
        error_code=None,
        arrived_at=1.5,
        age_ms=age_ms,
        tokenized_ms=1.0,
        queued_ms=1.5,
        first_scheduled_ms=4.0,
        first_token_ms=10.0,
        last_token_ms=age_ms,
        end_ms=age_ms,
        phases={"tokenize": 1.0, "queue": 3.0, "prefill": 6.0, "decode": age_ms - 10.0},
        prompt_tokens=len(spec.prompt_token_ids),
        cached_tokens=0,
        output_tokens=3,
        max_tokens=spec.stopping.max_tokens,
        preemptions=0,
        stalls=[StallReport("prefill", 12.0, 300.0)],
        num_stalls=1,
        waiting_for=None,
    )


class FakeStream:
    def __init__(self, deltas: list[TextDelta | None], spec: GenerationSpec, number: int) -> None:
        self.deltas = list(deltas)
        self.spec = spec
        self.number = number
        self.num_cancels = 0
        self.ended = False
        self.slow_reads: list[tuple[int, int]] = []
        self.timeline_fails = False

    async def next_delta(self) -> TextDelta:
        assert not self.ended, "asked again after the last delta"
        await asyncio.sleep(0)
        delta = self.deltas.pop(0)
        if delta is None:
            await asyncio.Event().wait()
        if isinstance(delta, Exception):
            raise delta
        assert delta is not None
        self.ended = delta.finish_reason is not None or delta.error is not None
        return delta

    def cancel(self) -> None:
        self.num_cancels += 1

    def timeline_report(self) -> RequestReport:
        if self.timeline_fails:
            raise ValueError("measuring is broken")
        cancelled = self.num_cancels and not self.ended
        return report_on(self.spec, age_ms=30.0 + self.number, reason="abort" if cancelled else "stop")

    def note_slow_reader(self, began_ns: int, duration_ns: int) -> None:
        self.slow_reads.append((began_ns, duration_ns))


@dataclass
class FakeService:
    script: Script = field(default_factory=lambda: words("Hel", "lo", "!"))
    card: ModelCard = field(
        default_factory=lambda: ModelCard(MODEL, 1_700_000_000, VOCAB_SIZE, MAX_MODEL_LEN, BOS, frozenset({EOS}), False)
    )
    not_ready: RequestError | None = None
    refuse_submit: dict[int, RequestError] = field(default_factory=dict)
    specs: list[GenerationSpec] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    http_counts: list[tuple[str, int]] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)
    reject_reasons: list[str] = field(default_factory=list)
    refuse_check: RequestError | None = None
    calls: list[CallOutline] = field(default_factory=list)  # that asked to be let in
    metrics_fail: bool = False
    debug_limits: list[int] = field(default_factory=list)

    def limits(self) -> WorkerLimits:
        if self.not_ready:
            raise self.not_ready
        return WorkerLimits(VOCAB_SIZE, MAX_MODEL_LEN, max_num_seqs=4, num_blocks=64, block_size=16)

    def check_admission(self, call: CallOutline) -> None:
        self.calls.append(call)
        if self.refuse_check:
            raise self.refuse_check

    def submit_call(self, specs: Sequence[GenerationSpec], call: CallOutline | None = None) -> list[FakeStream]:
        assert call is self.calls[-1], "what is submitted was checked before"
        started: list[FakeStream] = []
        try:
            for spec in specs:
                started.append(self._submit(spec))
        except RequestError:
            for stream in started:
                stream.cancel()
            raise
        return started

    def _submit(self, spec: GenerationSpec) -> FakeStream:
        number = len(self.specs)
        self.specs.append(spec)
        if number in self.refuse_submit:
            raise self.refuse_submit[number]
        self.streams.append(FakeStream(self.script(spec, number), spec, number))
        self.streams[-1].timeline_fails = self.metrics_fail
        return self.streams[-1]

    def debug_requests(self, limit: int) -> DebugRequests:
        self.debug_limits.append(limit)
        live = [report_on(stream.spec, state="decode", reason=None) for stream in self.streams]
        return DebugRequests(live=live[:limit], num_live=len(live), finished=[])

    def readiness(self) -> RequestError | None:
        return self.not_ready

    def metrics_exposition(self) -> tuple[bytes, str]:
        return b"# HELP x y\n", "text/plain; version=0.0.4; charset=utf-8"

    def count_http(self, route: str, status: int) -> None:
        if self.metrics_fail:
            raise ValueError("metrics are broken")
        self.http_counts.append((route, status))

    def count_rejection(self, code: str, reason: str = "") -> None:
        if self.metrics_fail:
            raise ValueError("metrics are broken")
        self.rejections.append(code)
        if reason:
            self.reject_reasons.append(reason)


class FakeChatEncoder:
    """Renders "role:content;" and, when a turn is opened, "assistant:"."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: RequestError | None = None

    def __call__(
        self,
        messages: Sequence[Any],
        /,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Any = None,
    ) -> list[int]:
        if self.error:
            raise self.error
        self.calls.append(
            {
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "variables": variables,
            }
        )
        text = "".join(f"{message['role'][0]}:{message['content'] or ''};" for message in messages)
        return list((text + "a:" * add_generation_prompt).encode())


class Surface:
    """The application under test and its fakes; requests run to their end, each in its own event loop."""

    def __init__(
        self,
        settings: HttpSettings | None = None,
        add_bos: bool = False,
        traffic: TrafficPolicy | None = None,
        admin_token: str | None = None,
        max_token_chars: int | None = None,
    ) -> None:
        self.levels_asked: list[str] = []
        self.service = FakeService()
        self.tokenizer = ByteTokenizer(add_bos)
        self.encoder = FakeChatEncoder()
        self.app: Application = create_app(
            self.service,
            self.tokenizer,
            self.encoder,
            settings,
            traffic=traffic,
            stall_threshold_ns=STALL_THRESHOLD_NS,
            admin_token=admin_token,
            ask_log_level=self.levels_asked.append,
            max_token_chars=max_token_chars,
        )

    def request(self, method: str, path: str, *, address: str = "127.0.0.1", **arguments: Any) -> httpx.Response:
        """`address`: the client's."""

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=(address, 50123))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(call())

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
        return self.request("POST", "/v1/chat/completions", json=body, headers=headers)

    def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.request("POST", "/v1/completions", json={"prompt": "Hi"} | fields, headers=headers)

    def raw_chat(self, body: bytes, content_type: str = "application/json") -> httpx.Response:
        return self.request("POST", "/v1/chat/completions", content=body, headers={"content-type": content_type})


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object of an answer; checks its shape and size."""
    assert len(response.content) < 4096
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def events_of(content: bytes) -> list[Any]:
    """Parsed events: comments left out, the last must be [DONE] and the only one."""
    frames = content.split(b"\n\n")
    assert frames.pop() == b"", "the body ends with a whole frame"
    payloads = [frame.removeprefix(b"data: ") for frame in frames if not frame.startswith(b":")]
    assert all(b"\n" not in payload for payload in payloads)
    assert payloads.count(b"[DONE]") == 1
    assert payloads.pop() == b"[DONE]"
    return [json.loads(payload) for payload in payloads]


class RawCall:
    """One request on bare ASGI: what was sent, and a client that can go."""

    def __init__(self, app: Application, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.on_send: Callable[[dict[str, Any]], Any] | None = None
        self._app = app
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        all_headers = {"content-type": "application/json"} | (headers or {})
        self._scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
        }

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if self.on_send is not None:
            result = self.on_send(message)
            if result is not None:
                await result

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]
