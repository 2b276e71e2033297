"""Algorithm presets: all are accepted; every field of the table changes the trained weights or is refused."""

import dataclasses
import functools
import re
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from flowrt.algorithms.algorithm import Algorithm, Groups
from flowrt.engines.base import TrainingBatch
from flowrt.engines.options import TrainOptions
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.errors import ConfigError
from flowrt.recipes.acting import idle_keys
from flowrt.recipes.algorithm_config import (
    AlgorithmConfig,
    AspoLoss,
    CispoLoss,
    DpoLoss,
    DppoLoss,
    Loss,
    PpoLoss,
    SatLoss,
)
from flowrt.recipes.algorithms import PRESETS, name_and_changes, needs_reference
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import from_toml, parse, to_toml
from flowrt.recipes.constraints import check
from flowrt.recipes.grpo import dataflow
from flowrt.recipes.metric_names import OF_LOSS
from flowrt.recipes.tables import bare, leaves, merge, variants
from flowrt.roles.algorithm import POLICY_LOSSES, algorithm
from flowrt.roles.trainer import sample_weight

GROUPS, SIZE, LIMIT = 4, 4, 12
ALTERNATIVES: dict[str, tuple[Any, ...]] = {
    "advantage.eps": (0.5,),
    "advantage.keep_best": (2, 1),
    "advantage.keep_above": (0.7,),
    "advantage.overlong_tokens": (8,),
    "loss.clip_low": (0.05, 1e-5),
    "loss.clip_high": (0.05, 1e-5),
    "loss.dual_clip": (1.01, 1.3),
    "loss.delta": (1.25,),
    "loss.limit": (0.01,),
    "loss.max_ratio": (1.01,),
    "loss.quantile": (0.2, 0.05),
    "loss.cap": (0.5,),
    "loss.nll_coef": (0.5,),
    "plan.updates": (2, 3),
    "plan.epochs": (2, 3),
    "correction.low": (0.99,),
    "correction.high": (1.01,),
    "correction.reject_low": (0.999,),
    "correction.reject_high": (1.001,),
    "correction.reject_negative_kl": (1e-4,),
    "correction.reject_binary_kl": (1e-3,),
    "correction.second_moment": (0.01,),
    "kl.coef": (0.5,),
    "kl.target": (0.1,),
    "entropy.coef": (0.1,),
    "entropy.top_share": (0.3,),
    "staleness_power": (2.0,),
}
BASES: dict[str, dict[str, Any]] = {
    "loss.distance": {"loss": DppoLoss(limit=0.02)},
    "advantage.keep_above": {"advantage.keep_best": 3},
    "kl.horizon": {"kl.coef": 0.5, "kl.target": 0.1},
    "staleness_power": {"staleness_weight": "polynomial"},
    "plan.anchor": {"loss": PpoLoss(), "plan.anchor": "rollout", "correction.level": "off", "plan.updates": 2},
}
"""Further settings under which a field has an effect, where it has none in any preset."""


FIELDS = {name: bare(hint) for name, hint in leaves(AlgorithmConfig)}
"""The types of all fields, by their dotted names."""


def with_field(table: AlgorithmConfig, name: str, value: object) -> AlgorithmConfig:
    for key in reversed(name.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return merge(table, value, "test")


usual = functools.cache(lambda: parse([]))


def run_config(table: AlgorithmConfig) -> RunConfig:
    base = usual()
    rollout = dataclasses.replace(base.rollout, max_new_tokens=LIMIT)
    return dataclasses.replace(base, algorithm=table, group_size=SIZE, rollout=rollout)


def idle_fields(table: AlgorithmConfig) -> set[str]:
    """The fields of the table that do not act."""
    return {key.name.removeprefix("algorithm.") for key, _ in idle_keys(run_config(table))}


def small_model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=13, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).double()


