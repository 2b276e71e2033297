"""A training engine saves the complete state of its next steps; a discarded gradient has no effect."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from flowrt.algorithms.objective import Objective
from flowrt.engines.base import TrainingBatch
from flowrt.engines.hf import load_model
from flowrt.engines.options import TrainOptions
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training import saved_state
from flowrt.engines.training.forward import response_logprobs
from flowrt.engines.training.loss_passes import AGES
from flowrt.engines.training.saved_state import files_of
from flowrt.errors import EngineError

FILE_BYTES = 4000
WARMUP = 6  # longer than the steps before the save: the learning rate depends on the step count


def trainer(seed: int = 3, hidden_size: int = 32) -> TorchTrainer:
    model = build_model(
        vocab_size=24, hidden_size=hidden_size, layers=1, heads=2, intermediate_size=48, max_length=64, seed=seed
    )
    options = TrainOptions(warmup_steps=WARMUP, weight_decay=0.01)
    return TorchTrainer(model, options, Objective(), temperature=1.0)


def batch(seed: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = [(4, 5), (3, 7), (6, 2)]
    return TrainingBatch(
        prompts=[torch.randint(2, 24, (p,), generator=generator) for p, _ in rows],
        responses=[torch.randint(2, 24, (r,), generator=generator) for _, r in rows],
        rollout_logprobs=[-3.0 + 0.3 * torch.randn(r, generator=generator) for _, r in rows],
        reference_logprobs=None,
        advantages_N=torch.randn(len(rows), generator=generator),
        weights_N=torch.ones(len(rows)),
        groups_N=torch.zeros(len(rows), dtype=torch.int64),
    )


def train(engine: TorchTrainer, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        engine.accumulate(batch(2 * step))
        engine.accumulate(batch(2 * step + 1))
        metrics.append(engine.step())
    return metrics


def assert_same(first: TorchTrainer, second: TorchTrainer) -> None:
    theirs = second.parameters()
    for name, tensor in first.parameters().items():
        assert torch.equal(tensor, theirs[name]), name


def test_an_exported_model_keeps_its_dtype_and_end_tokens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In its own dtype, or in float32; the trained parameters stay in float32. No progress bar ends in a log."""
    original = trainer().model.to(torch.bfloat16)
    original.generation_config.eos_token_id = [1, 2]
    original.save_pretrained(tmp_path / "original")
    options, loss = TrainOptions(), Objective()
    cases: list[tuple[Literal["source", "float32"], torch.dtype]]
    cases = [("source", torch.bfloat16), ("float32", torch.float32)]
    for final_dtype, expected in cases:
        options = dataclasses.replace(options, final_dtype=final_dtype)
        model = load_model(tmp_path / "original")
        engine = TorchTrainer(model, options, loss, temperature=1.0)
        train(engine, range(1))
        engine.export(tmp_path / final_dtype)
        assert "it/s]" not in capfd.readouterr().err
        written = AutoModelForCausalLM.from_pretrained(tmp_path / final_dtype, dtype="auto")
        assert written.generation_config.eos_token_id == [1, 2]
        for name, tensor in written.named_parameters():
            assert torch.equal(tensor, engine.parameters()[name].to(expected)), name
        assert {tensor.dtype for tensor in engine.parameters().values()} == {torch.float32}


def test_an_exported_model_has_files_of_the_largest_size(tmp_path: Path) -> None:
    engine = trainer()
    options = TrainOptions(file_gb=2e-5)
    TorchTrainer(engine.model, options, Objective(), temperature=1.0).export(tmp_path / "split")
    files = list((tmp_path / "split").glob("*.safetensors"))
    assert len(files) > 1
    read = load_model(tmp_path / "split").state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in engine.parameters().items())


