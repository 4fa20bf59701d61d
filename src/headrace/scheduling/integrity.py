"""Checks of the scheduler's own accounts.

Owns: what must hold for live sequences between any two calls. Runs in: tests, debugging.
Must not know: how a step is planned.
"""

from headrace.protocol.lifecycle import RequestState
from headrace.protocol.messages import WorkerLimits
from headrace.scheduling.claims import Account
from headrace.scheduling.config import SchedulerConfig
from headrace.scheduling.live import LiveSequences


def check_sequences(config: SchedulerConfig, limits: WorkerLimits, sequences: LiveSequences) -> None:
    """Raise RuntimeError when a live sequence is not in exactly one place, or not as that place demands."""
    live, running, waiting, deadlines = sequences.by_id, sequences.running, sequences.waiting, sequences.deadlines
    places = [sequence.request_id for sequence in running] + [sequence.request_id for sequence in waiting]
    if sorted(places) != sorted(live):
        raise RuntimeError(f"live are {sorted(live)}, running and waiting are {sorted(places)}")
    if len(running) > config.max_num_seqs:
        raise RuntimeError(f"{len(running)} sequences run, at most {config.max_num_seqs} may")
    if len(deadlines) != sum(bool(sequence.request.deadline_ns) for sequence in live.values()):
        raise RuntimeError("a deadline is watched for no live sequence, or not for one that has it")
    waiting.check_integrity()
    for sequence in waiting:
        if sequence.state not in (RequestState.WAITING, RequestState.PREEMPTED):
            raise RuntimeError(f"request {sequence.request_id} waits and is {sequence.state}")
        if sequence.table.block_ids or sequence.num_computed_tokens:
            raise RuntimeError(f"request {sequence.request_id} waits and holds {sequence.table.block_ids}")
    if [sequence.rank for sequence in running] != sorted(sequence.rank for sequence in running):
        raise RuntimeError("the running sequences are not in order of rank")
    for sequence in running:
        num_positions = len(sequence.table.block_ids) * limits.block_size
        if sequence.state is not RequestState.RUNNING or not sequence.num_computed_tokens <= num_positions:
            raise RuntimeError(f"request {sequence.request_id} runs, is {sequence.state}, and has {num_positions} positions")
        if sequence.num_remaining_tokens > 1 and len(sequence.token_ids) > num_positions:
            raise RuntimeError(f"request {sequence.request_id} was admitted without memory for all its tokens")
        if sequence.num_remaining_tokens < 1 or len(sequence.token_ids) >= sequence.max_tokens:
            raise RuntimeError(f"request {sequence.request_id} has {len(sequence.token_ids)} tokens and should have ended")


def check_classes(live: LiveSequences) -> None:
    """Raise RuntimeError when the counts by class and account are not those of the sequences."""
    for name, counted, sequences in (
        ("run", live.num_running_by_class, live.running),
        ("wait", live.num_waiting_by_class, live.waiting),
    ):
        found = [0] * len(counted)
        for sequence in sequences:
            found[sequence.class_index] += 1
        if found != counted:
            raise RuntimeError(f"{found} sequences of the classes {name}, counted are {counted}")
    by_account: dict[Account, int] = {}
    for sequence in live.running:
        by_account[sequence.claim.account] = by_account.get(sequence.claim.account, 0) + 1
    if by_account != live.num_running_by_account:
        raise RuntimeError(f"{by_account} sequences of accounts run, counted are {live.num_running_by_account}")
