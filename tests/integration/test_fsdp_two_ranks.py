"""Two ranks of the FSDP2 engine: a model in several files, and recomputed layers with unsharded parameters."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrt.engines.exported_model import write_checkpoint
from flowrt.engines.hf import load_model
from flowrt.engines.options import LoraOptions
from tests.integration.helpers import fsdp_rank
from tests.integration.test_fsdp import EXACT, LORA, Ranks, load_model_weights, max_difference

STEPS = 4
SPLIT_MODEL = "split"
"""The same model, in several files."""

REFUSED = {"options": {"max_initial_mismatch": 1e-3}, "refused": True}
ADAPTIVE = {"target": 1e-3, "horizon": 100}

pytestmark = pytest.mark.long


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
        written={"steps": [0, 2], "save": result.path("state"), "export": str(result.directory / "exported")},
        adapted={
            "steps": [0, 2],
            "save": result.path("adapted-state"),
            "export": str(result.directory / "adapted-exported"),
            "lora": LORA,
        },
        unequal={**order, **REFUSED},
        unequal_lock_step={**order, "fsdp": {**EXACT, "gather": "pass"}, **REFUSED},
        allowed={**order, "options": {"max_initial_mismatch": 10.0}},
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


@pytest.mark.parametrize(
    ("name", "state", "rank"), [("exported", "state", 0), ("adapted-exported", "adapted-state", 4)]
)
def test_the_model_of_the_shards_of_two_ranks_is_the_exported_one(
    two_ranks: Ranks, tmp_path: Path, name: str, state: str, rank: int
) -> None:
    shards = list((two_ranks.directory / state).glob("*.safetensors"))
    assert len(shards) >= 2
    written = tmp_path / "model"
    write_checkpoint(two_ranks.directory / state, two_ranks.model, written, lora=LoraOptions(rank=rank))
    exported = two_ranks.directory / name
    files = sorted(path.relative_to(exported) for path in exported.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(written) for path in written.rglob("*.safetensors"))
    for file in files:
        ours, theirs = load_file(written / file), load_file(exported / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[our], theirs[our]) for our in ours), file
    trained = {key: tensor.detach() for key, tensor in load_model(written).named_parameters()}
    assert max_difference(trained, load_model_weights(two_ranks)) > 0


@pytest.mark.parametrize("name", ["unequal", "unequal_lock_step"])
def test_all_ranks_refuse_a_rollout_that_disagrees_with_the_trainer(two_ranks: Ranks, name: str) -> None:
    """In the first step rank 0 has no sample of its own, so it learns of the disagreement from rank 1."""
    assert fsdp_rank.share(0, 0, 2) == []
    refused = [(two_ranks.directory / f"{name}.{rank}.error").read_text() for rank in range(2)]
    assert refused[0] == refused[1]
    tokens = sum(len(response) for response in fsdp_rank.samples(0).responses)
    assert re.search(rf"rollout and trainer disagree by 0\.\d+ nats a token .* over {tokens} tokens; ", refused[0])
    assert two_ranks.report(name)["metrics"] == []
    assert max_difference(two_ranks.weights(name), load_model_weights(two_ranks)) == 0.0


def test_an_allowed_disagreement_changes_no_bit(two_ranks: Ranks) -> None:
    assert max_difference(two_ranks.weights("allowed"), two_ranks.weights("plain")) == 0.0


def test_every_pass_runs_recomputed_layers_twice(two_ranks: Ranks) -> None:
    """One pass for each micro-batch of rank 0, and one at the end of each step."""
    passes = STEPS + sum(len(fsdp_rank.share(step, 0, 2)) for step in range(STEPS))
    assert (two_ranks.report("plain")["calls"], two_ranks.report("recomputed")["calls"]) == (passes, 2 * passes)


def test_an_adaptive_coefficient_is_the_same_on_all_ranks_and_after_a_checkpoint(two_ranks: Ranks) -> None:
    of_ranks = [json.loads((two_ranks.directory / f"adaptive.{rank}.numbers").read_text()) for rank in range(2)]
    assert of_ranks[0] == of_ranks[1]
    coefs = [line["kl_coef"] for line in two_ranks.report("adaptive")["metrics"]]
    assert len(set(coefs)) == STEPS
    assert coefs[0] == 1e-3
    assert two_ranks.report("loaded")["metrics"] == two_ranks.report("adaptive")["metrics"][2:]
    assert json.loads((two_ranks.directory / "loaded.1.numbers").read_text()) == of_ranks[1]
    assert max_difference(two_ranks.weights("loaded"), two_ranks.weights("adaptive")) == 0.0