def step_groups() -> tuple[Groups, list[torch.Tensor]]:
    """Groups with equal and with different rewards; responses of many lengths, some of them truncated."""
    torch.manual_seed(2)
    lengths = torch.randint(1, LIMIT + 1, (GROUPS * SIZE,))
    lengths[:3] = LIMIT
    return (
        Groups(
            rewards_N=torch.rand(GROUPS * SIZE).round(decimals=1).double(),
            group_N=torch.arange(GROUPS).repeat_interleave(SIZE),
            lengths_N=lengths,
            truncated_N=lengths == LIMIT,
            staleness_N=torch.arange(GROUPS * SIZE) % 3,
            kl_N=torch.randn(GROUPS * SIZE).double(),
        ),
        [torch.randint(0, 13, (int(length),), dtype=torch.int32) for length in lengths],
    )


FROM_SECOND_STEP = ("kl.target", "kl.horizon")
"""Fields that change nothing in the first step of a run."""


def trained_weights(config: RunConfig, steps: int = 1) -> torch.Tensor:
    """All weights after N steps of the torch engine with the objective of a configuration."""
    objective = algorithm(config)
    trainer = TorchTrainer(
        small_model(), TrainOptions(lr=1e-2, warmup_steps=1, max_grad_norm=1e9), objective, temperature=1.0
    )
    for _ in range(steps):
        trainer.accumulate(step_batch(config, objective))
        assert trainer.step()
    return torch.cat([tensor.detach().reshape(-1) for tensor in trainer.parameters().values()])


def step_batch(config: RunConfig, objective: Algorithm) -> TrainingBatch:
    groups, responses = step_groups()
    torch.manual_seed(3)
    rollout = [-2.5 + 0.4 * torch.randn(len(response)) for response in responses]
    reference = [-2.5 + 0.4 * torch.randn(len(response)) for response in responses]
    is_step = objective.needs.scope == "step"
    advantages_N, trained_N = torch.zeros(len(groups)), torch.ones(len(groups), dtype=torch.bool)
    if not is_step:
        credit = objective.credit(groups)
        advantages_N, trained_N = credit.advantages_N, credit.trained_N
    rows = trained_N.nonzero().flatten().tolist()
    return TrainingBatch(
        prompts=[torch.arange(3, dtype=torch.int32) for _ in rows],
        responses=[responses[row] for row in rows],
        rollout_logprobs=[rollout[row] for row in rows],
        reference_logprobs=[reference[row] for row in rows] if objective.needs.reference else None,
        advantages_N=advantages_N[rows],
        weights_N=sample_weight(config.algorithm)(groups.staleness_N)[rows],
        groups_N=groups.group_N[rows],
        credit=groups if is_step else None,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_accepted_and_trains(name: str) -> None:
    config = parse(["--algorithm", name])
    assert config.algorithm == PRESETS[name]
    assert from_toml(to_toml(config)) == config
    assert needs_reference(config.algorithm) == ("reference" in [stage.name for stage in dataflow(config).stages])
    assert needs_reference(config.algorithm) == algorithm(config).needs.reference
    weights = trained_weights(run_config(config.algorithm))
    assert bool(weights.isfinite().all())
    assert not torch.equal(
        weights, torch.cat([parameter.detach().reshape(-1) for parameter in small_model().parameters()])
    )


def test_every_type_of_loss_can_be_built_and_has_its_metrics() -> None:
    assert set(OF_LOSS) == {DpoLoss.type, *POLICY_LOSSES} == set(variants(Loss))


@pytest.mark.slow
def test_presets_differ() -> None:
    """No two presets train the same weights from the same batch."""
    weights = {name: trained_weights(run_config(table)) for name, table in PRESETS.items()}
    same = [(a, b) for a in weights for b in weights if a < b and torch.equal(weights[a], weights[b])]
    assert not same


def alternatives(name: str, kind: Any, value: Any) -> tuple[Any, ...]:
    if name in ALTERNATIVES:
        return ALTERNATIVES[name]
    if get_origin(kind) is Literal:
        return tuple(other for other in get_args(kind) if other != value)
    if kind is int:
        return value * 2, value // 2
    return (not value,) if kind is bool else (value * 2.0, value / 2.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), FIELDS.items())
