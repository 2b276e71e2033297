"""Which bytes of a snapshot are which tensor, and what a server's checksums of them should be."""

import hashlib
import math
from typing import Any

import pytest
import torch

from flowrt.engines.sglang.layout import ExpectedChecksums, Layout
from flowrt.errors import EngineError, TransferError
from flowrt.transport.weights import snapshot as snapshots
from flowrt.transport.weights.snapshot import Snapshot

SHAPES = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.norm.weight": (4,),
}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 200, 10**6])
def test_parameters_are_found_in_whatever_buckets_they_were_put(
    dtype: torch.dtype, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "BUCKET_BYTES", bucket_bytes)
    held = tensors(dtype)
    snapshot = Snapshot.take(1, held)
    buckets = Layout(SHAPES).buckets(snapshot)
    assert len(buckets) == len(snapshot.buckets)
    found = {one.name: (one, view) for bucket in buckets for one, view in bucket}
    assert list(found) == list(SHAPES)
    for name, (one, view) in found.items():
        assert (one.shape, one.dtype) == (SHAPES[name], str(dtype).removeprefix("torch."))
        assert torch.equal(view, held[name])


@pytest.mark.parametrize("change", [{"extra": torch.zeros(3)}, {"model.norm.weight": torch.zeros(5)}])
def test_a_snapshot_of_another_model_is_refused(change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(TransferError, match="the same checkpoint"):
        Layout(SHAPES).buckets(Snapshot.take(1, tensors() | change))


def told(held: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As a server on a CPU tells it: three projections are one, the vocabulary is filled up to 64 rows."""
    attention = "model.layers.0.self_attn."
    fused = torch.cat([held[f"{attention}{part}_proj.weight"] for part in "qkv"])
    embedding = torch.cat([held["model.embed_tokens.weight"], torch.zeros(54, 4)])
    mine = {
        "model.embed_tokens.weight": embedding,
        f"{attention}qkv_proj.weight": fused,
        "model.norm.weight": held["model.norm.weight"],
    }
    sums = {name: hashlib.sha256(one.numpy().tobytes()).hexdigest()[:16] for name, one in mine.items()}
    return {"success": True, "ranks": [{"checksums": sums}]}


TOLD: dict[str, str] = told(tensors())["ranks"][0]["checksums"]


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_checksums_of_the_same_weights_agree(sent: torch.dtype) -> None:
    """The server has them in float32, whatever they came in."""
    held = {name: one.float() for name, one in tensors(sent).items()}
    assert ExpectedChecksums(Layout(SHAPES), Snapshot.take(1, tensors(sent))).check(told(held)) == 3


def test_what_was_summed_up_ahead_is_not_summed_up_while_the_server_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = ExpectedChecksums(Layout(SHAPES), Snapshot.take(1, tensors()))
    sums.prepare()
    monkeypatch.setattr(hashlib, "sha256", None)
    with pytest.raises(EngineError, match="1 of 3 tensors differ"):
        sums.check({"ranks": [{"checksums": TOLD | {"model.norm.weight": "0"}}]})
    assert sums.check({"ranks": [{"checksums": TOLD}]}) == 3


@pytest.mark.parametrize("name", SHAPES)
def test_one_changed_bit_is_told_by_name(name: str) -> None:
    held = tensors()
    held[name] = held[name].clone()
    held[name].view(torch.int32).view(-1)[math.prod(SHAPES[name]) // 2] ^= 1
    with pytest.raises(EngineError, match=r"version 1: 1 of 3 tensors differ"):
        ExpectedChecksums(Layout(SHAPES), Snapshot.take(1, tensors())).check(told(held))


@pytest.mark.parametrize("wrong", [{}, {"ranks": []}, {"ranks": [{}]}, {"ranks": [{"checksums": {"x": "0"}}]}])
def test_checksums_in_another_form_are_an_error(wrong: Any) -> None:
    with pytest.raises(EngineError, match="checksums"):
        ExpectedChecksums(Layout(SHAPES), Snapshot.take(1, tensors())).check(wrong)
