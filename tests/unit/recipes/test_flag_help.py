"""The help of commands whose flags are keys of a configuration."""

import re
from collections.abc import Sequence

import pytest

from flowrt.cli import main
from flowrt.launcher import data_check, reward_check, slurm
from flowrt.recipes import resume_overrides
from flowrt.recipes.config_io import RECIPE_NAMES, defaults
from flowrt.recipes.flag_help import COMMON, SHORT_FLAGS, topic_of

SCREEN = (80, 40)
"""Columns and lines."""
COMMANDS = {
    "run": COMMON,
    "run custom": COMMON,
    "config": COMMON,
    "resume": resume_overrides.COMMON,
    "slurm": slurm.COMMON,
    "data check": data_check.COMMON,
    "reward check": reward_check.COMMON,
}


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The help that a command prints."""
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 0
    return capsys.readouterr().out


def flags(text: str) -> list[str]:
    """The flags of a help text, the first one of each key."""
    return re.findall(r"^  --([a-z][\w.-]*),? ", text, re.MULTILINE)


def names(keys: Sequence[str]) -> list[str]:
    """The short flag of each key, without dashes in front."""
    return [SHORT_FLAGS.get(key, f"--{key}").removeprefix("--").replace("_", "-") for key in keys]


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN[0]))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_common_keys_on_one_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *command.split(), "--help")
    assert flags(text) == [*names(COMMANDS[command]), "help"]
    assert len(text.splitlines()) <= SCREEN[1]
    assert max(map(len, text.splitlines())) <= SCREEN[0]
    assert "--help all" in text


def test_help_has_the_defaults_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in RECIPE_NAMES:
        steps = f"--steps INT               Number of optimiser steps (default: {defaults(recipe).steps})"
        assert steps in shown(capsys, "run", recipe, "-h")
    assert "empty:\n                            the embedded model" in shown(capsys, "run", "--help")


@pytest.mark.parametrize("topic", ["trainer.lora", "trainer.lora.rank", "steps", "guard"])
def test_help_on_a_topic_shows_only_its_keys(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = flags(shown(capsys, "run", "--help", topic))
    assert listed
    assert all(f"{flag}.".startswith(f"{topic}.") for flag in listed)
    assert shown(capsys, "run", f"--help={topic}") == shown(capsys, "run", "-h", topic)


def test_every_section_that_help_names_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    last = " ".join(shown(capsys, "run", "--help").split()).partition("those of ")[2]
    listed = [flag for name in last.split(", ") for flag in flags(shown(capsys, "run", "--help", name))]
    everything = flags(shown(capsys, "run", "--help", "all"))
    expected = [flag for flag in everything if "." in flag or flag in ("data", "reward", "algorithm")]
    of_other_types = [flag for flag in listed if flag not in expected]
    assert sorted(listed) == sorted(expected + of_other_types)
    assert {flag.partition(".")[0] for flag in of_other_types} == {"curriculum", "dispatch"}


@pytest.mark.parametrize("command", ["run", "resume", "slurm", "data check"])
def test_an_unknown_topic_is_refused_in_one_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help", "trainr"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"flowrt {command} --help takes all, a section or a key, not 'trainr'" in line


def test_a_run_directory_may_stand_before_the_flag_of_help() -> None:
    assert topic_of(["RUN", "--help", "trainer"]) == "trainer"
    assert topic_of(["--help", "--steps", "3"]) == ""
    assert topic_of(["--steps", "3"]) is None


def test_resume_shows_a_section_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "launch.rollout" in flags(shown(capsys, "resume", "--help", "launch"))
