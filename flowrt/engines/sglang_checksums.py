"""What an SGLang server's checksums of its weights should be, computed from a snapshot.

A server on a CPU sums up each tensor's bytes (float32 here) with SHA-256, of which it tells the first eight. It holds
some tensors of the checkpoint end to end as one. On accelerators it uses another sum, which only compares servers with
each other.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from flowrt.engines.sglang_layout import Layout
from flowrt.errors import EngineError
from flowrt.transport.weights import Snapshot

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PADDED = ("embed_tokens.weight", "lm_head.weight")
VOCABULARY_MULTIPLE = 64


def checked(told: Any, layout: Layout, snapshot: Snapshot) -> int:
    """Compare; returns how many of the server's tensors were. Raises EngineError, naming those that differ."""
    try:
        held: Mapping[str, str] = told["ranks"][0]["checksums"]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(f"the server told its checksums in a form that flowrt does not know: {error!r}") from error
    tensors = {one.name: view for bucket in layout.buckets(snapshot) for one, view in bucket}
    compared, wrong = 0, []
    for name, checksum in held.items():
        parts = _parts(name)
        if all(part in tensors for part in parts):
            compared += 1
            if _sum(name, [tensors[part] for part in parts]) != checksum:
                wrong.append(name)
    if wrong or not compared:
        what = (
            f"{len(wrong)} of {compared} tensors differ ({', '.join(wrong[:3])})" if wrong else "none has a known name"
        )
        raise EngineError(f"the server's checksums are not those of version {snapshot.version}: {what}")
    return compared


def _parts(name: str) -> list[str]:
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]


def _sum(name: str, tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        held = tensor.float().contiguous()  # the server's type; from bfloat16 nothing is rounded
        sha.update(held.view(torch.uint8).numpy().data)
        if name.endswith(PADDED):
            sha.update(bytes(-len(held) % VOCABULARY_MULTIPLE * held[0].nbytes))
    return sha.hexdigest()[:16]
