"""The KV cache manager: which blocks a sequence holds, and which of them it shares.

Owns: every block, every block table and the prefix index. Runs in: worker, tests, simulation.
Must not know: requests, scheduling order, devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.block import BlockTable, num_blocks_for
from headrace.kvcache.pool import BlockPool
from headrace.kvcache.prefix import Digest, PrefixIndex, PrefixKeys, PrefixNode, blake2b_digest


@dataclass(frozen=True, slots=True)
class KVCacheStatistics:
    """Blocks now; tokens and evictions since the start. free + cached + used = num_blocks."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_evictions: int


@dataclass(slots=True)
class _Refusal:
    """The admission that failed last: it needs no fewer blocks while its match is the same and no cached block was taken."""

    table: BlockTable
    last_node: PrefixNode  # of the match; where it is, all before it are as they were
    num_needed_blocks: int
    num_revivals: int


class KVCacheManager:
    """Gives blocks to tables and takes them back. Refuses with False or None; a RuntimeError is a defect of the caller.

    A table goes through `admit` (memory for all tokens so far, leading blocks shared where their content is cached), `extend`
    (memory for more), `commit` (computed blocks become shareable), and `release`, after which it may be admitted again.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        model_id: str,
        kv_format: str,
        enable_prefix_caching: bool = True,
        digest: Digest = blake2b_digest,
    ) -> None:
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._keys = PrefixKeys(model_id=model_id, kv_format=kv_format, block_size=block_size, digest=digest)
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, on_evict=self._index.remove)
        self._tables: dict[int, BlockTable] = {}  # id(table) -> a table that holds blocks
        self._refusal: _Refusal | None = None
        self._num_query_tokens = 0
        self._num_hit_tokens = 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out now; cached ones are evicted for it."""
        return self._pool.num_available

    @property
    def num_blocks(self) -> int:
        """Of the pool, used or not."""
        return len(self._pool.blocks)

    @property
    def num_tables(self) -> int:
        """Tables that hold blocks."""
        return len(self._tables)

    def note_time(self, now_ns: int) -> None:
        """The time of what is done next; blocks' ages are counted by it."""
        self._pool.now_ns = now_ns

    def take_evictions(self) -> list[tuple[int, int]]:
        """(lifetime, idle time before) in ns of the blocks evicted since the last call, at most 1,024 of them.

        A lifetime is counted from when the content could be found, the idle time from when its last holder let go of it.
        """
        return self._pool.take_evictions()

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> list[PrefixNode]:
        """The longest cached prefix of `token_ids`, in full blocks, under the table's salt. Takes nothing.

        Capped so that the last token is left to compute, because its logits are wanted: (n - 1) // block_size blocks.

        Whoever waits is looked up in many steps, so the walk goes on where it ended the last time: a content that is still in
        the index has all its parents there. The list is the table's own; it is right until blocks change.
        """
        if not self._enable_prefix_caching:
            return []
        nodes, index = table.matched, self._index
        while nodes and index.get(nodes[-1].digest) is not nodes[-1]:
            nodes.pop()
        size = self.block_size
        for number in range(len(nodes), (len(token_ids) - 1) // size):
            self._keys.extend(table.digests, table.cache_salt, token_ids, number + 1)
            node = index.get(table.digests[number])
            parent = nodes[-1] if nodes else None
            if node is None or not node.holds(parent, tuple(token_ids[number * size : (number + 1) * size]), table.cache_salt):
                break
            nodes.append(node)
        return nodes

    def admit(
        self, table: BlockTable, token_ids: Sequence[int], *, num_spare_blocks: int = 0, counts_query: bool = True
    ) -> int | None:
        """Give an empty table memory for all of `token_ids`; the number of tokens whose KV it already has from the cache.

        None, and nothing is taken, unless `num_spare_blocks` would still be available afterwards. `counts_query`: whether the
        look-up shows in the statistics (not when a preempted sequence comes back).
        """
        if table.block_ids:
            raise RuntimeError("the table holds blocks already")
        nodes = self.match(table, token_ids)
        num_new = num_blocks_for(len(token_ids), self.block_size) - len(nodes)
        if num_new + num_spare_blocks > self._pool.num_available:
            return None
        if self._is_refused_as_before(table, num_spare_blocks):
            return None
        num_needed = num_new + self._num_idle(nodes)
        if num_needed + num_spare_blocks > self._pool.num_available:
            if nodes:
                self._refusal = _Refusal(table, nodes[-1], num_needed, self._pool.num_revivals)
            return None
        for node in nodes:
            self._pool.acquire(node.block_id)
            table.block_ids.append(node.block_id)
        num_cached_tokens = len(nodes) * self.block_size
        table.nodes.extend(nodes)
        nodes.clear()
        self._allocate(table, num_new)
        if counts_query and self._enable_prefix_caching:
            self._num_query_tokens += len(token_ids)
            self._num_hit_tokens += num_cached_tokens
        return num_cached_tokens

    def num_missing_blocks(self, table: BlockTable, token_ids: Sequence[int], num_spare_blocks: int) -> int:
        """How many more blocks would have to be available for `admit` to succeed; 0 when it would."""
        nodes = self.match(table, token_ids)
        num_new = num_blocks_for(len(token_ids), self.block_size) - len(nodes)
        return max(0, num_new + self._num_idle(nodes) + num_spare_blocks - self._pool.num_available)

    def num_released_blocks(self, table: BlockTable, beneficiary: BlockTable) -> int:
        """Blocks that `release` of a table would make available to another: those that nobody else holds.

        What `beneficiary` was found to share (by its last `match`) does not count: that is not missing.
        """
        pool = self._pool
        shared = {node.block_id for node in beneficiary.matched}
        return sum(pool.blocks[block_id].num_references == 1 and block_id not in shared for block_id in table.block_ids)

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Give the table memory for so many token positions in all; False, and nothing is taken, when there is not enough."""
        num_new = num_blocks_for(num_tokens, self.block_size) - len(table.block_ids)
        if num_new <= 0:
            return True
        if num_new > self._pool.num_available:
            return False
        self._allocate(table, num_new)
        return True

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Make the full blocks of the first `num_computed_tokens` shareable: their KV is computed and will not change.

        A block whose content another sequence has cached meanwhile is given back and the other one is held instead, so that
        equal prompts share memory and every cached block's parent is held by whoever holds the block.
        """
        num_full_blocks = num_computed_tokens // self.block_size
        if num_full_blocks <= len(table.nodes) or not (self._enable_prefix_caching and table.shares):
            return
        size = self.block_size
        self._keys.extend(table.digests, table.cache_salt, token_ids, num_full_blocks)
        for index in range(len(table.nodes), num_full_blocks):
            parent = table.nodes[index - 1] if index else None
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            node = self._index.get(table.digests[index])
            if node is None:
                block_id = table.block_ids[index]
                node = PrefixNode(table.digests[index], parent, tokens, table.cache_salt, block_id)
                self._index.add(node)
                self._pool.fill(block_id, node)
            elif node.holds(parent, tokens, table.cache_salt):
                self._pool.acquire(node.block_id)
                self._pool.release(table.block_ids[index])
                table.block_ids[index] = node.block_id
            else:
                table.shares = False
                return
            table.nodes.append(node)

    def release(self, table: BlockTable) -> None:
        """Take all blocks back, the last first, so that a prefix outlives what followed it. An empty table is fine."""
        for block_id in reversed(table.block_ids):
            self._pool.release(block_id)
        table.block_ids.clear()
        table.nodes.clear()
        table.shares = True
        self._tables.pop(id(table), None)

    def statistics(self) -> KVCacheStatistics:
        """Counts of blocks, and of prefix look-ups in tokens."""
        pool = self._pool
        return KVCacheStatistics(
            num_blocks=len(pool.blocks),
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_used_blocks=pool.num_used,
            num_prefix_query_tokens=self._num_query_tokens,
            num_prefix_hit_tokens=self._num_hit_tokens,
            num_evictions=pool.num_evictions,
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError when any account is wrong. Costs a walk over all blocks and tables: for tests."""
        num_references = [0] * len(self._pool.blocks)
        for table in self._tables.values():
            if len(set(table.block_ids)) != len(table.block_ids):
                raise RuntimeError(f"a table holds a block twice: {table.block_ids}")
            for block_id in table.block_ids:
                num_references[block_id] += 1
            for block_id, node in zip(table.block_ids, table.nodes, strict=False):
                if node.block_id != block_id or node.cache_salt != table.cache_salt:
                    raise RuntimeError(f"block {block_id} of a table is not where its content lies ({node.block_id})")
        self._pool.check_integrity(num_references)
        for node in self._index:
            if self._pool.blocks[node.block_id].node is not node:
                raise RuntimeError(f"the index leads to block {node.block_id}, which has another content")
            if node.parent is not None and self._index.get(node.parent.digest) is not node.parent:
                raise RuntimeError(f"block {node.block_id} is cached, the block before it is not")
        if len(self._index) != sum(block.node is not None for block in self._pool.blocks):
            raise RuntimeError("a block has a content that the index does not know")

    def _num_idle(self, nodes: Sequence[PrefixNode]) -> int:
        """Of these contents, those that nobody holds: sharing them makes as many blocks fewer available."""
        return sum(self._pool.is_idle(node.block_id) for node in nodes)

    def _is_refused_as_before(self, table: BlockTable, num_spare_blocks: int) -> bool:
        """Whether the head of a queue, asked for in each step, needs no walk over its match to be refused once more."""
        refusal = self._refusal
        return (
            refusal is not None
            and refusal.table is table
            and refusal.num_revivals == self._pool.num_revivals
            and bool(table.matched)
            and table.matched[-1] is refusal.last_node
            and refusal.num_needed_blocks + num_spare_blocks > self._pool.num_available
        )

    def _allocate(self, table: BlockTable, num_blocks: int) -> None:
        table.block_ids.extend(self._pool.allocate() for _ in range(num_blocks))
        if table.block_ids:
            self._tables[id(table)] = table
