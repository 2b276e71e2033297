"""Flags of a command line: every mistake is one sentence that names the flag and what to give."""

import dataclasses
from pathlib import Path

import pytest

from flowrt.cli import main
from flowrt.errors import ConfigError
from flowrt.launcher.slurm import Site
from flowrt.recipes.config import RunConfig
from flowrt.recipes.flags import parse_flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--group-sise 4", "takes no flag --group-sise; did you mean --group-size?"),
        ("--group-sise=4", "takes no flag --group-sise; did you mean --group-size?"),
        ("--lr 0.1", "takes no flag --lr; did you mean --trainer.lr or --sft.lr?"),
        (
            "--max_new_token 4",
            "takes no flag --max_new_token; did you mean --rollout.max-new-tokens or --eval.max-new-tokens?",
        ),
        ("--eval.max_new_token 4", "takes no flag --eval.max_new_token; did you mean --eval.max-new-tokens?"),
        ("--trainer-lr 0.1", "takes no flag --trainer-lr; did you mean --trainer.lr?"),
        ("--rolout.worker 4", "takes no flag --rolout.worker; did you mean --rollout.workers?"),
        ("--wacth", "takes no flag --wacth; did you mean --watch?"),
        ("--gaurd 'lr above 1'", "takes no flag --gaurd; did you mean --guard?"),
        ("--confg x.toml", "takes no flag --confg; did you mean --config?"),
        ("--zzz", "takes no flag --zzz; flowrt run --help all lists the flags"),
        ("-x 4", "takes no flag -x; flowrt run --help all lists the flags"),
        ("arithmetic more", "takes no 'more'; flowrt run --help all lists the flags"),
        ("--steps 4 5", "takes no '5'; flowrt run --help all lists the flags"),
        ("--steps", "--steps needs a value; one that begins with - is given as --steps=VALUE"),
        ("--steps --seed 4", "--steps needs a value; one that begins with - is given as --steps=VALUE"),
        ("--steps many", "--steps takes a whole number, not 'many'"),
        ("--steps=4.5", "--steps takes a whole number, not '4.5'"),
        ("--trainer.lr fast", "--trainer.lr takes a number, not 'fast'"),
        ("--eval.temperature warm", "--eval.temperature takes a number, not 'warm'"),
        ("--deterministic perhaps", "--deterministic takes one of True, False, not 'perhaps'"),
        ("--data.overlong keep", "--data.overlong takes one of error, drop, not 'keep'"),
    ],
)
def test_a_bad_flag_of_a_run_is_one_sentence(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("flowrt: flowrt run")
    assert line.endswith(expected)


def test_a_bad_flag_of_a_site_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", str(tmp_path / "site"), "--partitoin", "gpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == "flowrt: flowrt slurm takes no flag --partitoin; did you mean --partition?"
    assert not list(tmp_path.iterdir())


def test_all_flags_and_values_that_are_wrong_are_refused_at_once() -> None:
    words = ["--group-sise", "4", "--steps", "many", "--trainer.lr", "fast", "--guard-x=1", "5", "--seed"]
    with pytest.raises(ConfigError) as refused:
        parse_flags(RunConfig(), words, "flowrt run")
    assert [sentence.partition(";")[0] for sentence in refused.value.args] == [
        "flowrt run takes no flag --group-sise",
        "flowrt run takes no flag --guard-x",
        "flowrt run takes no '5'",
        "flowrt run: --seed needs a value",
        "flowrt run: --steps takes a whole number, not 'many'",
        "flowrt run: --trainer.lr takes a number, not 'fast'",
    ]


def test_values_of_every_kind() -> None:
    words = [
        *("--steps", "7", "--trainer.lr=1e-3", "--deterministic", "True", "--run_dir", "-1", "--model=--x"),
        *("--data.overlong", "drop", "--eval.temperature", "0.5", "--eval.temperature", "None"),
        *("--rollout.stop", "a", "-", "--eval.data=a=b", "--rollout.stop=--end", "--eval.data", "c=d", "e=f"),
    ]
    parsed = parse_flags(RunConfig(), words, "flowrt run")
    assert (parsed.steps, parsed.trainer.lr, parsed.deterministic, parsed.run_dir) == (7, 1e-3, True, "-1")
    assert (parsed.model, parsed.data.overlong, parsed.eval.temperature) == ("--x", "drop", None)
    assert parsed.rollout.stop == ("a", "-", "--end")
    assert parsed.eval.data == ("a=b", "c=d", "e=f")
    assert parse_flags(parsed, ["--rollout.stop"], "flowrt run").rollout.stop == ()
    assert parse_flags(parsed, [], "flowrt run") == parsed


def test_a_word_without_a_flag_is_the_value_of_a_positional_field() -> None:
    site = parse_flags(Site(), ["here", "--nodes", "4", "--requeue", "False"], "flowrt slurm", positional="directory")
    assert site == dataclasses.replace(Site(), directory="here", nodes=4, requeue=False)
    for words in (["here", "there"], ["--directory", "here"]):
        with pytest.raises(ConfigError, match="flowrt slurm takes no"):
            parse_flags(Site(), words, "flowrt slurm", positional="directory")
