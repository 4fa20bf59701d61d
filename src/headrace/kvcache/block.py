"""Blocks, block tables and slot arithmetic.

Owns: the shape of a block's account and of one sequence's table. Runs in: worker, tests, simulation.
Must not know: which blocks are free, what the KV storage looks like.
"""

from dataclasses import dataclass, field

from headrace.kvcache.prefix import PrefixNode


@dataclass(slots=True, eq=False)
class Block:
    """The account of one block of KV storage. Written by the pool and the manager only."""

    block_id: int
    num_references: int = 0  # tables that hold it
    node: PrefixNode | None = None  # what a cached block contains; None for one that cannot be found by content
    content_ns: int = 0  # when it got that content
    idle_since_ns: int = 0  # when its last holder let go of it


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in order. Written by the KVCacheManager only.

    `block_ids` is one list for the table's whole life, changed in place: a step plan refers to it. Its length is the number of
    positions that have memory, in blocks. `nodes` are the cached contents of its leading blocks. `digests` are the chained
    hashes of the sequence's leading full blocks, kept over a release because the tokens stay what they are. `matched` are the
    cached contents found by the last look-up, while the table is empty.
    """

    cache_salt: str
    block_ids: list[int] = field(default_factory=list)
    nodes: list[PrefixNode] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    matched: list[PrefixNode] = field(default_factory=list)
    shares: bool = True  # False once a hash collision was met: its further blocks stay private


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many token positions."""
    return -(-num_tokens // block_size)


def slot_of(position: int, block_size: int) -> tuple[int, int]:
    """Where a position lives: (index into the block table, offset in that block)."""
    return divmod(position, block_size)
