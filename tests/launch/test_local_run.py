"""`headrace run`: what stands on the terminal, character for character."""

import re
import time

import pytest

from headrace.launch.local import _print_answer
from headrace.protocol.errors import RequestError
from headrace.protocol.messages import GenerationRequest
from headrace.protocol.ports import ExecutorSpec
from headrace.protocol.sampling import SamplingParams, StopConditions
from headrace.protocol.step import StepFailure
from headrace.scheduling import Scheduler, SchedulerConfig
from headrace.testing import FakeExecutor

PROMPT = [1, 2, 3, 4, 5, 6, 7]
SPEC = ExecutorSpec(
    block_size=4, num_blocks=64, vocab_size=100, max_model_len=64, eos_token_ids=frozenset(), kv_format="fake", model_id="m"
)


class Words:
    """Stands for the detokenizer: each id is a word of its own."""

    def __init__(self):
        self.ids = []

    def push(self, token_ids):
        self.ids += token_ids
        return "".join(f" {token_id}" for token_id in token_ids)

    def finish(self):
        return "."


def answered(executor, words, *, max_tokens=5, stop_ids=(), show_stats=False, chunk=4):
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=chunk, max_model_len=64, enable_prefix_caching=False)
    request = GenerationRequest(
        request_id=1,
        tenant_id="local",
        priority=0,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(temperature=0.0),
        stopping=StopConditions(max_tokens, stop_token_ids=stop_ids),
        arrival_ns=time.monotonic_ns(),
        deadline_ns=0,
        cache_salt="",
        reply_ring=0,
        model_id="m",
    )
    _print_answer(Scheduler(config, executor.spec), executor, request, words, show_stats=show_stats)


def test_an_answer_is_one_line_with_one_end(capsys):
    words = Words()
    answered(FakeExecutor(SPEC), words)
    assert len(words.ids) == 5
    assert capsys.readouterr().out == "".join(f" {token_id}" for token_id in words.ids) + ".\n"


def test_the_token_that_stops_is_not_shown(capsys):
    words = Words()
    answered(FakeExecutor(SPEC), words)
    capsys.readouterr()
    third, shown = words.ids[2], Words()
    answered(FakeExecutor(SPEC), shown, stop_ids=(third,))
    assert shown.ids == words.ids[: words.ids.index(third)]
    assert capsys.readouterr().out == "".join(f" {token_id}" for token_id in shown.ids) + ".\n"


def test_the_statistics_are_one_line_with_the_numbers_of_the_whole_answer(capsys):
    answered(FakeExecutor(SPEC), Words(), show_stats=True)
    pattern = r"prompt 7 tokens, first token after \d+ ms; output 5 tokens at [1-9]\d*\.\d tokens/s\n"
    assert re.fullmatch(pattern, capsys.readouterr().err)


def test_an_answer_of_one_token_has_no_speed(capsys):
    answered(FakeExecutor(SPEC), Words(), max_tokens=1, show_stats=True)
    assert re.fullmatch(r"prompt 7 tokens, first token after \d+ ms; output 1 token\n", capsys.readouterr().err)


def test_a_failed_row_is_an_error_with_its_reason():
    with pytest.raises(RequestError, match="broken"):
        answered(FakeExecutor(SPEC, failing={1: StepFailure("internal_error", "broken row")}), Words())
