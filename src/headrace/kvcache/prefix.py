"""Chained hashes of full blocks, and the index from hash to cached block.

Owns: prefix-cache keys and their comparison. Runs in: worker, tests, simulation.
Must not know: reference counts, eviction order.

The key of a block is a hash over the key of the block before it and its own token ids, so it stands for the whole prefix (a
Merkle chain over the blocks of PagedAttention, Kwon et al., arXiv 2309.06180). A hash is a way to find a block, never a proof:
contents are compared before a block is shared, so a collision costs a miss and nothing else.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Digest = Callable[[bytes], bytes]


def blake2b_digest(data: bytes) -> bytes:
    """16 bytes of BLAKE2b (RFC 7693)."""
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class PrefixNode:
    """The content of one cached block: its own tokens, after those of `parent`. Compared by identity, made once per content."""

    digest: bytes
    parent: "PrefixNode | None"  # None for the first block of a sequence
    token_ids: tuple[int, ...]  # block_size of them
    cache_salt: str
    block_id: int

    def holds(self, parent: "PrefixNode | None", token_ids: tuple[int, ...], cache_salt: str) -> bool:
        """Whether this is that content, without trusting any hash: `parent` is exact already, and so the whole prefix is."""
        return self.parent is parent and self.token_ids == token_ids and self.cache_salt == cache_salt


class PrefixKeys:
    """Makes the chained keys of one model with one KV format and block size."""

    def __init__(self, *, model_id: str, kv_format: str, block_size: int, digest: Digest = blake2b_digest) -> None:
        self._digest = digest
        self._model_id = model_id
        self._kv_format = kv_format
        self._block_size = block_size

    def root(self, cache_salt: str) -> bytes:
        """The key before the first block. Parts are length-prefixed, so that no choice of separators makes two alike."""
        parts = (self._model_id, self._kv_format, cache_salt, str(self._block_size))
        encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
        return self._digest(b"".join(len(part).to_bytes(8, "big") + part for part in encoded))

    def child(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The key of a full block with these tokens after the block with key `parent`."""
        return self._digest(parent + array("q", token_ids).tobytes())

    def extend(self, digests: list[bytes], cache_salt: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Append to `digests` until it holds the keys of the first `num_blocks` full blocks of `token_ids`."""
        size = self._block_size
        for index in range(len(digests), num_blocks):
            parent = digests[-1] if digests else self.root(cache_salt)
            digests.append(self.child(parent, token_ids[index * size : (index + 1) * size]))


class PrefixIndex:
    """Cached contents by key. At most one content per key; the parent of a content that is here is here as well."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    def get(self, digest: bytes) -> PrefixNode | None:
        """The content under this key, if any; the caller compares it (PrefixNode.holds)."""
        return self._nodes.get(digest)

    def add(self, node: PrefixNode) -> None:
        """Make a content findable. Raises RuntimeError when its key is taken."""
        if self._nodes.setdefault(node.digest, node) is not node:
            raise RuntimeError(f"key {node.digest.hex()} is taken by block {self._nodes[node.digest].block_id}")

    def remove(self, node: PrefixNode) -> None:
        """Forget a content. Raises RuntimeError when it is not here."""
        if self._nodes.pop(node.digest, None) is not node:
            raise RuntimeError(f"block {node.block_id} is not in the index")
