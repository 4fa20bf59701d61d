"""The KV cache manager against a model that remembers what every block really contains.

INV-5 (a writable block has one owner), INV-6 (free + cached + used = all), INV-7 (no wrong hit, salts never share).
"""

from collections.abc import Callable

import pytest
from hypothesis import settings, target
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from headrace.kvcache import BlockTable, KVCacheManager
from headrace.kvcache.block import num_blocks_for, slot_of
from headrace.kvcache.pool import MAX_EVICTIONS_KEPT
from headrace.kvcache.prefix import Digest, PrefixKeys, blake2b_digest

TOKENS = st.lists(st.integers(0, 1), max_size=14)  # two tokens only: equal prefixes are frequent
SALTS = st.sampled_from(["", "a"])


class Held:
    """A sequence of the model: its table, its tokens, and how many of them have been written to memory."""

    def __init__(self, table: BlockTable, token_ids: list[int]) -> None:
        self.table = table
        self.token_ids = token_ids
        self.num_computed = 0


class ManagerMachine(RuleBasedStateMachine):
    """Sequences come, grow, commit and go in any order."""

    digest: Digest = staticmethod(blake2b_digest)
    enable_prefix_caching = True
    held = Bundle("held")

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 4))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.manager = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            model_id="model",
            kv_format="fake",
            enable_prefix_caching=self.enable_prefix_caching,
            digest=type(self).digest,
        )
        # What was written to each slot: the salt and all tokens up to it, since a KV entry depends on everything before.
        self.memory: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.live: list[Held] = []
        self.refused: list[tuple[Held, int]] = []  # with the spare blocks that were asked for
        self.num_hits = 0
        self.now_ns = 0
        self.num_evictions_taken = 0

    @rule(target=held, tokens=TOKENS, salt=SALTS, num_spare=st.integers(0, 3))
    def admit(self, tokens: list[int], salt: str, num_spare: int) -> object:
        held = Held(BlockTable(salt), [*tokens, 0])
        if self._admit(held, num_spare):
            return held
        self.refused = [*self.refused[-2:], (held, num_spare)]
        return multiple()

    @precondition(lambda self: self.refused)
    @rule(target=held, data=st.data())
    def ask_again(self, data: st.DataObject) -> object:
        """What the manager remembers of a table that was refused changes nothing: it is answered as a new one would be."""
        held, num_spare = data.draw(st.sampled_from(self.refused))
        fresh = BlockTable(held.table.cache_salt)
        nodes = list(self.manager.match(fresh, held.token_ids))
        assert [id(node) for node in self.manager.match(held.table, held.token_ids)] == [id(node) for node in nodes]
        num_missing = self.manager.num_missing_blocks(fresh, held.token_ids, num_spare)
        if not self._admit(held, num_spare):
            assert num_missing > 0
            return multiple()
        assert num_missing == 0
        self.refused.remove((held, num_spare))
        return held

    @precondition(lambda self: self.refused)
    @rule(held=consumes(held), num_spare=st.integers(0, 12))
    def make_way(self, held: Held, num_spare: int) -> None:
        """A release makes exactly as many blocks available to another as was said before."""
        other = self.refused[-1][0]
        before = self.manager.num_missing_blocks(other.table, other.token_ids, num_spare)
        num_released = self.manager.num_released_blocks(held.table, other.table)
        self.release(held)
        if before:
            assert self.manager.num_missing_blocks(other.table, other.token_ids, num_spare) == max(0, before - num_released)

    def _admit(self, held: Held, num_spare: int) -> bool:
        before = self.manager.statistics()
        num_cached = self.manager.admit(held.table, held.token_ids, num_spare_blocks=num_spare)
        if num_cached is None:
            assert held.table.block_ids == []
            assert self.manager.statistics() == before
            assert num_blocks_for(len(held.token_ids), self.block_size) + num_spare > 0
            return False
        assert num_cached % self.block_size == 0
        assert num_cached < len(held.token_ids), "the last token must be left to compute"
        assert self.manager.num_available_blocks >= num_spare
        held.num_computed = num_cached
        self.num_hits += num_cached
        self.live.append(held)
        self._check_contents(held)
        return True

    @rule(held=held, num_tokens=st.integers(1, 6))
    def compute(self, held: Held, num_tokens: int) -> None:
        """Write some more of the tokens that have memory, then commit."""
        for position in range(held.num_computed, min(held.num_computed + num_tokens, len(held.token_ids))):
            index, offset = slot_of(position, self.block_size)
            block_id = held.table.block_ids[index]
            owners = [other for other in self.live if block_id in other.table.block_ids]
            assert owners == [held], "a block that is written has one owner"
            self.memory[block_id, offset] = (held.table.cache_salt, tuple(held.token_ids[: position + 1]))
            held.num_computed = position + 1
        self.manager.commit(held.table, held.token_ids, held.num_computed)
        self._check_contents(held)

    @rule(held=held, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, held: Held, tokens: list[int]) -> None:
        before = list(held.table.block_ids)
        num_tokens = len(held.token_ids) + len(tokens)
        if self.manager.extend(held.table, num_tokens):
            held.token_ids += tokens
            assert held.table.block_ids[: len(before)] == before
            assert len(held.table.block_ids) == max(len(before), num_blocks_for(num_tokens, self.block_size))
        else:
            assert held.table.block_ids == before
            assert num_blocks_for(num_tokens, self.block_size) - len(before) > self.manager.num_available_blocks

    @rule(held=consumes(held))
    def let_go(self, held: Held) -> None:
        self.release(held)

    def release(self, held: Held) -> None:
        self.manager.release(held.table)
        assert held.table.block_ids == []
        self.live.remove(held)

    @rule(target=held, held=consumes(held))
    def preempt_and_return(self, held: Held) -> object:
        """Release, and come back with the same table and all tokens."""
        self.release(held)
        return held if self._admit(held, 0) else multiple()

    @rule(duration_ns=st.integers(0, 1000))
    def time_passes(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.manager.note_time(self.now_ns)

    @rule()
    def take_evictions(self) -> None:
        """A block is idle for a part of its life, and both are within the time that has passed."""
        for lifetime_ns, idle_ns in self.manager.take_evictions():
            assert 0 <= idle_ns <= lifetime_ns <= self.now_ns
            self.num_evictions_taken += 1
        assert self.num_evictions_taken == self.manager.statistics().num_evictions
        assert self.manager.take_evictions() == []

    @invariant()
    def accounts_are_right(self) -> None:
        self.manager.check_integrity()
        statistics = self.manager.statistics()
        assert statistics.num_free_blocks + statistics.num_cached_blocks + statistics.num_used_blocks == self.num_blocks
        assert statistics.num_used_blocks == len({b for held in self.live for b in held.table.block_ids})
        assert self.manager.num_tables == len(self.live)

    def _check_contents(self, held: Held) -> None:
        """Every computed position of the sequence finds what was written for exactly this prefix under this salt."""
        for position in range(held.num_computed):
            index, offset = slot_of(position, self.block_size)
            written = self.memory[held.table.block_ids[index], offset]
            assert written == (held.table.cache_salt, tuple(held.token_ids[: position + 1]))

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        target(self.num_hits, label="prefix hits")
        for held in self.live:
            self.manager.release(held.table)
        self.manager.check_integrity()
        statistics = self.manager.statistics()
        assert statistics.num_used_blocks == 0
        assert statistics.num_prefix_hit_tokens == self.num_hits
        if not self.enable_prefix_caching:
            assert statistics.num_cached_blocks == statistics.num_prefix_query_tokens == 0


class CollidingMachine(ManagerMachine):
    """INV-7 with hashes of three bits: collisions everywhere, and still no wrong hit."""

    digest: Digest = staticmethod(lambda data: bytes([blake2b_digest(data)[0] & 7]))


class UncachedMachine(ManagerMachine):
    """The same without a prefix cache."""

    enable_prefix_caching = False


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestManager = ManagerMachine.TestCase
TestManager.settings = SETTINGS
TestCollisions = CollidingMachine.TestCase
TestCollisions.settings = SETTINGS
TestUncached = UncachedMachine.TestCase
TestUncached.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def make_manager(num_blocks: int = 8, block_size: int = 2, digest: Digest = blake2b_digest) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=block_size, model_id="m", kv_format="f", digest=digest)


