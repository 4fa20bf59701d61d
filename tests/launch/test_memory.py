"""How the KV pool is sized."""

import pytest

from headrace.launch.memory import available_bytes, pool_blocks, total_bytes
from headrace.launch.settings import CacheSettings
from headrace.protocol.errors import ConfigurationError

MIB = 2**20


def blocks(settings: CacheSettings, available: int = 1024 * MIB, **changed: int) -> int:
    arguments = {"bytes_per_block": MIB, "block_size": 32, "max_model_len": 1024, "max_num_seqs": 64} | changed
    return pool_blocks(settings, available=available, total=2048 * MIB, **arguments)


def test_the_size_that_was_asked_for_is_what_one_gets():
    assert blocks(CacheSettings(kv_cache_gib=0.5)) == 512


def test_the_default_is_a_fraction_of_what_is_available():
    assert blocks(CacheSettings(kv_cache_memory_fraction=0.25)) == 256


def test_the_default_is_no_more_than_twice_what_all_sequences_can_use():
    assert blocks(CacheSettings(kv_cache_memory_fraction=0.9), available=2**40, max_num_seqs=2) == 2 * 2 * 32


@pytest.mark.parametrize("settings", [CacheSettings(kv_cache_gib=0.0001), CacheSettings(kv_cache_memory_fraction=1e-6)])
def test_too_little_is_refused_with_the_flag_to_change(settings):
    with pytest.raises(ConfigurationError, match="--kv-cache-gib"):
        blocks(settings)


def test_more_than_there_is_is_refused():
    assert blocks(CacheSettings(kv_cache_gib=2)) == 2048
    with pytest.raises(ConfigurationError, match="more than all memory"):
        blocks(CacheSettings(kv_cache_gib=2.1))


def test_a_containers_limit_is_all_memory_there_is(tmp_path):
    without_limit = total_bytes(())
    (tmp_path / "memory.max").write_text("max\n")
    assert total_bytes((tmp_path,)) == without_limit
    (tmp_path / "memory.max").write_text("104857600\n")
    assert total_bytes((tmp_path,)) == 104857600


@pytest.mark.parametrize(
    ("limit", "usage", "left"), [("104857600", "4857600", 100_000_000), ("max", "5", None), ("10", "20", 0)]
)
def test_a_containers_limit_counts(tmp_path, limit, usage, left):
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text(usage + "\n")
    seen = available_bytes((tmp_path, tmp_path / "absent"))
    assert seen == left if left is not None else seen > 100_000_000
