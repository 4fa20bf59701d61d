"""A server without sockets that answers as a perfect one would, or with one named fault. Time is a ManualClock's."""

import asyncio
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any

from headrace.loadtest.audit.wire import Ask, Reply

WORDS = [" stone", " water", " bank", " green", " deep", " slow", " bend", " mill", " boat", " fish", " cold", " wide"]
EMOJI = ["🎉", "龜", "🥳", "你", "好", "🎂"]
TOKEN_SECONDS = 0.02
MAX_MODEL_LEN = 4096
KEY = "right-key"
BURST_LIMIT = 40

FAMILIES = {
    "ttft": ("headrace_time_to_first_token_seconds", "histogram"),
    "tbt": ("headrace_inter_token_latency_seconds", "histogram"),
    "running": ("headrace_num_requests_running", "gauge"),
    "waiting": ("headrace_num_requests_waiting", "gauge"),
    "kv": ("headrace_kv_cache_usage_perc", "gauge"),
    "tokens": ("headrace_generation_tokens", "counter"),
    "finished": ("headrace_request_success", "counter"),
}

# Rules of a request body by the name of the check that tries them.
RULES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "wrong-type": lambda body: isinstance(body.get("temperature"), str),
    "nan": lambda body: isinstance(body.get("temperature"), float) and math.isnan(body["temperature"]),
    "temperature-negative": lambda body: isinstance(body.get("temperature"), int | float) and body["temperature"] < 0,
    "top_p-range": lambda body: body.get("top_p", 1) > 1,
    "n-zero": lambda body: body.get("n", 1) < 1,
    "max_tokens-zero": lambda body: body.get("max_tokens", 1) == 0,
    "max_tokens-negative": lambda body: body.get("max_tokens", 1) < 0,
    "max_tokens-fraction": lambda body: isinstance(body.get("max_tokens"), float),
    "penalty-range": lambda body: abs(body.get("frequency_penalty", 0)) > 2,
    "logit_bias-key": lambda body: any(not key.isdecimal() for key in body.get("logit_bias", {})),
    "logit_bias-range": lambda body: any(abs(value) > 100 for value in body.get("logit_bias", {}).values()),
    "no-messages": lambda body: body["chat"] and "messages" not in body,
    "empty-messages": lambda body: body["chat"] and body.get("messages") == [],
    "wrong-messages": lambda body: body["chat"] and isinstance(body.get("messages"), str),
    "unknown-role": lambda body: body["chat"] and any(m["role"] == "wizard" for m in _messages(body)),
    "no-prompt": lambda body: not body["chat"] and "prompt" not in body,
    "logprobs-limit": lambda body: body.get("top_logprobs", 0) > 20,
}


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    return messages if isinstance(messages, list) else []


