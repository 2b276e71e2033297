"""The FSDP2 engine with a process for each rank: 1, 2 and 4 ranks, checkpoints across them, adapters, export."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.hf import load_model
from flowrt.engines.tiny_model import build_model
from flowrt.engines.torch.trainer import TorchTrainer
from tests.decoders import DECODERS
from tests.integration.helpers import fsdp_rank
from tests.integration.helpers.forked_flowrt import run_module

STEPS = 10
EXACT = {"dtype": "float64"}
LORA = {"rank": 4}
COMPILER = bool(shutil.which("g++"))
OTHER_DECODERS = ["gemma2", "gpt2", "llama"]
"""Tied weights and capped logits; other parameter names and dropout; neither."""
BFLOAT16 = "llama"
"""Stored in bfloat16, with several end-of-sequence tokens."""

pytestmark = pytest.mark.slow


class Ranks:
    """The results of trainers with 1, 2 and 4 ranks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._phases: list[str] = []
        self.model = directory / "model"
        build_model(
            vocab_size=32, hidden_size=64, layers=2, heads=2, intermediate_size=128, max_length=64, seed=3
        ).save_pretrained(self.model)

    def decoder(self, name: str) -> str:
        """The path of a model with another architecture."""
        path = self.directory / f"model-{name}"
        if not path.exists():
            kind, config = DECODERS[name]
            torch.manual_seed(5)
            model = kind(config)
            if name == BFLOAT16:
                model.to(torch.bfloat16).generation_config.eos_token_id = [1, 2]
            model.save_pretrained(path)
        return str(path)

    def written(self, name: str) -> str:
        """The path of that model after training."""
        return str(self.directory / f"written-{name}")

    def plan(self, ranks: int, **orders: dict[str, Any]) -> None:
        """Add a trainer with ``ranks`` ranks that executes the named orders in turn."""
        lines = [{"steps": [0, STEPS], **order, "out": str(self.directory / name)} for name, order in orders.items()]
        self._phases.append(json.dumps({"ranks": ranks, "orders": lines}))

    def run(self, processes: int = 4) -> None:
        """The same processes for all phases, forked from one with all imports, which take most of the time."""
        plan = self.directory / "plan"
        plan.write_text("\n".join(self._phases))
        words = (str(processes), str(self.model), str(plan))
        ended = run_module(fsdp_rank.__name__, *words, timeout_s=360.0)
        assert ended.returncode == 0, ended.stdout[-4000:]

    def path(self, name: str) -> str:
        path = self.directory / name
        path.mkdir(exist_ok=True)
        return str(path)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return dict(load_file(self.directory / f"{name}.safetensors"))

    def report(self, name: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.directory / f"{name}.json").read_text())
        return report

    def exported(self, name: str, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(self.directory / name, dtype=dtype)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """2 ranks, then 1 and 2 again for the interrupted training, then 4; all other variants in the same phases."""
    result = Ranks(tmp_path_factory.mktemp("fsdp"))
    exported = str(result.directory / "exported")
    result.plan(
        2,
        two={"fsdp": EXACT},
        lock_step={"steps": [0, 4], "fsdp": {**EXACT, "gather": "pass", "recompute": True}},
        fused={"steps": [0, 4], "fsdp": EXACT, "fused": True},
        fused_lock_step={"steps": [0, 4], "fsdp": {**EXACT, "gather": "pass"}, "fused": True},
        stopped={"steps": [0, 4], "fsdp": {**EXACT, "gather": "pass"}, "stops": True},
        # Smaller than the model: several files.
        until_4={
            "steps": [0, 4],
            "fsdp": EXACT,
            "save": result.path("at_4"),
            "export": exported,
            "options": {"final_dtype": "float64", "file_gb": 2e-4},
        },
        adapters={"steps": [0, 2], "fsdp": EXACT, "lora": LORA, "export": str(result.directory / "adapted")},
        added={"steps": [0, 2], "fsdp": EXACT, "lora": {**LORA, "publish": "merged"}},
        narrow={"steps": [0, 2], "fsdp": {"dtype": "bfloat16"}},
        **{
            name: {"steps": [0, 3], "fsdp": EXACT, "model": result.decoder(name), "export": result.written(name)}
            for name in OTHER_DECODERS
        },
    )
    result.plan(
        1,
        one={"fsdp": EXACT},
        until_7={
            "steps": [4, 7],
            "fsdp": EXACT,
            "load": result.path("at_4"),
            "save": result.path("at_7"),
            "discard": True,
        },
        unharmed={"steps": [0, 0], "fsdp": EXACT, "damaged": result.path("nothing")},
    )
    result.plan(2, resumed={"steps": [7, STEPS], "fsdp": EXACT, "load": result.path("at_7")})
    result.plan(4, four={"fsdp": EXACT}, single={})
    result.run()
    return result


def max_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight."""
    assert first.keys() == second.keys()
    return max(float((tensor.double() - second[name].double()).abs().max()) for name, tensor in first.items())


@pytest.fixture(scope="module")
def torch_engine(ranks: Ranks) -> Callable[..., dict[str, torch.Tensor]]:
    """The weights after ``steps`` steps of the engine on plain PyTorch."""

    @functools.cache
    def train(steps: int, dtype: torch.dtype, model: Path = ranks.model) -> dict[str, torch.Tensor]:
        torch.set_num_threads(1)
        loaded = load_model(model, dtype=dtype)
        engine = TorchTrainer(loaded, fsdp_rank.OPTIONS, Objective(kl=Kl(1e-3)), temperature=1.0)
        fsdp_rank.train(engine, 0, steps)
        return {name: tensor.clone() for name, tensor in engine.parameters().items()}

    return train


@pytest.mark.parametrize("name", ["one", "two", "four"])
def test_weights_do_not_depend_on_the_number_of_ranks(ranks: Ranks, torch_engine: Any, name: str) -> None:
    """Compared with the engine on plain PyTorch; `share` distributes the samples of a step to the ranks."""
    expected = torch_engine(STEPS, torch.float64)
    assert max_difference(ranks.weights(name), expected) < 1e-6
    assert max_difference(ranks.weights(name), load_model_weights(ranks)) > 1e-3
    metrics = ranks.report(name)["metrics"]
    for mine, theirs in zip(metrics, ranks.report("two")["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-9)


def test_some_steps_are_clipped_and_some_are_not(ranks: Ranks) -> None:
    """Otherwise equal weights would not test clipping."""
    norms = [line["grad_norm"] for line in ranks.report("two")["metrics"]]
    assert min(norms) < fsdp_rank.MAX_GRAD_NORM < max(norms)


@pytest.mark.parametrize("name", OTHER_DECODERS)
def test_other_decoders_are_trained_as_on_plain_pytorch(ranks: Ranks, torch_engine: Any, name: str) -> None:
    """Dropout, if a model has it, is off, as it was during sampling."""
    path = Path(ranks.decoder(name))
    assert max_difference(ranks.weights(name), torch_engine(3, torch.float64, path)) < 1e-6
    start = {key: tensor.detach() for key, tensor in load_model(path).named_parameters()}
    assert max_difference(ranks.weights(name), start) > 1e-4


def test_ranks_in_lock_step_reach_the_same_weights(ranks: Ranks) -> None:
    assert max_difference(ranks.weights("lock_step"), ranks.weights("until_4")) < 1e-6


@pytest.mark.parametrize("name", ["fused", "fused_lock_step"])
def test_a_fused_head_reaches_the_same_weights(ranks: Ranks, name: str) -> None:
    assert max_difference(ranks.weights(name), ranks.weights("until_4")) < 1e-6


def test_model_that_fails_on_packed_samples_stays_sharded_and_gets_padded_ones(ranks: Ranks) -> None:
    reports = [ranks.report(name) for name in ("lock_step", "stopped")]
    assert [(report["packed"], report["unsharded"]) for report in reports] == [(True, 0), (False, 0)]
    assert max_difference(ranks.weights("stopped"), ranks.weights("until_4")) < 1e-6


@pytest.fixture(scope="module")
def compiled(ranks: Ranks) -> Ranks:
    """A run by itself: compilation takes longer than all other runs."""
    result = Ranks(ranks.directory / "compiled")
    result.plan(2, compiled={"steps": [0, 4], "fsdp": {**EXACT, "gather": "pass"}, "options": {"compile": COMPILER}})
    result.run(processes=2)
    return result


@pytest.mark.long
@pytest.mark.skipif(not COMPILER, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_layers_reach_the_same_weights(ranks: Ranks, compiled: Ranks) -> None:
    """Parts of the model are in float32 whatever its type, and are rounded elsewhere once they are compiled.

    How far that moves the few weights whose gradient is all rounding depends on the processor.
    """
    assert [result.report(name)["compiled"] for result, name in ((compiled, "compiled"), (ranks, "until_4"))] == [2, 0]
    for name, tensor in compiled.weights("compiled").items():
        other = ranks.weights("until_4")[name]
        assert float(((tensor - other).abs() > 2e-6).double().mean()) < 1e-3, name
        assert float((tensor - other).norm() / other.norm()) < 1e-5, name


def load_model_weights(ranks: Ranks) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in load_model(ranks.model).named_parameters()}


def test_single_precision_stays_as_close_as_rounding_allows(ranks: Ranks, torch_engine: Any) -> None:
    """Adam divides by the gradient's size, so a gradient that is all rounding still moves its weight.

    A few weights have such gradients: by these alone, plain PyTorch in float32 is up to 6e-5 away from float64 (seed 5
    of `build_model`). How many they are depends on the processor, so that plain PyTorch in float32 is the measure. All
    others equal those in float64, and without rounding all do: see "one", above.
    """
    exact, rounded = torch_engine(STEPS, torch.float64), torch_engine(STEPS, torch.float32)

    def differing(weights: torch.Tensor, name: str) -> float:
        return float(((weights - exact[name]).abs() > 1e-6).double().mean())

    for name, tensor in ranks.weights("single").items():
        assert differing(tensor, name) < 1e-3 + 2 * differing(rounded[name], name), name
        assert differing(tensor, name) < 1e-2, name
        assert float((tensor - exact[name]).norm() / exact[name].norm()) < 1e-4, name


def test_some_steps_leave_a_rank_without_samples() -> None:
    """Of the runs whose weights are compared above."""
    empty = [step for step in range(STEPS) if not fsdp_rank.share(step, 1, 2)]
    assert empty
    shares = [sorted(row for rank in range(4) for rows in fsdp_rank.share(5, rank, 4) for row in rows)]
    assert shares == [list(range(fsdp_rank.SAMPLES))]


def test_recomputing_runs_layers_twice(ranks: Ranks) -> None:
    """The lock-step ranks make the same number of passes each, so both are counted on rank 0."""
    assert ranks.report("lock_step")["calls"] % 2 == 0
    passes = sum(max(len(fsdp_rank.share(step, rank, 2)) for rank in range(2)) for step in range(4))
    assert ranks.report("lock_step")["calls"] == 2 * passes


def test_checkpoint_resumes_with_another_number_of_ranks(ranks: Ranks) -> None:
    """2 ranks for four steps, 1 for three after a step that was begun and discarded, 2 for the last three."""
    assert max_difference(ranks.weights("resumed"), ranks.weights("two")) < 1e-6
    assert [line["lr"] for line in ranks.report("resumed")["metrics"]] == [
        line["lr"] for line in ranks.report("two")["metrics"][7:]
    ]


def test_nothing_in_a_checkpoint_is_pickled(ranks: Ranks) -> None:
    files = [path.suffix for path in Path(ranks.path("at_4")).iterdir()]
    assert files.count(".safetensors") == len(files) > 4  # several files per rank


def test_a_directory_without_a_checkpoint_is_refused_and_nothing_changes(ranks: Ranks) -> None:
    error = (ranks.directory / "unharmed.0.error").read_text()
    assert "holds no state of a training engine" in error
    assert max_difference(ranks.weights("unharmed"), load_model_weights(ranks)) == 0.0


def test_the_model_is_written_in_files_that_transformers_loads(ranks: Ranks) -> None:
    assert len(list((ranks.directory / "exported").glob("model-*.safetensors"))) > 1
    assert max_difference(ranks.exported("exported"), ranks.weights("until_4")) == 0.0


@pytest.mark.parametrize("name", OTHER_DECODERS)
def test_exported_model_keeps_its_dtype_and_generation_settings(ranks: Ranks, name: str) -> None:
    """With its dtype and generation settings; tied weights are stored once."""
    kept = {}
    for place in (Path(ranks.decoder(name)), Path(ranks.written(name))):
        config, generation = (
            json.loads((place / f"{file}.json").read_text()) for file in ("config", "generation_config")
        )
        tensors = load_file(place / "model.safetensors")
        kept[place] = config["dtype"], generation["eos_token_id"], {key: t.dtype for key, t in tensors.items()}
    before, after = kept.values()
    assert before == after
    assert before[:2] == (("bfloat16", [1, 2]) if name == BFLOAT16 else ("float32", 1))


def test_only_adapters_are_published_and_merged_into_the_final_model(ranks: Ranks) -> None:
    adapters = ranks.weights("adapters")
    assert all(".lora_" in name for name in adapters)
    assert sum(t.numel() for t in adapters.values()) < 0.25 * sum(t.numel() for t in ranks.weights("two").values())
    exported = ranks.exported("adapted")
    assert max_difference(exported, ranks.weights("added")) < 1e-6
    assert max_difference(exported, load_model_weights(ranks)) > 1e-4
    untouched = "model.embed_tokens.weight"
    assert torch.equal(exported[untouched].float(), load_model_weights(ranks)[untouched])


def test_bfloat16_weights_are_published_and_close_to_float64(ranks: Ranks, torch_engine: Any) -> None:
    """Passes in bfloat16 round, so an update has an error, of at most a quarter of its size."""
    actual, expected, start = ranks.weights("narrow"), torch_engine(2, torch.float64), load_model_weights(ranks)
    assert {tensor.dtype for tensor in actual.values()} == {torch.bfloat16}
    for name, tensor in expected.items():
        rounding = start[name].double().abs().mean() * 2**-9
        error = (actual[name].double() - tensor.double()).abs().mean()
        update = (tensor.double() - start[name].double()).abs().mean()
        assert error < 0.25 * update + rounding, name