def fill(manager: KVCacheManager, token_ids: list[int], salt: str = "") -> tuple[BlockTable, int | None]:
    """Admit, compute all, commit. The table, and the tokens found."""
    table = BlockTable(salt)
    num_cached = manager.admit(table, token_ids)
    if num_cached is not None:
        manager.commit(table, token_ids, len(token_ids))
    return table, num_cached


def test_a_hit_leaves_the_last_token_to_compute() -> None:
    """INV-8: a prompt that is cached whole, in full blocks, still computes its last block."""
    manager = make_manager()
    table, _ = fill(manager, [1, 2, 3, 4])
    assert fill(manager, [1, 2, 3, 4])[1] == 2
    assert fill(manager, [1, 2, 3, 4, 5])[1] == 4
    assert fill(manager, [1, 2, 9])[1] == 2
    assert fill(manager, [9, 2, 3, 4, 5])[1] == 0
    manager.release(table)
    manager.check_integrity()


def test_uncommitted_blocks_are_not_shared() -> None:
    """INV-11: a block becomes shareable only when its tokens were computed and the step was applied."""
    manager = make_manager()
    first = BlockTable("")
    assert manager.admit(first, [1, 2, 3, 4, 5]) == 0
    assert manager.match(BlockTable(""), [1, 2, 3, 4, 5]) == []
    manager.commit(first, [1, 2, 3, 4, 5], 3)
    assert len(manager.match(BlockTable(""), [1, 2, 3, 4, 5])) == 1