def test_every_field_changes_the_trained_weights(name: str, kind: Any) -> None:
    """In some preset or combination in which the field has an effect, another value gives other weights."""
    if name in ("name", "own_reference") or name.startswith("filter."):
        pytest.skip("test_presets_differ, test_algorithm_runs, and for filters test_group_filter")
    tried = []
    for preset in PRESETS.values():
        base = changed(preset, BASES.get(name, {}))
        table, _, key = name.rpartition(".")
        if name in idle_fields(base) or not hasattr(attrgetter(table)(base) if table else base, key):
            continue
        for other in alternatives(name, kind, attrgetter(name)(base)):
            pair = run_config(base), run_config(with_field(base, name, other))
            try:
                for variant in pair:
                    check(variant)
            except ConfigError:
                continue
            tried.append((preset.name, other))
            steps = 2 if name in FROM_SECOND_STEP else 1
            if not torch.equal(trained_weights(pair[0], steps), trained_weights(pair[1], steps)):
                return
    pytest.fail(f"algorithm.{name} changed nothing in {tried}")


@pytest.mark.parametrize(
    ("preset", "name", "kind"),
    [
        (preset, name, kind)
        for preset in ("reinforce", "gspo", "dpo_online", "best_of_n", "decoupled")
        for name, kind in FIELDS.items()
        if name in idle_fields(PRESETS[preset])
    ],
)
def test_a_field_without_effect_is_refused(preset: str, name: str, kind: Any) -> None:
    table = PRESETS[preset]
    other = alternatives(name, kind, attrgetter(name)(table))[0]
    with pytest.raises(ConfigError, match=r"algorithm\.") as refused:
        check(run_config(changed(table, {name: other})))
    assert name.rpartition(".")[2] in str(refused.value)


def test_the_line_of_a_run_names_what_differs_from_the_preset() -> None:
    for name, table in PRESETS.items():
        assert name_and_changes(table) == name
    changes = ["--algorithm", "dapo", "--algorithm.loss.clip-high", "0.3", "--algorithm.kl.coef", "0.01"]
    assert name_and_changes(parse(changes).algorithm) == "dapo, with loss.clip_high 0.3, kl.coef 0.01"
    dppo = ["--algorithm", "dapo", "--algorithm.loss.type", "dppo", "--algorithm.loss.limit", "0.1"]
    other = "dapo, with loss.type dppo, loss.distance tv, loss.limit 0.1, loss.max_ratio 20.0"
    assert name_and_changes(parse(dppo).algorithm) == other
    assert name_and_changes(AlgorithmConfig(name="mine.py:Mine")) == "mine.py:Mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--algorithm", "dapoo"], "did you mean 'dapo'"),
        (["--algorithm", "gspo", "--algorithm.plan.anchor", "present"], "every ratio is 1"),
        (["--algorithm", "grpo", "--algorithm.correction.level", "token"], "count twice"),
        (
            ["--algorithm", "grpo", "--algorithm.loss.limit", "0.1"],
            "--algorithm.loss.limit is of type dppo, and the type is ppo (of --algorithm grpo); set "
            "--algorithm.loss.type to dppo, or leave it out",
        ),
        (
            ["--algorithm", "grpo", "--algorithm.loss.type", "sat", "--algorithm.loss.delta", "3"],
            "--algorithm.loss.delta is of type ppo, and the type is sat; set",
        ),
        (
            ["--algorithm", "mine.py:Mine", "--algorithm.loss.type", "ppo"],
            "algorithm.loss.type is ppo, which changes nothing: algorithm mine.py:Mine has no such parameter",
        ),
        (["--algorithm.loss.policy", "ppo"], "--algorithm.loss.policy is called --algorithm.loss.type"),
        (["--algorithm", "grpo", "--algorithm.loss.delta", "1.1"], "within the clip range; use more than 1.2"),
        (["--algorithm.plan.updates", "4"], "anchor present"),
        (["--algorithm", "decoupled", "--algorithm.plan.updates", "1"], "with one update a step"),
        (["--algorithm", "grpo", "--algorithm.loss.clip-low", "1.5"], "use 0 or more, and at most 1"),
        (["--algorithm", "grpo", "--algorithm.loss.dual-clip", "0.5"], "use a value above 1"),
        (["--algorithm", "m2po", "--trainer.tokens-per-step", "100"], "trainer.tokens_per_step"),
        (["--algorithm", "gspo", "--trainer.tokens-per-step", "100"], "weighs whole samples"),
        (["--algorithm", "best_of_n", "--trainer.tokens-per-step", "100"], "keep_best leaves samples out of training"),
        (
            ["--algorithm.advantage.mask-truncated", "True", "--trainer.tokens-per-step", "100"],
            "mask_truncated leaves samples out of training",
        ),
        (["--algorithm.advantage.overlong-tokens", "17"], "more than a response can have"),
        (["--algorithm", "best_of_n", "--algorithm.advantage.keep-best", "9"], "keep fewer"),
        (["--algorithm", "flash_reinforce", "--trainer.tokens-per-step", "100"], "trainer.tokens_per_step"),
        (["--algorithm.correction.reject-high", "2", "--trainer.tokens-per-step", "100"], "weighs whole samples"),
        (["--algorithm", "dpo_online", "--group-size", "1"], "compares two samples"),
        (["--algorithm", "reinforce++", "--group-size", "1", "--prompts-per-step", "1"], "use more prompts a step"),
        (["--algorithm", "flash_reinforce", "--group-size", "1", "--prompts-per-step", "1"], "use more prompts a step"),
        (["--algorithm", "lite_ppo", "--group-size", "1"], "compares the samples of a group"),
    ],
)
def test_contradictory_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(flags)
    assert message in str(refused.value)


