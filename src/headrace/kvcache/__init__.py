"""KV cache accounting: blocks, the pool, prefix hashes. Pure: time is an argument."""