def test_equal_prompts_computed_side_by_side_end_up_sharing() -> None:
    """Two sequences that computed the same blocks at the same time hold one copy after both are committed."""
    manager = make_manager()
    first, second = BlockTable(""), BlockTable("")
    manager.admit(first, [1, 2, 3, 4, 5])
    manager.admit(second, [1, 2, 3, 4, 5])
    assert manager.statistics().num_used_blocks == 6
    manager.commit(first, [1, 2, 3, 4, 5], 5)
    manager.commit(second, [1, 2, 3, 4, 5], 5)
    assert first.block_ids[:2] == second.block_ids[:2]
    assert first.block_ids[2] != second.block_ids[2]
    assert manager.statistics().num_used_blocks == 4
    manager.check_integrity()


def test_eviction_takes_the_tail_of_the_oldest_first() -> None:
    """INV-12."""
    manager = make_manager(num_blocks=6)
    old, _ = fill(manager, [1, 2, 3, 4])
    new, _ = fill(manager, [5, 6, 7, 8])
    manager.release(old)
    manager.release(new)
    assert manager.statistics().num_cached_blocks == 4
    filler, _ = fill(manager, [9] * 6)  # two free blocks, one evicted
    assert len(manager.match(BlockTable(""), [1, 2, 3, 4, 0])) == 1
    assert len(manager.match(BlockTable(""), [5, 6, 7, 8, 0])) == 2
    assert manager.statistics().num_evictions == 1
    manager.release(filler)


def test_how_long_evicted_blocks_had_lived_and_lain_idle() -> None:
    """Lifetime from when the content was there; idle from when the last of two holders let go."""
    manager = make_manager(num_blocks=2)
    manager.note_time(100)
    first, second = BlockTable(""), BlockTable("")
    manager.admit(first, [1, 2, 3])
    manager.note_time(150)
    manager.commit(first, [1, 2, 3], 3)
    manager.note_time(200)
    manager.release(first)
    manager.note_time(300)
    assert manager.admit(second, [1, 2, 3]) == 2
    manager.note_time(420)
    manager.release(second)
    manager.note_time(1000)
    fill(manager, [7, 8, 9])
    assert manager.take_evictions() == [(850, 580)]
    assert manager.take_evictions() == []


