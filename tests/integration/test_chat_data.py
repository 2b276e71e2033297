"""A user's own task with a chat model: `flowrt data check`, columns for the reward by name, and a whole run."""

import dataclasses
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common.chat_models import FAMILIES, chat_tokenizer

from flowrt.cli import main
from flowrt.engines.hf import save_model
from flowrt.engines.tiny_model import build_model
from flowrt.errors import ConfigError
from flowrt.recipes.config import DataConfig
from flowrt.rewards.check import check_rewards
from flowrt.rewards.options import RewardOptions

REWARD = """
def reward(response, answer, prompt, level, *, bonus=0.0):
    assert prompt[-1]["role"] == "user" and answer == {"sum": level + 1}, (prompt, answer, level)
    return response.count("e") / 8 + bonus
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model whose generation_config.json does not name the end of turn."""
    torch.set_num_threads(1)
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    made = build_model(
        vocab_size=len(tokenizer), hidden_size=32, layers=1, heads=2, intermediate_size=32, max_length=512, seed=0
    )
    made.config.eos_token_id = made.generation_config.eos_token_id = tokenizer.eos_token_id
    path = tmp_path_factory.mktemp("chat") / "model"
    save_model(made, tokenizer, path)
    return path


def conversation(n: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": {"sum": n + 1}, "level": n}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(conversation(n)) + "\n" for n in range(40)))
    return path


def checked(capsys: pytest.CaptureFixture[str], model: Path, data: Path, *flags: str) -> tuple[int, str]:
    code = main(["data", "check", "--model", str(model), "--data", str(data), "--data.eval-prompts", "8", *flags])
    ended = capsys.readouterr()
    return code, ended.out + ended.err


def test_data_check_prints_what_a_run_would_make_of_it(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path
) -> None:
    code, said = checked(capsys, model, data, "--show", "1")
    assert code == 0, said
    assert "rows          40: 32 to train on, 8 held out" in said
    assert "template      of the checkpoint" in said
    assert "longest" in said
    assert "'<|im_end|>'" in said
    assert "template's end of turn alone" in said
    assert r"text '<|im_start|>user\n0 + 1?<|im_end|>\n<|im_start|>assistant\n'" in said
    ids = next(line for line in said.splitlines() if line.startswith("ids  "))
    assert all(word.isdecimal() for word in ids.split()[1:])


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        (
            [{"prompt": "text", "answer": "1"}] * 9,
            (),
            "line 1: the prompt is plain text, and the checkpoint has a chat",
        ),
        ([conversation(n) for n in range(9)], ("--data.max-prompt-tokens", "3"), "9 prompts over 3 tokens, refused"),
        ([conversation(n) for n in range(9)], ("--rollout.max-new-tokens", "506"), "9 prompts over 6 tokens, refused"),
        (
            [conversation(n % 8) for n in range(16)],
            (),
            "8 training rows have a held-out prompt, refused by a run; first",
        ),
        ([{"prompt": n, "answer": "1"} for n in range(30)], (), "at least 10 mistakes in the data: data file"),
        ([conversation(1)] * 3, (), "has 3 rows, no more than data.eval_prompts=8"),
    ],
)
def test_data_check_refuses_what_a_run_would_refuse(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, rows: list[Any], flags: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = checked(capsys, model, path, "--rollout.max-new-tokens", "16", *flags)
    assert code == 2, output
    assert said in " ".join(output.split())


def test_data_check_of_several_sets(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path, tmp_path: Path
) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text("".join(json.dumps(conversation(n)) + "\n" for n in [39, *range(100, 120)]))
    sets = ["--data", f"plus={data}:0.75", "--data", f"more={more}:0.25"]
    command = ["data", "check", "--model", str(model), *sets, "--data.eval-prompts", "8"]
    code = main(command)
    said = capsys.readouterr().out
    assert code == 2, said
    assert "rows plus     40: 34 to train on, 6 held out, 0.75 of the prompts" in said
    assert "rows more     21: 19 to train on, 2 held out, 0.25 of the prompts" in said
    assert f"1 training rows have a held-out prompt, refused by a run; first: data file {more}, line 1" in said
    assert main([*command, "--data.allow-overlap", "True", "--show", "35"]) == 0
    assert f"data file {more}, line 1\nids" in capsys.readouterr().out  # the 35th prompt to train on


def test_data_check_counts_rows_that_are_left_out(capsys: pytest.CaptureFixture[str], model: Path, data: Path) -> None:
    code, said = checked(capsys, model, data, "--data.difficulty-key", "level", "--data.max-difficulty", "19")
    assert code == 0
    assert "rows          20: 12 to train on, 8 held out; 20 by their difficulty left out" in said


def test_data_check_takes_the_command_line_of_a_run(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path, tmp_path: Path
) -> None:
    flags = ["custom", "--steps", "3", "--reward", "mine.py", "--rollout.max-new-tokens=8", "--guard", "loss off"]
    where = ["--model", str(model), "--data", str(data)]
    assert main(["data", "check", *flags, *where]) == 2
    assert "has 40 rows, no more than data.eval_prompts=64" in " ".join(capsys.readouterr().err.split())
    file = tmp_path / "run.toml"
    file.write_text(f'recipe = "custom"\nmodel = "{model}"\n[data]\npath = "{data}"\neval_prompts = 4\n')
    assert main(["data", "check", "--config", str(file), "--algorithm", "dapo"]) == 0
    assert "rows          40: 36 to train on, 4 held out" in capsys.readouterr().out


def test_help_of_data_check_lists_every_key_of_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for field in dataclasses.fields(DataConfig):
        assert ("reward" in field.name) != (f"--data.{field.name.replace('_', '-')}" in said), field.name
    assert "--rollout.max-new-tokens" in said
    assert "--show N" in said
    assert "--steps" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data"], "flowrt data takes check, not ''"),
        (["data", "chekc"], "flowrt data takes check, not 'chekc'"),
        (["data", "check", "--data", "x"], "flowrt data check needs --model DIRECTORY"),
        (["data", "check", "--model", "x"], "recipe custom reads its problems from a file; give one with"),
        (["data", "check", "gsm8k", "--model", "x", "--data", "y"], "reads data as recipe custom does, not as gsm8k"),
        (["data", "check", "--show", "two"], "--show 'two' is not a whole number"),
        (["data", "check", "--model", "x", "--data", "a=y:-1"], "data.sets[0].weight is -1.0; use a value above 0"),
        (["data", "check", "--model", "x", "--data", "y", "--data.prefill", "maybe"], "invalid choice"),
        (["data", "check", "--model", "x", "--data", "y", "--data.eval-prompts", "-1"], "data.eval_prompts is -1; use"),
    ],
)
def test_data_check_refuses_flags_as_a_run_does(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    try:
        code = main(words)
    except SystemExit as ended:  # of tyro
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    assert code == 2
    assert said in " ".join((captured.out + captured.err).replace("│", " ").split())


def test_duplicates_are_counted(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(conversation(n)) + "\n" for n in [1, 1, 1, *range(2, 11)]))
    code, said = checked(capsys, model, path)
    assert code == 0
    assert f"2 training rows repeat a prompt; first: data file {path}, line 2" in said


