"""How much memory this process may still take, and how much of it the KV pool gets.

Owns: available_bytes, total_bytes, pool_blocks. Runs in: worker. Must not know: what a block holds.
"""

import contextlib
from pathlib import Path

import psutil

from headrace.launch.settings import CacheSettings
from headrace.protocol.errors import ConfigurationError

CGROUP_FOLDERS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))  # v2, and v1's memory controller
CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def available_bytes(cgroup_folders: tuple[Path, ...] = CGROUP_FOLDERS) -> int:
    """Free memory of the machine, or what the container's limit leaves where that is less."""
    available = int(psutil.virtual_memory().available)
    for folder, (limit_file, usage_file) in zip(cgroup_folders, CGROUP_FILES, strict=False):
        try:
            limit = (folder / limit_file).read_text().strip()
            usage = int((folder / usage_file).read_text())
        except (OSError, ValueError):
            continue  # no such controller here
        if limit != "max":
            available = min(available, max(0, int(limit) - usage))
    return available


def total_bytes(cgroup_folders: tuple[Path, ...] = CGROUP_FOLDERS) -> int:
    """Memory of the machine, or the container's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    for folder, (limit_file, _) in zip(cgroup_folders, CGROUP_FILES, strict=False):
        with contextlib.suppress(OSError, ValueError):  # no such controller here, or no limit ("max")
            total = min(total, int((folder / limit_file).read_text()))
    return total


def pool_blocks(
    settings: CacheSettings,
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    available: int,
    total: int,
) -> int:
    """Blocks of the KV pool: as many as --kv-cache-gib holds, else a fraction of what is available.

    The default stops at twice what all sequences at full length can use: beyond it a pool only serves the prefix cache.
    Raises ConfigurationError when not even a short request would fit, and for more than `total`: memory is taken as blocks are
    used for the first time, so that a pool too large would start well and be killed under load.
    """
    if settings.kv_cache_gib is not None:
        if settings.kv_cache_gib * 2**30 > total:
            raise ConfigurationError(
                f"--kv-cache-gib {settings.kv_cache_gib:g} is more than all memory that this process may use "
                f"({total / 2**30:.1f} GiB)."
            )
        num_blocks = int(settings.kv_cache_gib * 2**30) // bytes_per_block
    else:
        useful = 2 * max_num_seqs * -(-max_model_len // block_size)
        num_blocks = min(int(settings.kv_cache_memory_fraction * available) // bytes_per_block, useful)
    if num_blocks < 2:
        raise ConfigurationError(
            f"The KV pool would hold {num_blocks} blocks of {block_size} tokens, {bytes_per_block / 2**20:.1f} MiB each. "
            "Give it more memory with --kv-cache-gib."
        )
    return num_blocks