def test_evictions_that_nobody_takes_are_counted_and_their_ages_bounded() -> None:
    manager = make_manager(num_blocks=1, block_size=1)
    for token_id in range(MAX_EVICTIONS_KEPT + 100):
        table, _ = fill(manager, [token_id])
        manager.release(table)
    assert manager.statistics().num_evictions == MAX_EVICTIONS_KEPT + 99
    assert len(manager.take_evictions()) == MAX_EVICTIONS_KEPT


def test_what_does_not_fit_takes_nothing() -> None:
    """Blocks found in the cache are not counted as still available, or an admission would come to nothing half-way."""
    manager = make_manager(num_blocks=4)
    table, _ = fill(manager, [1, 2, 3, 4])
    manager.release(table)
    before = manager.statistics()
    assert manager.admit(BlockTable(""), [1, 2, 3, 4, 5, 6], num_spare_blocks=2) is None
    assert manager.admit(BlockTable(""), list(range(9))) is None
    assert manager.statistics() == before
    assert manager.admit(BlockTable(""), [1, 2, 3, 4, 5, 6], num_spare_blocks=1) == 4


def test_misuse_is_a_defect() -> None:
    manager = make_manager()
    table, _ = fill(manager, [1, 2, 3])
    with pytest.raises(RuntimeError, match="already"):
        manager.admit(table, [1, 2, 3])
    manager.release(table)
    manager.release(table)  # nothing held: fine


@pytest.mark.parametrize(
    "other",
    [
        {"model_id": "x", "kv_format": "y", "cache_salt": "salt"},
        {"model_id": "y|", "kv_format": "x", "cache_salt": "salt"},
        {"model_id": "y", "kv_format": "|x", "cache_salt": "salt"},
        {"model_id": "y", "kv_format": "xs", "cache_salt": "alt"},
        {"model_id": "", "kv_format": "yx", "cache_salt": "salt"},
        {"model_id": "y", "kv_format": "x", "cache_salt": "salt\0"},
    ],
)
def test_ten_04_parts_of_the_root_key_do_not_collide(other: dict[str, str]) -> None:
    """TEN-04: tenant x with model y is not tenant y with model x, whatever characters the names hold."""

    def root(model_id: str, kv_format: str, cache_salt: str) -> bytes:
        return PrefixKeys(model_id=model_id, kv_format=kv_format, block_size=16).root(cache_salt)

    assert root(**other) != root("y", "x", "salt")


@pytest.mark.parametrize("make_digest", [lambda: blake2b_digest, lambda: lambda _: b"same"], ids=["blake2b", "constant"])
def test_ten_04_salts_never_share(make_digest: Callable[[], Digest]) -> None:
    """TEN-04: neither with a good hash nor with one that always collides; within one salt a good hash does hit."""
    digest = make_digest()
    manager = make_manager(num_blocks=20, digest=digest)
    first, _ = fill(manager, [1, 2, 3], salt="x/y")
    second, num_cached = fill(manager, [1, 2, 3], salt="y/x")
    assert num_cached == 0
    assert not set(first.block_ids) & set(second.block_ids)
    third, num_cached = fill(manager, [1, 2, 3], salt="x/y")
    assert num_cached == 2
    assert third.block_ids[0] == first.block_ids[0]


def test_a_hash_that_forgets_the_prefix_gives_no_wrong_hit() -> None:
    """INV-7: equal blocks after different prefixes have one hash here; what is found belongs to another prefix: no hit."""
    manager = make_manager(digest=lambda data: data[-16:])  # two token ids of 8 bytes: the block's own
    fill(manager, [1, 2, 5, 6])
    fill(manager, [3, 4])
    assert len(manager.match(BlockTable(""), [1, 2, 5, 6, 0])) == 2
    assert len(manager.match(BlockTable(""), [3, 4, 5, 6, 0])) == 1
    private, num_cached = fill(manager, [3, 4, 5, 6, 0])
    assert num_cached == 2
    assert len(private.nodes) == 1
    manager.check_integrity()


def test_block_size_is_part_of_the_key() -> None:
    keys = [PrefixKeys(model_id="m", kv_format="f", block_size=size) for size in (1, 11)]
    assert keys[0].root("") != keys[1].root("")