def test_the_divergence_per_age_does_not_depend_on_micro_batches() -> None:
    first, second = trainer(), trainer()
    whole = dataclasses.replace(batch(1), ages=[torch.tensor([2, 2, 0, 0, 0]), torch.ones(7), torch.tensor([0, 99])])
    first.accumulate(whole)
    with torch.no_grad():
        logprobs_T, _ = response_logprobs(first.model, whole.prompts, whole.responses, 1.0)
    ratio_T = (logprobs_T - torch.cat(list(whole.rollout_logprobs))).double()
    k3_T, ages_T = ratio_T.expm1() - ratio_T, torch.cat([ages.long() for ages in whole.ages or ()]).clamp(max=AGES - 1)
    measured = first.step()
    for age in range(AGES):
        expected = k3_T[ages_T == age].mean().item() if bool((ages_T == age).any()) else None
        assert measured.get(f"divergence_{age}") == (expected and pytest.approx(expected, rel=1e-4))
    for row in range(3):
        second.accumulate(
            TrainingBatch(
                prompts=whole.prompts[row : row + 1],
                responses=whole.responses[row : row + 1],
                rollout_logprobs=whole.rollout_logprobs[row : row + 1],
                reference_logprobs=None,
                advantages_N=whole.advantages_N[row : row + 1],
                weights_N=whole.weights_N[row : row + 1],
                groups_N=whole.groups_N[row : row + 1],
                ages=(whole.ages or ())[row : row + 1],
            )
        )
    assert {name: value for name, value in second.step().items() if name.startswith("divergence")} == {
        name: pytest.approx(value, rel=1e-4) for name, value in measured.items() if name.startswith("divergence")
    }
    assert not any(name.startswith("divergence") for name in train(first, range(1))[0])


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_restored_engine_continues_bit_for_bit(tmp_path: Path, steps_before: int) -> None:
    first = trainer()
    train(first, range(steps_before))
    first.save(tmp_path)
    random_after = torch.rand(4)
    after = train(first, range(steps_before, 8))
    second = trainer(seed=4)
    second.accumulate(batch(99))  # the load discards this gradient
    second.load(tmp_path)
    assert torch.equal(torch.rand(4), random_after)
    assert train(second, range(steps_before, 8)) == after
    assert_same(first, second)


def test_an_incompletely_restored_state_gives_other_steps(tmp_path: Path) -> None:
    """The test above would detect an optimiser state or a step count that is not restored."""
    first = trainer()
    train(first, range(3))
    first.save(tmp_path)
    second = trainer(seed=4)
    second.load(tmp_path)
    second._optimizer.state.clear()
    assert train(first, range(3, 5))[-1] != train(second, range(3, 5))[-1]
    third = trainer(seed=4)
    third.load(tmp_path)
    third._steps = 0
    assert train(third, range(3, 4))[0]["lr"] < train(trainer(), range(4))[-1]["lr"]


def test_a_discarded_gradient_has_no_effect() -> None:
    plain, interrupted = trainer(), trainer()
    train(plain, range(2))
    train(interrupted, range(1))
    interrupted.accumulate(batch(50))
    interrupted.discard()
    train(interrupted, range(1, 2))
    assert_same(plain, interrupted)
    kept = trainer()
    train(kept, range(1))
    kept.accumulate(batch(50))
    train(kept, range(1, 2))
    names = plain.parameters()
    assert any(not torch.equal(tensor, names[name]) for name, tensor in kept.parameters().items())


def test_the_saved_state_contains_no_pickle(tmp_path: Path) -> None:
    engine = trainer()
    train(engine, range(1))
    engine.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}


def test_a_missing_damaged_or_mismatched_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="holds no state of a training engine"):
        trainer().load(tmp_path)
    trainer(hidden_size=64).save(tmp_path)
    with pytest.raises(EngineError, match="state of another model"):
        trainer().load(tmp_path)
    [path] = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(EngineError, match="cannot be read"):
        trainer().load(tmp_path)


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40))
def test_state_files_are_filled_up_to_their_limit(sizes: list[int], limit: int) -> None:
    """In order; only a file of one tensor exceeds the limit, and no first tensor would fit into the file before."""
    files = files_of({str(index): size for index, size in enumerate(sizes)}, limit)
    assert list(files) == [str(index) for index in range(len(sizes))]
    filled: dict[int, list[int]] = {}
    for name, file in files.items():
        filled.setdefault(file, []).append(sizes[int(name)])
    assert list(filled) == list(range(1, len(filled) + 1))
    assert all(sum(file_sizes) <= limit or sum(map(bool, file_sizes)) == 1 for file_sizes in filled.values())
    assert all(sum(filled[file]) + filled[file + 1][0] > limit for file in range(1, len(filled)))


def test_a_state_in_several_files_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a large state is never in memory as a whole."""
    monkeypatch.setattr(saved_state, "FILE_BYTES", FILE_BYTES)
    engine, other = trainer(), trainer(seed=4)
    train(engine, range(2))
    engine.save(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    other.load(tmp_path)
    assert train(other, range(2, 4)) == train(engine, range(2, 4))
    assert_same(engine, other)