def test_the_commands_of_the_page_on_objectives_are_accepted() -> None:
    page = Path(__file__).parents[3] / "docs" / "objectives.md"
    commands = re.findall(r"^flowrt run ([^#\n]*)", page.read_text(), re.MULTILINE)
    assert len(commands) > 5
    for command in commands:
        if ".py:" not in command:
            parse(command.split())


def test_flags_override_the_file_which_overrides_the_preset(tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[algorithm]\nname = "dapo"\n[algorithm.loss]\nclip_low = 0.1\nclip_high = 0.4\n')
    table = parse(["--config", str(path), "--algorithm.loss.clip-high", "0.3"]).algorithm
    assert (table.name, table.loss) == ("dapo", PpoLoss(clip_low=0.1, clip_high=0.3))
    assert table.plan == PRESETS["dapo"].plan
    named = parse(["--config", str(path), "--algorithm", "grpo"]).algorithm
    assert (named.name, named.loss) == ("grpo", PpoLoss("ppo", "sequence_mean", clip_low=0.1, clip_high=0.4))


def test_another_loss_keeps_the_aggregation_of_the_preset_and_the_clip_range_of_losses_like_ppo(tmp_path: Any) -> None:
    words = ["--algorithm", "dapo", "--algorithm.loss.aggregation", "sequence_mean"]
    dppo = parse([*words, "--algorithm.loss.limit", "0.1", "--algorithm.loss.type", "dppo"]).algorithm.loss
    assert dppo == DppoLoss(aggregation="sequence_mean", limit=0.1)
    assert parse([*words, "--algorithm.loss.type", "sat"]).algorithm.loss == SatLoss("sat", "sequence_mean", 0.2, 0.28)
    assert parse([*words, "--algorithm.loss.type", "cispo"]).algorithm.loss == CispoLoss(aggregation="sequence_mean")
    path = tmp_path / "run.toml"
    path.write_text('[algorithm]\nname = "grpo"\n[algorithm.loss]\ntype = "aspo"\n')
    assert parse(["--config", str(path)]).algorithm.loss == AspoLoss(aggregation="sequence_mean")
    assert parse(["--config", str(path), "--algorithm.loss.type", "ppo"]).algorithm == PRESETS["grpo"]


def test_the_bounds_of_a_loss_that_are_not_given_are_in_no_file() -> None:
    config = parse(["--algorithm", "grpo", "--algorithm.loss.delta", "4", "--algorithm.loss.delta", "None"])
    assert "delta" not in to_toml(config)
    bounded = parse(["--algorithm", "grpo", "--algorithm.loss.delta", "4"])
    assert from_toml(to_toml(bounded)) == bounded != config == from_toml(to_toml(config))