def test_hostile_text_leaves_a_terminal_as_it_was(model: Path, tmp_path: Path) -> None:
    hostile = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m[red]bold[/red] \u202e\u200b\x00:smile:"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": hostile}], "answer": hostile}) + "\n")
    flowrt = Path(sys.executable).with_name("flowrt")
    words = [str(flowrt), "data", "check", "--model", str(model), "--data", str(path)]
    ours, theirs = pty.openpty()
    with subprocess.Popen([*words, "--data.eval-prompts", "0", "--show", "1"], stdout=theirs, stderr=theirs) as ended:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 1 << 16):
                said += part
        except OSError:  # the other end is closed
            pass
        assert ended.wait(120) == 0, said
    os.close(ours)
    assert b"[red]bold[/red]" in said
    assert not {byte for byte in said if byte < 0x20} - set(b"\r\n")
    text = said.decode()
    assert not any(character in text for character in "\x7f\x9b\u202e\u200b")


def test_a_reward_function_gets_columns_by_name(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def reward(text, gold, *, level, hint=None, **more):\n    assert more == {'x': [1]}\n    return level\n"
    )
    options = RewardOptions(functions=(str(mine),))
    check_rewards(options, [json.dumps({"answer": {"a": 1}, "level": 2, "x": [1]}).encode()], print)
    with pytest.raises(ConfigError, match=r":1\): it takes 'level', and the row has no such column; it has x"):
        check_rewards(options, [b'{"answer": "7", "x": [1]}'], print)


@pytest.mark.slow
@pytest.mark.parallel
def test_a_run_on_messages_and_columns(launch: Callable[..., Any], model: Path, data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(REWARD)
    launched = launch(
        *("--recipe", "custom", "--data", str(data), "--reward", str(mine), "--reward.on-failure", "stop"),
        *("--model", str(model)),
        *("--data.eval-prompts", "4", "--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "8"),
        *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "0", "--steps", "3"),
    )
    assert launched.wait(120.0) == 0, launched.output
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0


@pytest.mark.slow
@pytest.mark.parallel
def test_a_run_leaves_overlong_prompts_out(launch: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    mine, path = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    mine.write_text(
        "def reward(response, answer):\n    assert answer == 'short', answer\n    return len(response) / 8\n"
    )
    rows = [{"prompt": "1" * (60 if n % 2 else 4) + str(n), "answer": "long" if n % 2 else "short"} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [{"prompt": "0", "answer": "short"}, *rows]))
    launched = launch(
        *("--recipe", "custom", "--data", str(path), "--reward", str(mine), "--reward.on-failure", "stop"),
        *("--model", str(model)),
        *("--data.chat-template", "chat", "--data.max-prompt-tokens", "40", "--data.overlong", "drop"),
        *("--data.eval-prompts", "4", "--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "8"),
        *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "0", "--steps", "4"),
    )
    assert launched.wait(120.0) == 0, launched.output


@pytest.mark.slow
@pytest.mark.parallel
def test_text_for_a_chat_model_ends_a_run_before_it_starts(
    launch: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    mine, path = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    mine.write_text("def reward(response, answer):\n    return 0.0\n")
    path.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(9)))
    launched = launch(
        "--recipe",
        "custom",
        "--data",
        str(path),
        "--reward",
        str(mine),
        "--model",
        str(model),
        "--data.eval-prompts",
        "1",
        "--rollout.max-new-tokens",
        "8",
    )
    assert launched.wait(60.0) == 2, launched.output
    assert "line 1: the prompt is plain text, and the checkpoint has a chat template" in launched.words


def test_data_check_needs_no_weights(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(conversation(1)) + "\n")
    words = ["data", "check", "--model", str(tmp_path / "bare"), "--data", str(path), "--data.eval-prompts", "0"]
    assert main(words) == 0
