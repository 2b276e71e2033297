"""Two ranks of the FSDP2 engine: a checkpoint in several files, and layers recomputed while parameters stay whole."""

import json
from pathlib import Path

import pytest

from flowrt.engines.hf import load_model
from tests.integration.helpers import fsdp_rank
from tests.integration.test_fsdp import EXACT, Ranks, apart, load_model_weights

STEPS = 4
CUT = "cut"
"""The same model, in several files."""

ADAPTIVE = {"target": 1e-3, "horizon": 100}

pytestmark = [pytest.mark.slow, pytest.mark.parallel, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    made = Ranks(tmp_path_factory.mktemp("fsdp"))
    load_model(made.model).save_pretrained(made.directory / CUT, max_shard_size="50KB")
    order = {"steps": [0, STEPS], "fsdp": EXACT}
    made.plan(
        2,
        plain=order,
        from_files={**order, "model": str(made.directory / CUT)},
        recomputed={**order, "fsdp": {**EXACT, "recompute": True}},
        adaptive={**order, "adaptive": ADAPTIVE},
        saved={**order, "adaptive": ADAPTIVE, "steps": [0, 2], "save": made.path("checkpoint")},
        loaded={**order, "adaptive": ADAPTIVE, "steps": [2, STEPS], "load": made.path("checkpoint")},
    )
    made.run(processes=2)
    return made


def files(directory: Path) -> int:
    return len(list(directory.glob("*.safetensors")))


def test_a_checkpoint_in_several_files_is_trained_as_from_one(two: Ranks) -> None:
    """Nothing is rounded otherwise, so not even the last bit may differ."""
    assert files(two.model) == 1
    assert files(two.directory / CUT) > 1
    assert apart(two.weights("from_files"), two.weights("plain")) == 0.0
    assert apart(two.weights("from_files"), load_model_weights(two)) > 1e-4


def test_recomputing_finds_the_same_weights_while_parameters_stay_whole(two: Ranks) -> None:
    assert apart(two.weights("recomputed"), two.weights("plain")) < 1e-6
    assert apart(two.weights("recomputed"), load_model_weights(two)) > 1e-4


def test_every_pass_runs_layers_twice_where_they_are_recomputed(two: Ranks) -> None:
    """Rank 0's own micro-batches, and the pass that ends each step."""
    passes = STEPS + sum(len(fsdp_rank.share(step, 0, 2)) for step in range(STEPS))
    assert (two.said("plain")["calls"], two.said("recomputed")["calls"]) == (passes, 2 * passes)


def test_an_adaptive_coefficient_is_the_same_on_all_ranks_and_after_a_checkpoint(two: Ranks) -> None:
    of_ranks = [json.loads((two.directory / f"adaptive.{rank}.numbers").read_text()) for rank in range(2)]
    assert of_ranks[0] == of_ranks[1]
    coefs = [one["kl_coef"] for one in two.said("adaptive")["metrics"]]
    assert len(set(coefs)) == STEPS
    assert coefs[0] == 1e-3
    assert two.said("loaded")["metrics"] == two.said("adaptive")["metrics"][2:]
    assert json.loads((two.directory / "loaded.1.numbers").read_text()) == of_ranks[1]
    assert apart(two.weights("loaded"), two.weights("adaptive")) == 0.0
