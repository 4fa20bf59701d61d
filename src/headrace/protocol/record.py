"""The record of a server's traffic: what `headrace serve --record FILE` writes and what traces and the simulator read.

Owns: the lines of a record (docs/record.md describes them). Runs in: gateway and worker (write), load tool, simulator.
Must not know: files, clocks.

A record is JSON Lines, one object for each line, told apart by "type". The first line is a RecordHeader. Each process writes
some of its lines at a time, so lines of several processes stand out of order, by a second or so. Times are microseconds since
the header's start. There is no text and no token id. A new field with a default keeps the version; any other change raises it.
"""

import msgspec

RECORD_FORMAT = "headrace-record"
RECORD_VERSION = 1
BLOCK_TOKENS = 32  # tokens that one hash of a prompt stands for


class RecordHeader(msgspec.Struct, frozen=True, tag="header", tag_field="type", kw_only=True):
    """The first line."""

    format: str = RECORD_FORMAT
    version: int = RECORD_VERSION
    started_unix: float  # seconds
    started_monotonic_ns: int  # CLOCK_MONOTONIC at the start: 0 of all times
    model: str  # served name
    classes: list[str]  # names by number
    num_tenants: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    block_tokens: int = BLOCK_TOKENS


class RecordWorker(msgspec.Struct, frozen=True, tag="worker", tag_field="type", kw_only=True):
    """A life of the worker began: what its memory holds."""

    at_us: int
    epoch: int
    num_blocks: int
    block_size: int


class RecordArrival(msgspec.Struct, frozen=True, tag="arrival", tag_field="type", kw_only=True):
    """A request came. `refused`: the error code when it was turned away at the door (then no end follows).

    `blocks`: one salted hash for each full block of the prompt, of the prompt up to that block's end, so that equal beginnings
    have equal hashes; 53 bits, so that every reader of JSON keeps them exact. The salt is drawn for each record and kept
    nowhere: hashes of two records cannot be compared, and prompts cannot be guessed. A request's cache salt is in them too.
    """

    at_us: int
    id: int  # counts from 1 in each gateway's life; with `gateway` it names the request; 0: refused, it got none
    gateway: int  # incarnation
    class_index: int
    tenant_index: int
    priority: int
    prompt_tokens: int
    max_tokens: int
    timeout_us: int = 0  # 0: none
    refused: str = ""
    blocks: list[int] = []


class RecordEnd(msgspec.Struct, frozen=True, tag="end", tag_field="type", kw_only=True):
    """A request ended: its last event was there. Durations are from its arrival; -1 where it did not come to that."""

    at_us: int
    id: int
    gateway: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    reason: str  # as the label finished_reason
    queue_us: int  # until first scheduled
    ttft_us: int
    last_token_us: int = -1


class RecordStep(msgspec.Struct, frozen=True, tag="step", tag_field="type", kw_only=True):
    """A step of the worker. `at_us`: its begin."""

    at_us: int
    epoch: int
    duration_us: int
    forward_us: int
    sample_us: int
    decode_rows: int  # rows that computed one token
    prefill_rows: int
    prefill_tokens: int  # tokens of the others
    context_tokens: int  # tokens of context that all rows read, their own included
    running: int
    waiting: int


RecordLine = RecordHeader | RecordWorker | RecordArrival | RecordEnd | RecordStep


class RecordTarget(msgspec.Struct, frozen=True):
    """What a process is told so that it can add lines to a record. `salt`: hexadecimal, of this record alone."""

    path: str
    salt: str
    started_monotonic_ns: int
    max_bytes: int
