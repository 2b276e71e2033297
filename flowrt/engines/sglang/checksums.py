"""The checksums of an SGLang server that has loaded a snapshot.

- A server on a CPU reports the first eight bytes of the SHA-256 of each of its tensors, which are float32.
- The server fuses some tensors of the checkpoint, and pads the vocabulary.
- On accelerators it uses another checksum, which is not computed here.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flowrt.engines.server.layout import Layout
from flowrt.errors import EngineError
from flowrt.transport.weights.snapshot import Snapshot

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PADDED = ("embed_tokens.weight", "lm_head.weight")
VOCABULARY_MULTIPLE = 64
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ExpectedChecksums:
    """The checksums of a server that has loaded all of a snapshot."""

    def __init__(self, layout: Layout, snapshot: Snapshot) -> None:
        self._version = snapshot.version
        self._tensors = {parameter.name: view for bucket in layout.buckets(snapshot) for parameter, view in bucket}
        self._known: dict[str, str] = {}

    def prepare(self) -> None:
        """Compute the checksums of all expected tensors in advance; `check` computes the checksums of other names."""
        for name in self._tensors:
            self._checksum(_fused_name(name))

    def check(self, reported: Any) -> int:
        """Compare with the checksums that the server reported. Returns the number of tensors that were compared.

        Raises EngineError if any differ, if none could be compared, if the server has other layers, or if the report
        has another form.
        """
        try:
            held: Mapping[str, str] = reported["ranks"][0]["checksums"]
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the checksums of the server do not have the expected form: {error!r}") from error
        theirs, ours = _layers(held), _layers(self._tensors)
        if theirs and ours and theirs != ours:  # a server ignores the weights of layers that it does not have
            raise EngineError(
                f"the server has a model of {len(theirs)} layers, and version {self._version} has {len(ours)}; start "
                "it with the checkpoint of the run"
            )
        expected = {name: self._checksum(name) for name in held}
        compared = sum(checksum is not None for checksum in expected.values())
        wrong = [name for name, checksum in expected.items() if checksum is not None and checksum != held[name]]
        if wrong or not compared:
            what = (
                f"{len(wrong)} of {compared} tensors differ ({', '.join(wrong[:3])})"
                if wrong
                else "none has a known name"
            )
            raise EngineError(f"the server's checksums are not those of version {self._version}: {what}")
        return compared

    def _checksum(self, name: str) -> str | None:
        """The checksum of a tensor of the server; None if it does not consist of tensors of the snapshot."""
        parts = _parts(name)
        if name not in self._known and all(part in self._tensors for part in parts):
            self._known[name] = _sha256_prefix(name, [self._tensors[part] for part in parts])
        return self._known.get(name)


def _layers(names: Iterable[str]) -> set[str]:
    """The numbers of the layers that these tensors belong to."""
    return {match[1] for name in names if (match := _LAYER.search(name))}


def _parts(name: str) -> list[str]:
    """The names of the checkpoint's tensors that a tensor of the server consists of."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]


def _fused_name(name: str) -> str:
    """The name of the server's tensor that contains this tensor of the checkpoint."""
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{fused}.")
    return name


def _sha256_prefix(name: str, tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        wide = tensor.float().contiguous()  # the server's dtype; exact from bfloat16
        sha.update(wide.view(torch.uint8).numpy().data)
        if name.endswith(PADDED):
            sha.update(bytes(-len(wide) % VOCABULARY_MULTIPLE * wide[0].nbytes))
    return sha.hexdigest()[:16]