class ManualClock:
    """Sleeping moves the time, and lets others run."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)


class ScriptedServer:
    def __init__(self, clock: ManualClock, *faults: str, key: str = "") -> None:
        self.clock = clock
        self.faults = set(faults)
        self.key = key
        self.num_asked = 0
        self.in_flight = 0
        self.running = 0
        self.num_streams = 0
        self.num_answers = 0
        self.lanes: dict[str, float] = {}
        self.hold_limit: int | None = None
        self.seen_burst = False

    def has(self, fault: str) -> bool:
        return fault in self.faults

    async def exchange(self, ask: Ask) -> Reply:
        self.num_asked += 1
        self.in_flight += 1
        reply = Reply(f"{ask.method} {ask.path}", self.clock.now(), http_version="HTTP/1.1")
        try:
            for _ in range(3):  # so that requests of one gather see each other
                await asyncio.sleep(0)
            if not self._lane(ask, reply):
                return reply
            await self._route(ask, reply)
        finally:
            self.in_flight -= 1
        if reply.ended_at is None:
            reply.ended_at = reply.sent_at + 0.01
        reply.is_whole = not reply.fault
        reply.num_body_bytes = len(reply.body)
        return reply

    def _lane(self, ask: Ask, reply: Reply) -> bool:
        used = self.lanes.get(ask.lane) if ask.lane else None
        if ask.lane:
            self.lanes[ask.lane] = self.clock.now()
        if used is None:
            return True
        reply.is_reused = not self.has("closes-after-answer")
        if self.has("closes-idle") and self.clock.now() - used > 5:
            reply.fault = "cut: the connection closed before a status line"
            return False
        return True

    async def _route(self, ask: Ask, reply: Reply) -> None:
        path = ask.path
        if ask.method == "OPTIONS":
            return self._plain(reply, 500 if self.has("options-500") else 405, b"")
        is_guarded = self.key and path.startswith("/v1/") and not self.has("needs-no-key")
        if is_guarded and ("Authorization", f"Bearer {self.key}") not in ask.headers:
            return self._error(reply, 401, "invalid_api_key", "Wrong key.")
        if ask.method == "HEAD":
            return self._plain(reply, 500 if self.has("head-500") else 200, b"")
        if ask.is_chunked and self.has("no-chunked-requests"):
            return self._error(reply, 400, "bad", "A body is missing.")
        if path in ("/v1/chat/completions", "/v1/completions"):
            if ask.method == "GET":
                return self._error(reply, 200 if self.has("get-200") else 405, "method", "Use POST.")
            return await self._generate(ask, reply)
        return self._other(path, reply)

    def _other(self, path: str, reply: Reply) -> None:
        entry: dict[str, Any] = {"id": "scripted", "object": "model", "created": 1, "owned_by": "me"}
        if not self.has("no-context-length"):
            entry["max_model_len"] = MAX_MODEL_LEN
        if path == "/v1/models" and not self.has("no-models"):
            return self._json(reply, 200, {"object": "list", "data": [entry]})
        if path == "/v1/models/scripted" and not self.has("no-models-one"):
            return self._json(reply, 200, entry)
        if path == "/metrics" and not self.has("no-metrics"):
            reply.headers.append(("content-type", "text/html" if self.has("metrics-html") else "text/plain; version=0.0.4"))
            return self._body(reply, 200, self.metrics_text().encode())
        if path == "/health" and not self.has("no-health"):
            self._json(reply, 200, {"status": "ok"})
            if self.has("slow-health"):
                reply.ended_at = reply.sent_at + 9.0
            return None
        if path in ("/health/live", "/health/ready") and not self.has("one-probe"):
            return self._json(reply, 200, {"status": "ok"})
        if self.has("html-404"):
            reply.headers.append(("content-type", "text/html"))
            return self._body(reply, 404, b"<html><body>Not found</body></html>")
        if self.has("unknown-path-200"):
            return self._json(reply, 200, {})
        return self._error(reply, 404, "not_found", "There is nothing here.")

    def metrics_text(self) -> str:
        lines = []
        for thing, (name, kind) in FAMILIES.items():
            if self.has(f"no-metric-{thing}"):
                continue
            lines.append(f"# TYPE {name} {kind}")
            if kind == "histogram":
                count = 0 if self.has("ttft-uncounted") else self.num_streams + self.num_answers
                lines += [f'{name}_bucket{{le="+Inf"}} {count}', f"{name}_count {count}", f"{name}_sum 1"]
            elif kind == "counter":
                lines.append(f"{name}_total {self.num_answers}")
            else:
                value = self.running if thing == "running" else 0
                lines.append(f"{name} {'NaN' if self.has('metrics-nan') and thing == 'kv' else value}")
        if self.has("metrics-broken"):
            lines.append("this is { no metric")
        if self.has("metrics-twice"):
            lines += ["# TYPE headrace_num_requests_running gauge", "headrace_num_requests_running 0"]
        return "\n".join(lines) + "\n"

    # generation

    async def _generate(self, ask: Ask, reply: Reply) -> None:
        chat = ask.path.endswith("chat/completions")
        if ask.body_limit is not None:
            assert ask.drop is not None
            self.hold_limit = 1 if self.has("half-sent-blocks") else None
            await ask.drop.wait()
            self.hold_limit = None
            reply.is_dropped = True
            return None
        if self.hold_limit is not None:
            reply.fault = "timeout after 20 s"
            return None
        if self.in_flight > BURST_LIMIT and not (ask.drop is not None):
            return self._overloaded(reply)
        try:
            body = json.loads(ask.body)
        except ValueError:
            if self.has("accepts-broken-json" if ask.body else "accepts-empty-body"):
                return self._answer(reply, {"max_tokens": 2, "prompt": "x", "chat": chat})
            if self.has("trace-on-broken-json"):
                text = 'Traceback (most recent call last):\n  File "server.py", line 3'
                return self._body(reply, 500, text.encode())
            return self._error(reply, 400, "bad_json", "x" * (9000 if self.has("long-errors") else 9))
        if not isinstance(body, dict):
            if self.has("accepts-array-body"):
                return self._answer(reply, {"max_tokens": 2, "prompt": "x", "chat": chat})
            return self._error(reply, 400, "bad_json", "The body must be an object.")
        return await self._checked(ask, body | {"chat": chat}, reply)

    async def _checked(self, ask: Ask, body: dict[str, Any], reply: Reply) -> None:
        for name, breaks in RULES.items():
            if not self.has(f"accepts-{name}") and breaks(body):
                field = name.split("-")[0] if name != "logprobs-limit" else "top_logprobs"
                status = 500 if self.has(f"500-{name}") else 400
                return self._error(reply, status, "invalid", f"{field} is wrong.", field)
        if body.get("model") == "audit-no-such-model" and not self.has("any-model"):
            status = 400 if self.has("model-400") else 404
            return self._error(reply, status, "invalid" if self.has("model-code") else "model_not_found", "No such model.")
        if self.has("no-parts") and any(isinstance(message.get("content"), list) for message in _messages(body)):
            return self._error(reply, 500, "internal", "can only concatenate str")
        for name in [fault.removeprefix("refuses-") for fault in self.faults if fault.startswith("refuses-")]:
            if name in body:
                return self._error(reply, 400, "unsupported", f"{name} is not implemented.", name)
        return await self._fitting(ask, body, reply)

    async def _fitting(self, ask: Ask, body: dict[str, Any], reply: Reply) -> None:
        if body.get("stop") == [""] and self.has("stop-empty-ends"):
            body["max_tokens"] = 0
        if self._prompt_tokens(body) + body.get("max_tokens", 16) > MAX_MODEL_LEN and not self.has("cuts-prompts"):
            if body.get("stream") and self.has("stream-error-cut"):
                reply.headers.append(("content-type", "text/event-stream"))
                self._body(reply, 200, b"")
                reply.fault = "cut: the connection closed inside the body"
                return None
            words = "Something is wrong." if self.has("vague-length") else "The context length is exceeded."
            code = "invalid" if self.has("vague-length") else "context_length_exceeded"
            return self._error(reply, 400, code, words)
        if ask.drop is not None:
            return await self._run_long(ask, body, reply)
        return self._answer(reply, body)

    async def _run_long(self, ask: Ask, body: dict[str, Any], reply: Reply) -> None:
        """Until the client leaves."""
        assert ask.drop is not None
        self.running += 1
        reply.status = 200
        if body.get("stream") and ask.on_piece:
            reply.num_body_bytes = 5
            ask.on_piece(reply)
        await ask.drop.wait()
        if not self.has("never-cancels"):
            self.running -= 1
        reply.is_dropped = True

    def _overloaded(self, reply: Reply) -> None:
        self.seen_burst = True
        if self.has("burst-500"):
            return self._error(reply, 500, "internal", "Out of memory.")
        if self.has("burst-cut"):
            reply.fault = "cut: the connection closed before a status line"
            return None
        if not self.has("no-retry-after"):
            reply.headers.append(("retry-after", "soon" if self.has("vague-retry-after") else "2"))
        return self._error(reply, 503, "overloaded", "Too many requests.")

    def _prompt(self, body: dict[str, Any]) -> str:
        prompt = body.get("prompt", "")
        messages = body.get("messages")
        if isinstance(messages, list) and messages:
            content = messages[-1]["content"]
            prompt = content if isinstance(content, str) else "".join(part["text"] for part in content)
        return prompt if isinstance(prompt, str) else json.dumps(prompt)

    def _prompt_tokens(self, body: dict[str, Any]) -> int:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        return len(self._prompt(body).split()) + 1

    def _tokens(self, body: dict[str, Any], choice: int) -> list[str]:
        """The text as tokens: a hash of prompt, place and what is drawn."""
        prompt = self._prompt(body)
        limit = body.get("max_tokens", 16)
        if "max_completion_tokens" in body and not self.has("ignores-max_completion_tokens"):
            limit = body["max_completion_tokens"]
        limit = max(0, 16 if self.has("ignores-max_tokens") else int(limit))
        drawn = ""
        temperature = body.get("temperature", 1)
        is_drawing = (isinstance(temperature, str) or temperature > 0) and not self.has("ignores-temperature")
        if is_drawing and (body.get("top_p", 1) > 0.01 or self.has("ignores-top_p")):
            drawn = str(body["seed"]) if "seed" in body and not self.has("ignores-seed") else str(self.num_asked)
            drawn += str(choice)
        if self.has("unstable-later") and self.num_asked % 2:
            drawn = "odd"
        if self.has("unstable-under-load") and self.in_flight > 4:
            drawn = "load"
        bias = body.get("logit_bias")
        if bias and not self.has("ignores-logit_bias"):
            return [" ()"] * limit
        suffix = "" if self.has("ignores-suffix") else body.get("suffix", "")
        loops = "river flows" in prompt
        penalised = [name for name in ("frequency_penalty", "presence_penalty") if body.get(name)]
        if loops and not (penalised and not self.has(f"ignores-{penalised[0]}")):
            return [" river"] * limit
        words = EMOJI if any(ord(character) > 127 for character in prompt) else WORDS
        seed = f"{prompt}/{drawn}/{suffix}"
        return [words[hashlib.sha256(f"{seed}/{place}".encode()).digest()[0] % len(words)] for place in range(limit)]

    def _finished(self, body: dict[str, Any], choice: int) -> tuple[list[str], str, int]:
        """Tokens to show, finish reason, tokens counted."""
        tokens = self._tokens(body, choice)
        text = "".join(tokens)
        count = len(tokens)
        if body.get("response_format", {}).get("type") == "json_object" and not self.has("ignores-json_object"):
            return ['{"a": 1}'], "stop", 5
        if body.get("response_format", {}).get("type") == "json_schema" and not self.has("ignores-json_schema"):
            return ['{"depth": 3}'], "stop", 5
        for stop in body.get("stop") or []:
            if stop and stop in text and not self.has("ignores-stop"):
                cut = text.index(stop) + (1 if self.has("inexact-stop") else 0)
                if body.get("stream") and self.has("leaks-stop"):
                    cut += 2
                return [text[:cut]], "stop", count
        if body.get("stop") and self.has("stop-loses-tail"):
            tokens = tokens[:-1]
        if self.has("broken-utf8") and "🎉" in text:
            tokens = [token.replace("🎉", "��") for token in tokens]
        return tokens, "stop" if self.has("always-says-stop") else "length", count

    def _answer(self, reply: Reply, body: dict[str, Any]) -> None:
        prompts = body.get("prompt") if isinstance(body.get("prompt"), list) else None
        if prompts is not None and isinstance(prompts[0], int) and self.has("no-token-prompts"):
            return self._error(reply, 500, "internal", "")
        num_choices = max(1, body.get("n", 1)) if not self.has("ignores-n") else 1
        if prompts is not None and isinstance(prompts[0], str) and not self.has("ignores-lists"):
            num_choices *= len(prompts)
        done = [self._finished(body, choice) for choice in range(num_choices)]
        usage = self._usage(body, sum(count for _, _, count in done))
        if body.get("stream"):
            return self._stream(reply, body, done, usage)
        self.num_answers += 1
        choices = [self._choice(body, index, *finished[:2]) for index, finished in enumerate(done)]
        if self.has("wrong-order"):
            choices.reverse()
        value = self._identity(body, streamed=False) | {"choices": choices, "usage": usage}
        if self.has("no-usage"):
            del value["usage"]
        self._json(reply, 200, value)
        reply.ended_at = reply.sent_at + 0.1 * (1 + self.running)
        if self.has("slow-after-burst") and self.seen_burst and self.in_flight == 1:
            reply.ended_at = reply.sent_at + 50
        return None

    def _usage(self, body: dict[str, Any], count: int) -> dict[str, int]:
        prompt = self._prompt_tokens(body)
        if body.get("stream") and self.has("stream-usage-differs"):
            count += 1
        total = prompt + count + (1 if self.has("usage-adds-wrong") else 0)
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": total}

    def _identity(self, body: dict[str, Any], *, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if body["chat"] else "text_completion"
        if self.has("wrong-object"):
            kind = "thing"
        return {"id": "cmpl-1", "object": kind, "created": 1, "model": "scripted"}

    def _choice(self, body: dict[str, Any], index: int, tokens: list[str], reason: str) -> dict[str, Any]:
        text = "".join(tokens)
        logprobs = self._logprobs(body, tokens)
        if not body["chat"]:
            echoed = self._prompt(body) if body.get("echo") and not self.has("ignores-echo") else ""
            return {"index": index, "text": echoed + text, "finish_reason": reason, "logprobs": logprobs}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if body.get("tools") and not self.has("ignores-tools"):
            call = {"id": "1", "type": "function", "function": {"name": "get_depth", "arguments": '{"river": "Danube"}'}}
            message, reason = {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
        return {"index": index, "message": message, "finish_reason": reason, "logprobs": logprobs}

    def _logprobs(self, body: dict[str, Any], tokens: list[str]) -> Any:
        wanted = body.get("logprobs")
        if not wanted or self.has("null-logprobs"):
            return None
        if not body["chat"]:
            top: Any = [{token: -0.1, " other": -2.0} for token in tokens]
            return {
                "tokens": tokens,
                "token_logprobs": [-0.1] * len(tokens),
                "top_logprobs": top,
                "text_offset": [0] * len(tokens),
            }
        if self.has("legacy-logprobs"):
            return {"tokens": tokens, "token_logprobs": [-0.1] * len(tokens)}
        tops = [{"token": " x", "logprob": -0.1 - place, "bytes": None} for place in range(min(body["top_logprobs"], 2))]
        return {"content": [{"token": t, "logprob": -0.1, "bytes": None, "top_logprobs": tops} for t in tokens]}

    def _stream(self, reply: Reply, body: dict[str, Any], done: list[tuple[list[str], str, int]], usage: Any) -> None:
        self.num_streams += 1
        reply.headers += [("content-type", "application/json" if self.has("stream-as-json") else "text/event-stream")]
        if self.has("gzip"):
            reply.headers.append(("content-encoding", "gzip"))
        elif not self.has("no-cache-control"):
            reply.headers.append(("cache-control", "no-cache"))
        chunks = self._chunks(body, done, usage)
        at = reply.sent_at + 0.05
        reply.status = 200
        late = self.has("buffers") or self.has("gzip")
        for chunk in chunks:
            at += TOKEN_SECONDS
            reply.pieces.append((at, chunk))
        if late:
            reply.pieces = [(at, b"".join(chunks))]
        reply.headers_at = at if self.has("late-headers") else reply.sent_at + 0.01
        reply.ended_at = at
        if self.has("interrupts-streams") and self.in_flight > 3:
            reply.pieces = reply.pieces[:2]
            reply.fault = "cut: the connection closed inside the body"

    def _chunks(self, body: dict[str, Any], done: list[tuple[list[str], str, int]], usage: Any) -> list[bytes]:
        values: list[Any] = []
        for index, (tokens, reason, _) in enumerate(done):
            if self.has("stream-drops-token"):
                tokens = tokens[:-1]
            pieces = tokens or [""]
            for place, token in enumerate(pieces):
                is_last = place == len(pieces) - 1
                values.append(self._chunk(body, index, place, token, reason if is_last else None))
        if self.has("two-finishes"):
            values.append(self._chunk(body, 0, 9, "", "stop"))
        if self.has("role-chunk"):
            values.insert(0, self._chunk(body, 0, 0, "", None))
        options = body.get("stream_options") or {}
        if (options.get("include_usage") and not self.has("no-stream-usage")) or self.has("usage-unasked"):
            values.append(self._identity(body, streamed=True) | {"choices": [], "usage": usage})
        data = [json.dumps(value, ensure_ascii=False).encode() for value in values]
        if self.has("ids-change"):
            data = [item.replace(b"cmpl-1", b"cmpl-%d" % number) for number, item in enumerate(data)]
        marks = [b"[DONE]"] * (2 if self.has("two-done") else 0 if self.has("no-done") else 1)
        chunks = [b"data: " + item + b"\n\n" for item in [*data, *marks]]
        if self.has("bad-framing"):
            chunks[1] = b"oops " + chunks[1]
        return chunks

    def _chunk(self, body: dict[str, Any], index: int, place: int, token: str, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if body["chat"]:
            names_role = place == 0 or self.has("role-everywhere")
            choice["delta"] = ({"role": "assistant"} if names_role else {}) | {"content": token}
        else:
            choice["text"] = token
        return self._identity(body, streamed=True) | {"choices": [choice]}

    # replies

    def _error(self, reply: Reply, status: int, code: str, message: str, param: str | None = None) -> None:
        value: Any = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}
        if self.has("detail-errors"):
            value = {"detail": message}
        self._json(reply, status, value)

    def _json(self, reply: Reply, status: int, value: Any) -> None:
        reply.headers.append(("content-type", "application/json"))
        self._body(reply, status, json.dumps(value).encode())

    def _plain(self, reply: Reply, status: int, data: bytes) -> None:
        self._body(reply, status, data)

    def _body(self, reply: Reply, status: int, data: bytes) -> None:
        reply.status = status
        reply.headers_at = reply.sent_at + 0.01
        reply.pieces.append((reply.sent_at + 0.01, data))
        if self.has("cut-answers"):
            reply.fault = "cut: the connection closed inside the body"
