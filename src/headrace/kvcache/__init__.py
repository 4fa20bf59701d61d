"""KV cache accounting: blocks, the pool, prefix hashes. Pure: no I/O, no clock, no device."""

from headrace.kvcache.block import BlockTable
from headrace.kvcache.manager import KVCacheManager, KVCacheStatistics

__all__ = ["BlockTable", "KVCacheManager", "KVCacheStatistics"]
