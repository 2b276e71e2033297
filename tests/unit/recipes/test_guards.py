"""Guards in the configuration: tables and flags, defaults, and rules refused before a run starts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flowrt.controller.policies.guards import GuardRule
from flowrt.engines.options import TrainOptions
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.errors import ConfigError
from flowrt.launcher.run_checks import with_own_needs
from flowrt.recipes.algorithms import PRESETS
from flowrt.recipes.config import GuardConfig
from flowrt.recipes.config_io import from_toml, parse, to_toml
from flowrt.recipes.grpo import policies
from flowrt.recipes.guards import DEFAULT_RULES, guard_rules
from flowrt.recipes.metric_names import metric_names
from flowrt.recipes.resume_overrides import apply_overrides
from flowrt.roles.algorithm import algorithm
from flowrt.runtime.file_process import ask
from tests.unit.recipes.test_algorithms import run_config, small_model, step_batch

CONTROLLER_METRICS = frozenset(
    (
        *("samples", "groups", "tokens", "staleness_mean", "staleness_max", "zero_variance_groups"),
        *("zero_variance_fraction", "reward", "truncated", "filtered_groups", "refused_groups_trained"),
        *("reward_std", "reward_p10", "reward_p90", "length_mean", "length_max"),
    )
)
USER_ALGORITHM = str(Path(__file__).parents[3] / "examples" / "own_algorithm.py") + ":ShortReinforce"


@pytest.mark.parametrize("name", PRESETS)
def test_metric_names_are_those_of_a_training_step(name: str) -> None:
    config = run_config(PRESETS[name])
    objective = algorithm(config)
    trainer = TorchTrainer(small_model(), TrainOptions(), objective, temperature=1.0)
    trainer.accumulate(step_batch(config, objective))
    names = {metric for metric in trainer.step() if not metric.startswith("divergence_")}
    named = {name for name in metric_names(config) if not name.startswith("divergence_")}
    assert names == named - CONTROLLER_METRICS


def test_a_table_and_a_flag_give_the_same_rule(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[[guard]]\nmetric = "kl"\nabove = 2\nsteps = 3\naction = "hold"\nhold_steps = 7\n'
        '[[guard]]\nmetric = "truncated"\naction = "off"\n'
    )
    from_file = parse(["--config", str(tmp_path / "run.toml")])
    assert from_file.guard == (
        GuardConfig("kl", above=2.0, steps=3, action="hold", hold_steps=7),
        GuardConfig("truncated", action="off"),
    )
    flags = ["--guard", "kl above 2 steps=3 action=hold hold_steps=7", "--guard=truncated off"]
    assert parse(flags) == from_file
    assert from_toml(to_toml(from_file)) == from_file
    rules = guard_rules(from_file)
    assert rules[-1] == GuardRule("kl", above=2.0, steps=3, action="hold", hold_steps=7)
    assert "truncated" not in [rule.metric for rule in rules]
    assert policies(from_file).guards == rules


def test_flags_follow_the_file_and_off_removes_earlier_rules(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[[guard]]\nmetric = "nll"\nbelow = 0.5\n')
    file = ["--config", str(tmp_path / "run.toml")]
    of_nll = [rule for rule in guard_rules(parse(file)) if rule.metric == "nll"]
    assert [guard.below for guard in of_nll] == [0.02, 0.5]
    of_nll = [
        rule
        for rule in guard_rules(parse([*file, "--guard", "nll off", "--guard", "nll above 9"]))
        if rule.metric == "nll"
    ]
    assert of_nll == [GuardRule("nll", above=9.0, hold_steps=10)]


def test_a_limit_may_be_relative_to_a_median(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[[guard]]\nmetric = "grad_norm"\nabove = 5\nrelative = "median"\nwindow = 20\naction = "stop"\n'
    )
    from_file = parse(["--config", str(tmp_path / "run.toml")])
    assert parse(["--guard", "grad_norm above 5 relative=median window=20 action=stop"]) == from_file
    assert from_toml(to_toml(from_file)) == from_file
    assert guard_rules(from_file)[-1] == GuardRule("grad_norm", above=5.0, action="stop", hold_steps=10, median_of=20)
    default = [rule for rule in DEFAULT_RULES if rule.median_of]
    assert default == [GuardRule("grad_norm", above=20.0, median_of=50)]


def test_defaults_only_warn_and_each_can_be_switched_off() -> None:
    config = parse([])
    rules = guard_rules(config)
    of_functions = {"reward_failures/timeout"}  # metrics that the default job lacks
    assert {rule.metric for rule in DEFAULT_RULES} - {rule.metric for rule in rules} == of_functions
    assert set(rules) <= set(DEFAULT_RULES)
    assert {rule.action for rule in DEFAULT_RULES} == {"warn"}
    off = [word for rule in rules for word in ("--guard", f"{rule.metric} off")]
    assert guard_rules(parse(off)) == ()
    single_sample = ["--group-size", "1", "--algorithm", "reinforce++"]
    assert "zero_variance_fraction" not in [rule.metric for rule in guard_rules(parse(single_sample))]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--guard", "mismatch_kl above 1"], "no such metric; near it are mismatch_kl_k3, mismatch_kl_k1"),
        (["--guard", "clipped_low above 1"], "no such metric"),  # the default loss clips nothing
        (["--guard", "kl above 1", "--algorithm.kl.coef", "0"], "no such metric"),
        (["--guard", "divergence_2 above 1"], "near it are divergence_1, divergence_0"),
        (["--guard", "wall_s above 1"], "reads the clock"),
        (["--guard", "nll above 1 below=2"], "where it should not"),
        (["--guard", "nll above 1 steps=many"], "'many' is no number"),
        (["--guard", "nll above 1 relative=mean"], "takes one of none, median"),
        (["--guard", "nll above 1 window=20"], "changes nothing without relative median"),
        (["--guard", "nll above 0 relative=median"], "its limit is 0 of it; use one above 0"),
        (["--guard", "nll below -1 relative=median"], "its limit is -1 of it"),
        (["--guard", "nll above 2 relative=median window=1"], r"guard\[0\].window is 1"),
        (["--guard", "nll above 2 relative=median window=148 steps=3"], "would never fire"),
        (["--guard", "nll above 1 steps=0"], r"guard\[0\].steps is 0"),
        (["--guard", "nll above nan"], r"guard\[0\].above is nan"),
        (["--guard", "nll above 1 steps=151"], "would never fire"),
        (["--guard", "nll above 1 action=halt"], "takes one of warn, hold, stop, off"),
        (["--guard", "nll"], "is no rule"),
        (["--guard"], "is no rule"),
        (["--guard", "reward off"], "there is none before it"),
        (["--guard", "nll off", "--guard", "nll off"], "there is none before it"),
        (["--guard", "nll above 1 hold_steps=3"], "changes nothing with action warn"),
        (["--guard", "nll above 1 action=hold", "--max-staleness", "0"], "max_staleness is 0 already"),
        (["--guard", "nll above 1 action=stop", "--checkpoint.every", "0"], "saves a checkpoint"),
    ],
)
def test_rules_without_effect_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(flags)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("[guard]\nnll = 1", r"takes tables \[\[guard\]\]"),
        ("[[guard]]\nabove = 1", "has no key 'metric'"),
        ('[[guard]]\nmetric = "nll"', "neither above nor below"),
        ('[[guard]]\nmetric = "nll"\nabove = 1\nbelow = 0', "both above and below"),
        ('[[guard]]\nmetric = "nll"\nabove = "1"', r"'guard.above' takes float"),
        ('[[guard]]\nmetric = "nll"\nover = 1', "no key 'guard.over'"),
        ('[[guard]]\nmetric = "nll"\nabove = 1\naction = "off"', "leave one of them out"),
    ],
)
def test_bad_tables_are_refused(table: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(table)
    with pytest.raises(ConfigError, match=message):
        parse(["--config", str(tmp_path / "run.toml")])


def test_a_resumed_run_may_change_its_rules() -> None:
    run = dataclasses.replace(parse(["--guard", "nll above 1 action=stop"]), run_dir="/runs/one")
    resumed = apply_overrides(run, ["--guard", "nll off", "--guard", "nll above 3 action=stop"])
    assert [rule.above for rule in guard_rules(resumed) if rule.metric == "nll"] == [3.0]


@pytest.mark.slow
def test_metrics_of_a_user_algorithm_are_known_after_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, object]] = []

    def ask_once(*question: Any) -> dict[str, object]:
        """Load the algorithm, which takes seconds, for the first of two equal questions."""
        if not answers:
            answers.append(ask(*question))
        return answers[0]

    monkeypatch.setattr("flowrt.launcher.run_checks.ask", ask_once)
    flags = ["--algorithm", USER_ALGORITHM, "--guard", "loss above 5"]
    assert with_own_needs(parse(flags)).guard == (GuardConfig("loss", above=5.0),)
    with pytest.raises(ConfigError, match="no such metric"):
        with_own_needs(parse(["--algorithm", USER_ALGORITHM, "--guard", "lengths above 5"]))
