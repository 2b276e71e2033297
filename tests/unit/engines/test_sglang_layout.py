"""The layout of tensors in the buckets of a snapshot, and the checksums expected from a server."""

import hashlib
import math
from typing import Any

import pytest
import torch

from flowrt.engines.server.layout import Layout
from flowrt.engines.sglang.checksums import ExpectedChecksums
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
def test_parameters_are_found_for_any_bucket_size(
    dtype: torch.dtype, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "BUCKET_BYTES", bucket_bytes)
    weights = tensors(dtype)
    snapshot = Snapshot.take(1, weights)
    buckets = Layout(SHAPES).buckets(snapshot)
    assert len(buckets) == len(snapshot.buckets)
    views = {parameter.name: (parameter, view) for bucket in buckets for parameter, view in bucket}
    assert list(views) == list(SHAPES)
    for name, (parameter, view) in views.items():
        assert (parameter.shape, parameter.dtype) == (SHAPES[name], str(dtype).removeprefix("torch."))
        assert torch.equal(view, weights[name])


@pytest.mark.parametrize("change", [{"extra": torch.zeros(3)}, {"model.norm.weight": torch.zeros(5)}])
def test_a_snapshot_of_another_model_is_refused(change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(TransferError, match="the same checkpoint"):
        Layout(SHAPES).buckets(Snapshot.take(1, tensors() | change))


def server_report(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The report of a server on a CPU: Q, K and V projections are fused, the vocabulary is padded to 64 rows."""
    attention = "model.layers.0.self_attn."
    fused = torch.cat([weights[f"{attention}{part}_proj.weight"] for part in "qkv"])
    embedding = torch.cat([weights["model.embed_tokens.weight"], torch.zeros(54, 4)])
    server_tensors = {
        "model.embed_tokens.weight": embedding,
        f"{attention}qkv_proj.weight": fused,
        "model.norm.weight": weights["model.norm.weight"],
    }
    sums = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in server_tensors.items()}
    return {"success": True, "ranks": [{"checksums": sums}]}


CHECKSUMS: dict[str, str] = server_report(tensors())["ranks"][0]["checksums"]


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_checksums_of_the_same_weights_agree(sent: torch.dtype) -> None:
    """The server holds them in float32, whatever dtype was sent."""
    weights = {name: tensor.float() for name, tensor in tensors(sent).items()}
    assert ExpectedChecksums(Layout(SHAPES), Snapshot.take(1, tensors(sent))).check(server_report(weights)) == 3


def test_prepared_checksums_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = ExpectedChecksums(Layout(SHAPES), Snapshot.take(1, tensors()))
    sums.prepare()
    monkeypatch.setattr(hashlib, "sha256", None)
    with pytest.raises(EngineError, match="1 of 3 tensors differ"):
        sums.check({"ranks": [{"checksums": CHECKSUMS | {"model.norm.weight": "0"}}]})
    assert sums.check({"ranks": [{"checksums": CHECKSUMS}]}) == 3


@pytest.mark.parametrize("name", SHAPES)
def test_one_changed_bit_is_detected(name: str) -> None:
    weights = tensors()
    weights[name] = weights[name].clone()
    weights[name].view(torch.int32).view(-1)[math.prod(SHAPES[name]) // 2] ^= 1
    with pytest.raises(EngineError, match=r"version 1: 1 of 3 tensors differ"):
        ExpectedChecksums(Layout(SHAPES), Snapshot.take(1, tensors())).check(server_report(weights))


@pytest.mark.parametrize("added", [("model.layers.1.mlp.down_proj.weight",), ()])
def test_a_server_with_other_layers_is_refused(added: tuple[str, ...]) -> None:
    """It ignores weights of layers that it does not have, and keeps its own in others."""
    theirs = CHECKSUMS | dict.fromkeys(added, "0")
    ours = tensors() if added else tensors() | {"model.layers.1.input_layernorm.weight": torch.ones(4)}
    shapes = {name: tensor.shape for name, tensor in ours.items()}
    with pytest.raises(EngineError, match=r"the server has a model of \d layers, and version 1 has \d"):
        ExpectedChecksums(Layout(shapes), Snapshot.take(1, ours)).check({"ranks": [{"checksums": theirs}]})


@pytest.mark.parametrize("wrong", [{}, {"ranks": []}, {"ranks": [{}]}, {"ranks": [{"checksums": {"x": "0"}}]}])
def test_a_malformed_checksum_report_raises_an_error(wrong: Any) -> None:
    with pytest.raises(EngineError, match="checksums"):
        ExpectedChecksums(Layout(SHAPES), Snapshot.take(1, tensors())).check(wrong)
