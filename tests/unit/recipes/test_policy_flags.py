"""Flags select the policies that they name: refresh, dispatch, batching, staleness weights, and custom rewards."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import torch

from flowrt.algorithms.advantages import GroupAdvantages
from flowrt.algorithms.objective import Objective
from flowrt.client.sample_tensors import Batch, Columns, Numbers
from flowrt.controller.events import Send
from flowrt.controller.policies.batching import SampleCount, TokenBudget
from flowrt.controller.policies.dispatch.base import Fifo
from flowrt.controller.policies.dispatch.length_aware import DecodeCost, LengthAware
from flowrt.controller.policies.weight_sync import DelayedUpdate, Divergence, EveryN, Rolling
from flowrt.controller.storage.recording_format import CoreInputs
from flowrt.engines.simulated.workload import GenerationCost, Lengths, LogNormal, TrainCost
from flowrt.errors import ConfigError
from flowrt.ids import UNSCORED
from flowrt.protocol.messages import Grant, Position
from flowrt.recipes.config_io import parse
from flowrt.recipes.grpo import core, policies
from flowrt.recipes.tasks.custom import check_given
from flowrt.rewards.check import check_rewards
from flowrt.rewards.options import RewardOptions
from flowrt.roles.engine_setup import train_engine
from flowrt.roles.trainer import to_training_batch
from flowrt.simulation.cluster import ClusterPlan, ClusterSimulation
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.scenario import Scenario


def test_only_the_custom_recipe_takes_a_reward_and_it_requires_one(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match="flowrt run custom"):
        parse(["gsm8k", "--data", str(data), "--reward", "mine.py"])
    with pytest.raises(ConfigError, match=r"--reward FUNCTION"):
        check_given(parse(["custom", "--data", str(data)]))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], False),
        (["--rollout.journal-s", "10"], True),
        (["--rollout.journal-s", "10", "--deterministic", "True"], False),  # none is continued
    ],
)
def test_the_controller_counts_on_unfinished_sequences_of_a_killed_worker_if_they_are_written_in_intervals(
    flags: list[str], expected: bool
) -> None:
    config = parse(["arithmetic", *flags])
    assert core(config, CoreInputs("", 1, Position())).settings.journals_unfinished is expected


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ([], DelayedUpdate()),
        (["--rollout.weight-sync.type", "rolling", "--rollout.weight-sync.max-concurrent", "3"], Rolling(3)),
        (["--rollout.weight-sync.type", "every_n", "--rollout.weight-sync.interval", "4"], EveryN(4)),
        (["--rollout.weight-sync.type", "divergence", "--rollout.weight-sync.max-age", "5"], Divergence(1e-3, 5)),
    ],
)
def test_the_flag_selects_the_weight_sync_policy(flags: list[str], policy: object) -> None:
    assert policies(parse(flags)).weight_sync == policy


def test_an_invalid_weight_sync_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_age is 0"):
        parse(["--rollout.weight-sync.type", "divergence", "--rollout.weight-sync.max-age", "0"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "there is no file"),
        ("mine.txt", "", "neither FILE.py:FUNCTION nor built in"),
        ("mine.py", "import nothing_of_that_name", "ModuleNotFoundError: .* while the file was loaded"),
        ("mine.py", "x = 1", "no function 'reward'"),
        ("mine.py:other", "def reward(response, answer): return 1", "no function 'other'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_reported_with_the_cause(
    tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name.partition(":")[0]).write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_rewards(RewardOptions(functions=(str(tmp_path / name),)), [b'{"answer": "7"}'], print)


@pytest.mark.parametrize(("started", "configured"), [(2, 1), (1, 2), (3, 2)])
def test_another_number_of_ranks_than_configured_is_refused(
    monkeypatch: pytest.MonkeyPatch, started: int, configured: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(started))
    config = parse(["--trainer.ranks", str(configured)])
    with pytest.raises(
        ConfigError, match=f"{started} trainer processes were started, but trainer.ranks is {configured}"
    ):
        train_engine(config)


LENGTH_AWARE = ["--dispatch.type", "length_aware"]


@pytest.mark.parametrize(
    ("flags", "dispatch"),
    [
        ([], Fifo()),
        (
            [*LENGTH_AWARE, "--dispatch.row-cost", "0.5", "--dispatch.tail-fraction", "0.1"],
            LengthAware(DecodeCost(1.0, 0.5), 128, 0.1),
        ),
    ],
)
def test_the_flag_selects_the_dispatch_policy(flags: list[str], dispatch: object) -> None:
    assert policies(parse(flags)).dispatch == dispatch


@pytest.mark.slow
def test_length_aware_dispatch_shortens_steps_depending_on_its_flags() -> None:
    """In the simulation of `test_cluster`; a tail fraction of 0 gives the same run as the default."""
    plan = ClusterPlan(
        workers=8,
        rows=32,
        groups_per_step=32,
        members=8,
        steps=5,
        lengths=Lengths(LogNormal(200, 1.0, 4000), correlation=0.85, seed=1),
        decode=GenerationCost(base_s=0.01, per_row_s=0.001),
        train=TrainCost(token_s=1e-4, optimizer_s=0.5),
        bound=0,
        prompts=32,
    )
    size = ["--prompts-per-step", "32", "--group-size", "8", *LENGTH_AWARE]
    none, cheap, costly = (
        policies(parse([*size, *flags])).dispatch
        for flags in (
            ["--dispatch.tail-fraction", "0"],
            ["--dispatch.row-cost", "0.0001"],
            ["--dispatch.row-cost", "0.1"],
        )
    )
    seconds = [
        ClusterSimulation(dataclasses.replace(plan, dispatch=policy)).run() for policy in (Fifo(), none, cheap, costly)
    ]
    assert seconds[0] == seconds[1]
    assert seconds[3] < min(seconds[0], seconds[2])


def test_a_micro_batch_is_limited_by_tokens_or_by_samples() -> None:
    assert policies(parse(["--trainer.micro-batch-tokens", "99"])).batcher == TokenBudget(99)
    by_samples = policies(parse(["--trainer.micro-batch-samples", "4"])).batcher
    assert by_samples == SampleCount(4)
    scenario = Scenario(groups_per_step=6, members=2, batcher=by_samples)
    runs = [
        SimulatedCluster(config).run() for config in (scenario, dataclasses.replace(scenario, batcher=TokenBudget(1)))
    ]
    sizes = [[size for command in run.log if (size := _trained_samples(command))] for run in runs]
    assert min(sizes[1]) == 2
    assert min(sizes[0]) == 4
    assert sum(sizes[0]) == sum(sizes[1])


def _trained_samples(command: object) -> int:
    """Samples of a micro-batch that the controller grants; 0 for all other commands."""
    if not isinstance(command, Send) or not isinstance(command.message, Grant):
        return 0
    return len(command.message.slots) if command.worker.startswith("trainer") else 0


def pulled(rewards: list[float], unscored: list[float], groups: tuple[int, ...]) -> Batch:
    """A batch of the train stage, of samples with one token each."""
    rows = len(rewards)
    zeros, numbers = (0,) * rows, tuple(range(rows))
    grant = Grant(
        *(1, 1, numbers, ("train",), groups, numbers, groups, zeros, zeros, ((0, 1),) * rows),
        *((), (), (), False),
    )
    tensors = {
        "prompt": [torch.ones(1, dtype=torch.int32)] * rows,
        "response": [torch.full((1,), row, dtype=torch.int32) for row in range(rows)],
        "logprobs": [torch.zeros(1)] * rows,
    }
    inline = {"reward": rewards, "truncated": [0.0] * rows, UNSCORED: unscored}
    return Batch(grant, Columns(tensors), Numbers(inline))


@pytest.mark.parametrize("scope", ["group", "step"])
def test_samples_to_which_no_reward_function_applies_are_neither_trained_nor_in_the_baseline(scope: str) -> None:
    """Of the second group one sample is left, which has no other to be compared with, and none of the third."""
    unscored = [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    batch = pulled([1.0, 0.0, 3.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0], unscored, (0,) * 3 + (1,) * 3 + (2,) * 3)
    objective = Objective(credit_rule=GroupAdvantages(scale="none", whiten=scope == "step"))
    flags = ["custom", "--reward", "exact", "--group-size", "3"]
    joined = to_training_batch(batch, parse(flags), 0, objective)
    assert [int(response) for response in joined.responses] == [0, 2]
    assert joined.groups_N.tolist() == [0, 0]
    if scope == "group":
        assert joined.advantages_N.tolist() == [-1.0, 1.0]
    else:
        assert joined.credit is not None
        assert joined.credit.rewards_N.tolist() == [1.0, 3.0]
    nothing = pulled([0.0, 0.0], [1.0, 1.0], (0, 0))
    assert to_training_batch(nothing, parse(flags), 0, objective).responses == []


class _PulledBatch:
    """The part of a batch that `to_training_batch` reads: two samples, of staleness 0 and 3 in step 3."""

    inline: Mapping[str, list[float]] = {"reward": [0.0, 1.0], "truncated": [0.0, 1.0]}
    groups = (0, 0)
    tensors: Mapping[str, list[torch.Tensor]] = {
        "prompt": [torch.ones(1, dtype=torch.int32)] * 2,
        "response": [torch.ones(2, dtype=torch.int32)] * 2,
        "logprobs": [torch.zeros(2)] * 2,
    }

    def __len__(self) -> int:
        return 2

    def oldest_version(self, row: int) -> int:
        return 3 - 3 * row

    def versions(self, row: int) -> torch.Tensor:
        return torch.full((2,), self.oldest_version(row))


@pytest.mark.parametrize(
    ("flags", "weights"),
    [
        ([], [1.0, 1.0]),
        (["--algorithm.staleness-weight", "polynomial"], [1.0, 0.5]),
        (["--algorithm.staleness-weight", "polynomial", "--algorithm.staleness-power", "1"], [1.0, 0.25]),
        (["--algorithm.staleness-weight", "polynomial", "--algorithm.staleness-power", "0"], [1.0, 1.0]),
    ],
)
def test_the_flags_set_the_weight_of_a_stale_sample(flags: list[str], weights: list[float]) -> None:
    batch = to_training_batch(cast(Batch, _PulledBatch()), parse(flags), 3, Objective())
    assert batch.weights_N.tolist() == weights
