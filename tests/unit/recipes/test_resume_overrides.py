"""Overrides of a resumed run: placement and number of processes may change, fields that change results may not."""

import dataclasses
from operator import attrgetter
from pathlib import Path

import pytest

from flowrt.cli import main
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import defaults, from_file, parse, to_toml
from flowrt.recipes.resume_overrides import FREE, apply_overrides
from flowrt.recipes.tasks.task_file import digest

RUN = dataclasses.replace(defaults("arithmetic"), run_dir="/runs/one")


def test_no_override_keeps_the_configuration() -> None:
    assert apply_overrides(RUN, []) == RUN


def test_ranks_hosts_and_workers_can_be_overridden() -> None:
    launch_flags = ["--launch.trainer", "srun --ntasks=2", "--controller.bind", "tcp://*:0"]
    overridden = apply_overrides(
        RUN, ["--trainer.ranks", "4", "--trainer.nodes", "2", "--rollout.workers", "7", *launch_flags]
    )
    assert (overridden.trainer.ranks, overridden.trainer.nodes, overridden.rollout.workers) == (4, 2, 7)
    assert (overridden.launch.trainer, overridden.controller.bind) == ("srun --ntasks=2", "tcp://*:0")
    back = ["--trainer.ranks", "1", "--trainer.nodes", "1", "--rollout.workers", str(RUN.rollout.workers)]
    assert apply_overrides(overridden, [*back, "--launch.trainer", "", "--controller.bind", RUN.controller.bind]) == RUN


def test_values_may_start_with_dashes() -> None:
    assert apply_overrides(RUN, ["--launch.rollout=--ntasks 2"]).launch.rollout == "--ntasks 2"


def test_the_path_of_the_keys_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert apply_overrides(RUN, ["--controller.keys", "mine"]).controller.keys == str(tmp_path / "mine")


@pytest.mark.parametrize("name", FREE)
def test_every_overridable_field_exists(name: str) -> None:
    attrgetter(name)(RUN)


@pytest.mark.parametrize(
    "flag",
    [
        ("seed", "3"),
        ("max-staleness", "4"),
        ("prompts-per-step", "3"),
        ("run-dir", "/elsewhere"),
        ("trainer.lr", "1"),
        ("trainer.engine", "fsdp"),
        ("trainer.tokens-per-step", "900"),
        ("trainer.fsdp.dtype", "bfloat16"),
        ("rollout.temperature", "0.5"),
        ("rollout.engine", "sglang"),
        ("algorithm.kl.coef", "0"),
        ("data.path", "/others.jsonl"),
    ],
)
def test_overriding_a_field_that_changes_results_is_refused(flag: tuple[str, str]) -> None:
    name = flag[0].replace("-", "_")
    with pytest.raises(ConfigError, match=rf"^{name} is .* in /runs/one, and stays that .*flowrt resume --help all"):
        apply_overrides(RUN, [f"--{flag[0]}", flag[1]])


def test_invalid_overrides_are_refused_as_in_a_new_run() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.ranks is 3, which trainer\.nodes \(2\) does not divide"):
        apply_overrides(RUN, ["--trainer.ranks", "3", "--trainer.nodes", "2", "--launch.trainer", "srun"])


@pytest.mark.parametrize("flags", [["--steps", "many"], ["--stops=3"], ["--trainer.ranks"]])
def test_bad_flags_leave_the_configuration_unchanged(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(RUN))
    assert main(["resume", str(tmp_path), *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert flags[0].split("=")[0] in line
    assert from_file(tmp_path / "config.toml") == RUN


def test_another_seed_is_refused_and_leaves_the_configuration_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(RUN))
    assert main(["resume", "--seed", "3", str(tmp_path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flowrt: seed is 0 in {tmp_path}, and stays that")
    assert from_file(tmp_path / "config.toml") == RUN


def test_an_empty_run_configuration_is_reported_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"config file \S+/config\.toml has no key 'recipe': it is empty or damaged"):
        from_file(tmp_path / "config.toml")


@pytest.mark.slow
def test_the_digest_of_a_task_file_is_checked_for_a_complete_run_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text((Path(__file__).parents[3] / "examples" / "own_task.py").read_text())
    now = digest(str(file))
    config = dataclasses.replace(parse([str(file)]), recipe_sha256=now, steps=4)
    (tmp_path / "config.toml").write_text(to_toml(config))
    (tmp_path / "summary.json").write_text('{"exit_code": 0, "reason": "", "steps": 4}')
    assert main(["resume", str(tmp_path), "--recipe-sha256", now]) == 0
    assert "is complete: 4 steps" in capsys.readouterr().out
    assert main(["resume", str(tmp_path), "--recipe-sha256", "0" * 64]) == 2
    captured = capsys.readouterr()
    assert captured.err.rstrip().endswith(f"--recipe-sha256 {now}")
    assert not captured.out
