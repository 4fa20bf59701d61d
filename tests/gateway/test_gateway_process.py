"""Real gateway and worker processes over real rings; the model is the fake executor. The test is the supervisor."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import msgspec
import pytest

from headrace.gateway.config import GatewayConfig, ObservationConfig
from headrace.ipc.control import ControlEnd
from headrace.ipc.doorbell import Doorbell
from headrace.ipc.ring import Ring
from headrace.ipc.segment import Segment, new_instance
from headrace.ipc.status import StatusPage
from headrace.protocol.control import ChildFailed, ChildReady, Drain, Stop, WorkerExited, WorkerStarted
from headrace.protocol.graph import CHAT_TEMPLATE_FILE, MANIFEST_FILE, TOKENIZER_FILE
from headrace.protocol.manifest import FORMAT_VERSION, Manifest
from headrace.telemetry.status_fields import STATUS_FIELDS
from headrace.worker.config import GatewayLink, WorkerConfig

pytestmark = pytest.mark.slow
WAIT_SECONDS = 20
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class Child:
    """One process and this end of its control socket."""

    def __init__(self, command, make_config, fds, stderr):
        self.control, theirs = ControlEnd.pair()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, pass_fds=[*fds, theirs.fileno()])
        self.process.stdin.write(msgspec.json.encode(make_config(theirs.fileno())))
        self.process.stdin.close()
        theirs.close()

    def receive(self):
        """The next message from it."""
        assert self.control.wait_message(WAIT_SECONDS)
        return self.control.receive_nowait()[0]

    def wait(self):
        return self.process.wait(WAIT_SECONDS)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.control.close()


class Server:
    """The shared memory of a server, its children, and a client."""

    def __init__(self, folder, stack, log):
        self.folder = folder
        self.log = log
        self.stack = stack
        instance = new_instance()
        self.requests = self._ring("requests0", instance)
        self.events = self._ring("events0", instance)
        self.status = self._segment("status", StatusPage.size_bytes(STATUS_FIELDS), instance)
        page = StatusPage.create(self.status.buffer, STATUS_FIELDS)
        self.stack.callback(page.close)
        self.page = page
        self.request_bell, self.event_bell = Doorbell.create(), Doorbell.create()
        for bell in (self.request_bell, self.event_bell):
            self.stack.callback(bell.close)
        self.worker = self.gateway = self.client = None
        self.epoch = self.incarnation = 0

    def start_worker(self, step_seconds=0.005):
        self.epoch += 1
        link = GatewayLink(0, self.requests.name, self.events.name, self.event_bell.fds)

        def config(control_fd):
            return WorkerConfig(
                epoch=self.epoch,
                control_fd=control_fd,
                request_doorbell_fds=self.request_bell.fds,
                status_segment=self.status.name,
                gateways=[link],
                max_num_seqs=64,
                max_num_batched_tokens=256,
                max_model_len=4096,
                log_format="json",
            )

        command = [sys.executable, str(Path(__file__).parent / "fake_worker_child.py"), str(step_seconds)]
        self.worker = self._start(command, config)
        if self.gateway is not None:
            self.gateway.control.send(WorkerStarted(self.epoch, self.worker.process.pid))
        assert self.worker.receive() == ChildReady("fake model")

    def start_gateway(self, **options):
        self.incarnation += 1

        def config(control_fd):
            return GatewayConfig(
                incarnation=self.incarnation,
                control_fd=control_fd,
                request_ring=self.requests.name,
                request_doorbell_fds=self.request_bell.fds,
                event_ring=self.events.name,
                event_doorbell_fds=self.event_bell.fds,
                status_segment=self.status.name,
                model_folder=str(self.folder),
                max_num_seqs=64,
                port=0,
                log_format="json",
                **options,
            )

        self.gateway = self._start([sys.executable, "-m", "headrace.launch.gateway_child"], config)

    def start(self):
        self.start_worker()
        self.start_gateway()
        self.connect()
        self.wait_ready()
        return self

    def connect(self):
        ready = self.gateway.receive()
        assert isinstance(ready, ChildReady)
        self.client = httpx.Client(base_url=ready.detail, timeout=WAIT_SECONDS)
        self.stack.callback(self.client.close)

    def wait_ready(self):
        deadline = time.monotonic() + WAIT_SECONDS
        while self.client.get("/health/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill_worker(self):
        self.worker.process.kill()
        self.worker.process.wait()
        self.gateway.control.send(WorkerExited(self.epoch, "killed by SIGKILL", 0.0))

    def stream(self, max_tokens=100):
        body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        return self.client.stream("POST", "/v1/completions", json=body)

    def complete(self):
        body = {"model": "toy", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
        return self.client.post("/v1/completions", json=body)

    def metric(self, line_start):
        """The first sample that begins so, its label model_name left out."""
        lines = [re.sub(r'model_name="[^"]*",?', "", line) for line in self.client.get("/metrics").text.splitlines()]
        return next(line.split()[-1] for line in lines if line.replace(",}", "}").startswith(line_start))

    def wait_until(self, condition):
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _start(self, command, config):
        fds = {*self.request_bell.fds, *self.event_bell.fds}
        child = Child(command, config, fds, self.log)
        self.stack.callback(child.end)
        return child

    def _segment(self, role, size_bytes, instance):
        segment = Segment.create(role, size_bytes, instance=instance)
        self.stack.callback(segment.close)
        self.stack.callback(segment.unlink)
        return segment

    def _ring(self, role, instance):
        segment = self._segment(role, Ring.size_bytes(1 << 20), instance)
        Ring.create(segment.buffer).close()
        return segment


@pytest.fixture
def model_folder(tmp_path, byte_tokenizer_json):
    manifest = Manifest(FORMAT_VERSION, "toy", "1", "toy", "toy", "f32", 257, 4096, None, [256], False, {})
    (tmp_path / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    (tmp_path / TOKENIZER_FILE).write_text(byte_tokenizer_json)
    (tmp_path / CHAT_TEMPLATE_FILE).write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def server(model_folder, tmp_path):
    log_file = tmp_path / "log"
    with log_file.open("wb") as log, ExitStack() as stack:
        yield Server(model_folder, stack, log)
    print(log_file.read_text()[-5000:])  # shown by pytest when the test fails


def frames(lines):
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def error_code_of(found):
    codes = [json.loads(frame)["error"]["code"] for frame in found if frame.startswith('{"error"')]
    (code,) = codes
    return code


def test_a_request_through_all_processes(server):
    server.start()
    first, second = server.complete(), server.complete()
    assert first.status_code == 200, first.text
    assert first.json()["choices"] == second.json()["choices"]
    assert first.json()["usage"]["completion_tokens"] == 5
    with server.stream() as response:
        found = frames(response.iter_lines())
    assert found[-1] == "[DONE]"
    chat = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    assert server.metric("headrace_requests_started_total") == "4.0"
    assert server.metric("headrace_worker_up") == "1.0"


def test_a_client_that_goes_is_cancelled_in_the_worker(server):
    """DIS-01"""
    server.start()
    with server.stream(max_tokens=4000) as response:
        lines = response.iter_lines()
        for _ in range(5):
            next(lines)
    server.wait_until(lambda: server.page.read()["num_running"] == 0)
    assert server.page.read()["num_generated_tokens"] < 1000
    assert server.metric('headrace_request_success_total{finished_reason="abort"}') == "1.0"


def test_a_killed_worker_ends_its_streams_with_one_error_and_the_next_one_serves(server):
    server.start()
    with server.stream(max_tokens=4000) as response:
        lines = response.iter_lines()
        next(lines)
        server.kill_worker()
        found = frames(lines)
    assert error_code_of(found) == "worker_lost"
    assert found[-1] == "[DONE]"
    assert server.client.get("/health/live").status_code == 200
    assert server.client.get("/health/ready").status_code == 503
    assert server.complete().status_code == 503
    server.start_worker()
    server.wait_ready()
    assert server.complete().status_code == 200
    assert server.metric("headrace_worker_restarts_total") == "1.0"


def test_a_new_gateway_is_greeted_and_what_the_old_one_left_is_cancelled(server):
    server.start()
    with server.stream(max_tokens=4000) as response:
        lines = response.iter_lines()
        next(lines)
        server.gateway.process.kill()
        with pytest.raises(httpx.HTTPError):
            frames(lines)
    server.start_gateway()
    server.connect()
    server.wait_ready()
    server.wait_until(lambda: server.page.read()["num_running"] == 0)
    assert server.complete().status_code == 200


@pytest.mark.parametrize("by_signal", [False, True])
def test_draining_lets_running_streams_end(server, by_signal):
    """OPS-01, OPS-02: live stays 200, ready goes 503, new work gets 503 with Retry-After, what runs ends with [DONE]."""
    server.start()
    with server.stream(max_tokens=150) as response:
        lines = response.iter_lines()
        next(lines)
        if by_signal:
            server.gateway.process.send_signal(signal.SIGTERM)
        else:
            server.gateway.control.send(Drain(15.0))
        server.wait_until(lambda: server.client.get("/health/ready").status_code == 503)
        assert server.client.get("/health/live").status_code == 200
        refused = server.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        found = frames(lines)
    assert found[-1] == "[DONE]"
    assert not any(frame.startswith('{"error"') for frame in found)
    assert server.gateway.wait() == 0


@pytest.mark.parametrize("how", ["stop", "drain", "supervisor gone"])
def test_what_still_runs_at_the_end_gets_one_error(server, how):
    """OPS-01: expiry, or a second signal, sends error frames, then the process ends with 0."""
    server.start()
    with server.stream(max_tokens=4000) as response:
        lines = response.iter_lines()
        next(lines)
        if how == "stop":
            server.gateway.control.send(Stop())
        elif how == "drain":
            server.gateway.control.send(Drain(0.3))
        else:
            server.gateway.control.close()
        found = frames(lines)
    assert error_code_of(found) == "draining"
    assert found[-1] == "[DONE]"
    assert server.gateway.wait() == 0


@pytest.mark.parametrize("how", ["stop", "two signals", "supervisor gone"])
def test_a_stopped_worker_ends_its_requests_with_an_error(server, how):
    server.start()
    with server.stream(max_tokens=4000) as response:
        lines = response.iter_lines()
        next(lines)
        if how == "stop":
            server.worker.control.send(Stop())
        elif how == "two signals":
            server.worker.process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: server.complete().status_code == 503)
            server.worker.process.send_signal(signal.SIGTERM)
        else:
            server.worker.control.close()
        found = frames(lines)
    assert error_code_of(found) == "draining"
    assert server.worker.wait() == 0


def test_a_worker_told_to_terminate_finishes_what_runs(server):
    """OPS-01: a service manager may signal all processes at once; streams that may end need their worker."""
    server.start()
    with server.stream(max_tokens=150) as response:
        lines = response.iter_lines()
        next(lines)
        server.worker.process.send_signal(signal.SIGTERM)
        found = frames(lines)
    assert not any(frame.startswith('{"error"') for frame in found)
    assert server.worker.wait() == 0


def test_an_idle_worker_hears_stop_at_once(server):
    server.start_worker()
    time.sleep(0.3)
    started = time.monotonic()
    server.worker.control.send(Stop())
    assert server.worker.wait() == 0
    assert time.monotonic() - started < 2


def test_an_interrupt_from_the_terminal_is_left_to_the_supervisor(server):
    server.start()
    for child in (server.gateway, server.worker):
        child.process.send_signal(signal.SIGINT)
    assert server.complete().status_code == 200


def test_a_port_in_use_is_told_to_the_supervisor(server):
    server.start()
    port = server.client.base_url.port
    folder, log, stack = server.folder, server.log, server.stack
    other = Server(folder, stack, log)
    config = GatewayConfig(
        incarnation=1,
        control_fd=0,
        request_ring=other.requests.name,
        request_doorbell_fds=other.request_bell.fds,
        event_ring=other.events.name,
        event_doorbell_fds=other.event_bell.fds,
        status_segment=other.status.name,
        model_folder=str(folder),
        max_num_seqs=4,
        port=port,
    )
    child = other._start(
        [sys.executable, "-m", "headrace.launch.gateway_child"],
        lambda control_fd: msgspec.structs.replace(config, control_fd=control_fd),
    )
    message = child.receive()
    assert isinstance(message, ChildFailed)
    assert f"Port {port}" in message.message
    assert "--port" in message.message
    assert child.wait() == 2


def test_a_folder_that_is_no_model_is_told_to_the_supervisor(server, tmp_path):
    (tmp_path / MANIFEST_FILE).unlink()
    server.start_gateway()
    message = server.gateway.receive()
    assert isinstance(message, ChildFailed)
    assert MANIFEST_FILE in message.message
    assert server.gateway.wait() == 2


def test_nothing_polls_when_idle(server):
    """Idle processes use next to no CPU: under 1 % of a core each."""
    server.start()
    server.complete()
    time.sleep(0.5)
    before = {child: _cpu_seconds(child) for child in (server.gateway, server.worker)}
    time.sleep(3)
    for child, used in before.items():
        assert _cpu_seconds(child) - used <= 0.03


def _cpu_seconds(child):
    fields = Path(f"/proc/{child.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_an_endpoint_for_traces_that_is_none_is_told_to_the_supervisor(server):
    server.start_gateway(observation=ObservationConfig(otlp_endpoint="collector:4318", admin_token="hush-hush"))
    message = server.gateway.receive()
    assert isinstance(message, ChildFailed)
    assert "OTLP endpoint" in message.message
    assert server.gateway.wait() == 2
    assert "hush-hush" not in repr(ObservationConfig(admin_token="hush-hush"))
