"""Two ranks of the FSDP2 engine: a model in several files, and recomputed layers with unsharded parameters."""

import json
from pathlib import Path

import pytest

from flowrt.engines.hf import load_model
from tests.integration.helpers import fsdp_rank
from tests.integration.test_fsdp import EXACT, Ranks, load_model_weights, max_difference

STEPS = 4
SPLIT_MODEL = "split"
"""The same model, in several files."""

ADAPTIVE = {"target": 1e-3, "horizon": 100}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    result = Ranks(tmp_path_factory.mktemp("fsdp"))
    load_model(result.model).save_pretrained(result.directory / SPLIT_MODEL, max_shard_size="50KB")
    order = {"steps": [0, STEPS], "fsdp": EXACT}
    result.plan(
        2,
        plain=order,
        from_files={**order, "model": str(result.directory / SPLIT_MODEL)},
        recomputed={**order, "fsdp": {**EXACT, "recompute": True}},
        adaptive={**order, "adaptive": ADAPTIVE},
        saved={**order, "adaptive": ADAPTIVE, "steps": [0, 2], "save": result.path("checkpoint")},
        loaded={**order, "adaptive": ADAPTIVE, "steps": [2, STEPS], "load": result.path("checkpoint")},
    )
    result.run(processes=2)
    return result


def files(directory: Path) -> int:
    return len(list(directory.glob("*.safetensors")))


def test_a_model_in_several_files_trains_as_one_in_a_single_file(two_ranks: Ranks) -> None:
    """The arithmetic is the same, so the weights are equal bit for bit."""
    assert files(two_ranks.model) == 1
    assert files(two_ranks.directory / SPLIT_MODEL) > 1
    assert max_difference(two_ranks.weights("from_files"), two_ranks.weights("plain")) == 0.0
    assert max_difference(two_ranks.weights("from_files"), load_model_weights(two_ranks)) > 1e-4


def test_recomputation_with_unsharded_parameters_reaches_the_same_weights(two_ranks: Ranks) -> None:
    assert max_difference(two_ranks.weights("recomputed"), two_ranks.weights("plain")) < 1e-6
    assert max_difference(two_ranks.weights("recomputed"), load_model_weights(two_ranks)) > 1e-4


def test_every_pass_runs_recomputed_layers_twice(two_ranks: Ranks) -> None:
    """One pass for each micro-batch of rank 0, and one at the end of each step."""
    passes = STEPS + sum(len(fsdp_rank.share(step, 0, 2)) for step in range(STEPS))
    assert (two_ranks.report("plain")["calls"], two_ranks.report("recomputed")["calls"]) == (passes, 2 * passes)


def test_an_adaptive_coefficient_is_the_same_on_all_ranks_and_after_a_checkpoint(two_ranks: Ranks) -> None:
    of_ranks = [json.loads((two_ranks.directory / f"adaptive.{rank}.numbers").read_text()) for rank in range(2)]
    assert of_ranks[0] == of_ranks[1]
    coefs = [one["kl_coef"] for one in two_ranks.report("adaptive")["metrics"]]
    assert len(set(coefs)) == STEPS
    assert coefs[0] == 1e-3
    assert two_ranks.report("loaded")["metrics"] == two_ranks.report("adaptive")["metrics"][2:]
    assert json.loads((two_ranks.directory / "loaded.1.numbers").read_text()) == of_ranks[1]
    assert max_difference(two_ranks.weights("loaded"), two_ranks.weights("adaptive")) == 0.0
