"""Tables with types: the key ``type`` picks the keys, in flags and in files, and a key of another type is refused."""

import dataclasses
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from flowrt.cli import main
from flowrt.errors import ConfigError
from flowrt.recipes.algorithm_config import AlgorithmConfig
from flowrt.recipes.config import RolloutConfig, RunConfig
from flowrt.recipes.config_io import defaults, from_toml, parse, to_toml
from flowrt.recipes.flag_help import meanings
from flowrt.recipes.resume_overrides import apply_overrides
from flowrt.recipes.tables import leaves, merge, variants, with_type

UNIONS = {
    "algorithm.loss": get_type_hints(AlgorithmConfig)["loss"],
    "dispatch": get_type_hints(RunConfig)["dispatch"],
    "curriculum": get_type_hints(RunConfig)["curriculum"],
    "rollout.weight_sync": get_type_hints(RolloutConfig)["weight_sync"],
}
WITH_LOSS = {"reinforce": "reinforce", "cross_entropy": "best_of_n", "dpo": "dpo_online"}
"""Presets whose other tables fit a loss; those of grpo fit the others."""
KINDS = [(table, name, kind) for table, union in UNIONS.items() for name, kind in variants(union).items()]


def test_the_tables_with_types_are_these() -> None:
    assert {name.removesuffix(".type") for name, _ in leaves(RunConfig) if name.endswith(".type")} == set(UNIONS)


@pytest.mark.parametrize(("table", "name", "kind"), KINDS)
def test_every_type_is_a_flag_and_survives_a_file(table: str, name: str, kind: type[Any]) -> None:
    preset = ["--algorithm", WITH_LOSS.get(name, "grpo")] if table == "algorithm.loss" else []
    config = parse([*preset, f"--{table.replace('_', '-')}.type", name])
    chosen = attrgetter(table)(config)
    assert type(chosen) is kind
    assert dataclasses.fields(kind)[0].name == "type"
    assert chosen.type == name
    assert from_toml(to_toml(config)) == config
    assert set(meanings(kind)) >= {field.name for field in dataclasses.fields(kind)} - {"type"}


@pytest.mark.parametrize(
    "words",
    ["--dispatch.type length_aware --dispatch.row-cost 0.5", "--dispatch.row-cost=0.5 --dispatch.type=length_aware"],
)
def test_flags_of_a_type_may_stand_in_any_order(words: str) -> None:
    dispatch = parse(words.split()).dispatch
    assert dataclasses.asdict(dispatch) == {"type": "length_aware", "tail_fraction": 0.2, "row_cost": 0.5}


def test_without_a_type_the_present_one_stays_and_another_one_has_its_own_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[rollout.weight_sync]\ntype = "divergence"\nthreshold = 0.5\n')
    kept = parse(["--config", str(file), "--rollout.weight-sync.max-age", "7"]).rollout.weight_sync
    assert dataclasses.asdict(kept) == {"type": "divergence", "threshold": 0.5, "max_age": 7}
    other = parse(["--config", str(file), "--rollout.weight-sync.type", "every_n"]).rollout.weight_sync
    assert dataclasses.asdict(other) == {"type": "every_n", "interval": 2}
    back = merge(defaults("arithmetic"), {"dispatch": {"type": "fifo"}}, "test")
    assert back == defaults("arithmetic")


@dataclasses.dataclass(frozen=True)
class Outline:
    type: str
    size: float = 1.0


@dataclasses.dataclass(frozen=True)
class Square(Outline):
    type: str = "square"
    turn: float = 0.0


@dataclasses.dataclass(frozen=True)
class Circle(Outline):
    type: str = "circle"
    turn: float = 5.0


@dataclasses.dataclass(frozen=True)
class Dot(Outline):
    type: str = "dot"
    size: float = 0.0


