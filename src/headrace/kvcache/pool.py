"""The pool of blocks: free list, reference counts, eviction order.

Owns: who may take which block next. Runs in: worker, tests, simulation.
Must not know: sequences, tokens, hashes.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from headrace.kvcache.block import Block
from headrace.kvcache.prefix import PrefixNode

MAX_EVICTIONS_KEPT = 1024  # between two calls of take_evictions; further ones are only counted


class BlockPool:
    """A fixed number of blocks, each free, cached (held by nobody, content still findable) or used (held by a table).

    New blocks come from the free list, the last one returned first, so that memory never touched stays untouched. When it is
    empty the cached block that was let go longest ago is evicted; `on_evict` is told its content.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[PrefixNode], None]) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_evictions = 0
        self.num_revivals = 0  # times that a cached block was held again
        self.now_ns = 0  # the time for what happens next; written by the manager
        self._evictions: list[tuple[int, int]] = []
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently let go first

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that some table holds."""
        return len(self.blocks) - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    def is_idle(self, block_id: int) -> bool:
        """Whether no table holds the block, so that acquiring it makes one block fewer available."""
        return self.blocks[block_id].num_references == 0

    def allocate(self) -> int:
        """Take a block without content for one owner. Raises RuntimeError when none is available: ask num_available first."""
        if self._free:
            block = self.blocks[self._free.pop()]
        elif self._cached:
            block = self.blocks[self._cached.popitem(last=False)[0]]
            if block.node is None:
                raise RuntimeError(f"cached block {block.block_id} has no content")
            self._on_evict(block.node)
            block.node = None
            self._note_eviction(block)
        else:
            raise RuntimeError("no block is available")
        block.num_references = 1
        return block.block_id

    def fill(self, block_id: int, node: PrefixNode) -> None:
        """The block's content is computed and can be found from now on."""
        block = self.blocks[block_id]
        block.node, block.content_ns = node, self.now_ns

    def take_evictions(self) -> list[tuple[int, int]]:
        """Of the blocks evicted since the last call: how long each had its content, and how long nobody had held it (ns).

        At most MAX_EVICTIONS_KEPT, the first ones; `num_evictions` counts all.
        """
        evictions, self._evictions = self._evictions, []
        return evictions

    def acquire(self, block_id: int) -> None:
        """Hold a block that has content once more. Raises RuntimeError for one without: it may be written by its owner."""
        block = self.blocks[block_id]
        if block.node is None:
            raise RuntimeError(f"block {block_id} has no shareable content")
        if block.num_references == 0:
            del self._cached[block_id]
            self.num_revivals += 1
        block.num_references += 1

    def release(self, block_id: int) -> None:
        """Let go of a block once. Raises RuntimeError when nobody holds it."""
        block = self.blocks[block_id]
        if block.num_references == 0:
            raise RuntimeError(f"block {block_id} is released more often than it was taken")
        block.num_references -= 1
        if block.num_references == 0:
            if block.node is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = None
                block.idle_since_ns = self.now_ns

    def check_integrity(self, num_references: Sequence[int]) -> None:
        """Raise RuntimeError when an account is wrong. `num_references[i]`: tables that hold block i, counted by the caller."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise RuntimeError("a block is free twice")
        for block, expected in zip(self.blocks, num_references, strict=True):
            if block.num_references != expected:
                raise RuntimeError(f"block {block.block_id} counts {block.num_references} holders, {expected} tables hold it")
            places = (block.block_id in free, block.block_id in self._cached, expected > 0)
            if sum(places) != 1:
                raise RuntimeError(f"block {block.block_id} is in {sum(places)} of free, cached, used: {places}")
            if block.node is None and (places[1] or expected > 1):
                raise RuntimeError(f"block {block.block_id} is cached or shared without content")
            if block.node is not None and places[0]:
                raise RuntimeError(f"free block {block.block_id} has content")

    def _note_eviction(self, block: Block) -> None:
        self.num_evictions += 1
        if len(self._evictions) < MAX_EVICTIONS_KEPT:
            self._evictions.append((self.now_ns - block.content_ns, self.now_ns - block.idle_since_ns))
