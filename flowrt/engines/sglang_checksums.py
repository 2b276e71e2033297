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


class Sums:
    """Of a snapshot, as a server that has all of it tells them."""

    def __init__(self, layout: Layout, snapshot: Snapshot) -> None:
        self._version = snapshot.version
        self._tensors = {one.name: view for bucket in layout.buckets(snapshot) for one, view in bucket}
        self._known: dict[str, str] = {}

    def prepare(self) -> None:
        """Sum up ahead what servers are known to hold; whatever else one tells is summed up when it does."""
        for name in self._tensors:
            self._sum(_held(name))

    def check(self, told: Any) -> int:
        """Compare; returns how many of the server's tensors were. Raises EngineError, naming those that differ."""
        try:
            held: Mapping[str, str] = told["ranks"][0]["checksums"]
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the server told checksums in a form that flowrt does not know: {error!r}") from error
        ours = {name: self._sum(name) for name in held}
        compared = sum(one is not None for one in ours.values())
        wrong = [name for name, one in ours.items() if one is not None and one != held[name]]
        if wrong or not compared:
            what = (
                f"{len(wrong)} of {compared} tensors differ ({', '.join(wrong[:3])})"
                if wrong
                else "none has a known name"
            )
            raise EngineError(f"the server's checksums are not those of version {self._version}: {what}")
        return compared

    def _sum(self, name: str) -> str | None:
        """None where we have no such tensor."""
        parts = _parts(name)
        if name not in self._known and all(part in self._tensors for part in parts):
            self._known[name] = _summed(name, [self._tensors[part] for part in parts])
        return self._known.get(name)


def _parts(name: str) -> list[str]:
    """The tensors of a checkpoint that a server holds as this one."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]


def _held(name: str) -> str:
    """The tensor of a server that holds this one of a checkpoint."""
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{fused}.")
    return name


def _summed(name: str, tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        held = tensor.float().contiguous()  # the server's type; from bfloat16 nothing is rounded
        sha.update(held.view(torch.uint8).numpy().data)
        if name.endswith(PADDED):
            sha.update(bytes(-len(held) % VOCABULARY_MULTIPLE * held[0].nbytes))
    return sha.hexdigest()[:16]