def test_another_type_keeps_the_keys_that_both_inherit_and_no_others() -> None:
    assert with_type(Square(size=3.0, turn=2.0), Circle) == Circle(size=3.0)
    assert with_type(Square(size=3.0), Dot) == Dot()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--dispatch.tail-fraction 0.1",
            "flowrt run: --dispatch.tail-fraction is of type length_aware, and the type is fifo; set --dispatch.type "
            "to length_aware, or leave it out",
        ),
        (
            "--rollout.weight-sync.type rolling --rollout.weight-sync.max-age 2",
            "--rollout.weight-sync.max-age is of type divergence, and the type is rolling; set "
            "--rollout.weight-sync.type to divergence, or leave it out",
        ),
        ("--dispatch.policy length_aware", "flowrt run: --dispatch.policy is called --dispatch.type"),
        ("--curriculum.type solve", "--curriculum.type takes one of uniform, solve_rate, not 'solve'"),
        ("--curriculum.flor 1", "takes no flag --curriculum.flor; did you mean --curriculum.floor?"),
        ("--rollout.weight-sync divergence", "takes no flag --rollout.weight-sync; did you mean"),
    ],
)
def test_a_flag_of_another_type_is_refused_in_one_sentence(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"row_cost": 1.0}, "'dispatch.row_cost' is of type length_aware, and the type is fifo; set 'dispatch.type'"),
        ({"policy": "length_aware"}, "'dispatch.policy' is called 'dispatch.type'"),
        ({"type": "lifo"}, "'dispatch.type' takes one of fifo, length_aware, not 'lifo'"),
        ({"type": ["fifo"]}, "'dispatch.type' takes one of fifo, length_aware, not ['fifo']"),
        ({"row_cots": 1.0}, "there is no key 'dispatch.row_cots'; did you mean 'row_cost'"),
        ("fifo", "'dispatch' is a table of keys, not 'fifo'"),
    ],
)
def test_a_key_of_another_type_in_a_file_is_refused(table: object, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        merge(defaults("arithmetic"), {"dispatch": table}, "run.toml")
    assert str(refused.value).startswith("run.toml: ")
    assert message in str(refused.value)


def test_a_resumed_run_keeps_its_types() -> None:
    run = parse(["--run-dir", "/runs/a", "--dispatch.type", "length_aware"])
    assert apply_overrides(run, ["--dispatch.type", "length_aware"]) == run
    with pytest.raises(ConfigError, match=r"^dispatch\.type is 'length_aware' in /runs/a, and stays that"):
        apply_overrides(run, ["--dispatch.type", "fifo"])


def test_help_shows_the_types_and_the_keys_of_the_present_one(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        with pytest.raises(SystemExit):
            parse(words)
        return " ".join(capsys.readouterr().out.split())

    types = (
        "--rollout.weight-sync.type {immediate, rolling, every_n, divergence} Type immediate: every version; rolling"
    )
    for topic in ("rollout", "rollout.weight_sync", "rollout.weight_sync.type", "all"):
        assert types in shown("--help", topic)
    assert "max-age" not in shown("--help", "rollout")
    assert "max-age" in shown("--help", "rollout.weight_sync")
    assert "max-age" in shown("--help", "rollout.weight_sync.max_age")


def test_all_keys_of_a_file_that_are_wrong_are_refused_at_once() -> None:
    table = {"stepz": 1, "seed": "one", "trainer": {"learning_rate": 1.0, "lr": "fast"}, "dispatch": {"type": "lifo"}}
    with pytest.raises(ConfigError) as refused:
        merge(RunConfig(), table, "run.toml")
    assert [sentence.partition(";")[0] for sentence in refused.value.args] == [
        "run.toml: there is no key 'stepz'",
        "run.toml: 'seed' takes int, not str 'one'",
        "run.toml: there is no key 'trainer.learning_rate'",
        "run.toml: 'trainer.lr' takes float, not str 'fast'",
        "run.toml: 'dispatch.type' takes one of fifo, length_aware, not 'lifo'",
    ]
