import pytest

from headrace.gateway.worker_view import WorkerView
from headrace.protocol.control import WorkerExited
from headrace.protocol.errors import ErrorCode, RequestError
from headrace.protocol.messages import WorkerHello, WorkerLimits

SECOND = 1_000_000_000
LIMITS = WorkerLimits(vocab_size=100, max_model_len=64, max_num_seqs=4, num_blocks=8, block_size=16)


def hello(epoch):
    return WorkerHello(epoch, "m", LIMITS)


@pytest.fixture
def status():
    return {"heartbeat_ns": 10 * SECOND}


@pytest.fixture
def view(status):
    return WorkerView(lambda: status, progress_timeout_seconds=30)


def test_ready_from_hello_to_exit(view):
    now = 10 * SECOND
    assert view.problem(now).code is ErrorCode.NOT_READY
    view.note_started(1, now)
    assert view.epoch is None
    assert view.note_hello(hello(1), now)
    assert view.problem(now) is None
    assert view.limits(now) is LIMITS
    view.note_exited(WorkerExited(1, "killed", restart_in_seconds=2.0))
    assert view.epoch is None
    with pytest.raises(RequestError) as caught:
        view.limits(now)
    assert caught.value.code is ErrorCode.NOT_READY
    assert caught.value.retry_after_seconds >= 2


def test_a_greeting_of_an_earlier_life_is_stale(view):
    assert view.note_hello(hello(2), SECOND)
    assert not view.note_hello(hello(1), SECOND)
    assert view.epoch == 2
    view.note_exited(WorkerExited(2, "killed", 0.0))
    assert not view.note_hello(hello(2), SECOND)
    assert view.epoch is None


def test_a_late_exit_message_does_not_touch_the_next_life(view):
    view.note_hello(hello(1), SECOND)
    view.note_hello(hello(2), SECOND)
    view.note_exited(WorkerExited(1, "killed", 0.0))
    assert view.epoch == 2


def test_a_start_ends_every_earlier_life(view):
    view.note_hello(hello(1), SECOND)
    view.note_started(2, SECOND)
    assert view.epoch is None


def test_a_worker_without_progress_is_not_ready(view, status):
    """DIS-07: readiness follows the engine's steps, not only HTTP."""
    view.note_hello(hello(1), 10 * SECOND)
    assert view.problem(40 * SECOND) is None
    assert view.problem(41 * SECOND).code is ErrorCode.NOT_READY
    assert "31 seconds" in view.problem(41 * SECOND).message
    status["heartbeat_ns"] = 41 * SECOND
    assert view.problem(41 * SECOND) is None


def test_retry_after_learns_how_long_a_start_takes(view):
    view.note_started(1, SECOND)
    view.note_hello(hello(1), 13 * SECOND)
    view.note_exited(WorkerExited(1, "killed", restart_in_seconds=4.0))
    assert view.problem(13 * SECOND).retry_after_seconds == 16
    view.note_started(2, 17 * SECOND)
    assert view.problem(17 * SECOND).retry_after_seconds == 12


def test_a_worker_given_up_says_so(view):
    view.note_exited(WorkerExited(1, "bad model", 0.0, gives_up=True))
    assert "cannot be started" in view.problem(SECOND).message
