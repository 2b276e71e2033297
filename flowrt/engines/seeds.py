"""Seeds that belong to a sample, not to the worker that happens to generate it."""

import hashlib
import struct


def sample_seed(run_seed: int, prompt: int, epoch: int, member: int, attempt: int) -> int:
    """The same sample has the same seed on any worker, in any order, after any restart; in [0, 2^63)."""
    key = struct.pack("<5q", run_seed, prompt, epoch, member, attempt)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
