"""A user-defined task with a chat model: `flowrt data check`, reward columns by name, and complete runs."""

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
from tokenizers import normalizers
from transformers import AutoModelForCausalLM

from flowrt.cli import main
from flowrt.engines.hf import save_model
from flowrt.engines.tiny_model import build_model
from flowrt.errors import ConfigError
from flowrt.recipes.data_config import DataConfig
from flowrt.rewards.check import check_rewards
from flowrt.rewards.options import RewardOptions
from tests.integration.helpers.forked_flowrt import run_flowrt
from tests.proofs.chat_models import FAMILIES, chat_tokenizer

REWARD = """
def reward(response, answer, prompt, level, prefix, *, bonus=0.0):
    assert prompt[-1]["role"] == "user" and answer == {"sum": level + 1}, (prompt, answer, level)
    return float(prefix == "<think>\\n" and response.startswith(prefix)) + bonus
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model whose generation_config.json does not name the end of turn."""
    torch.set_num_threads(1)
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    built = build_model(
        vocab_size=len(tokenizer), hidden_size=32, layers=1, heads=2, intermediate_size=32, max_length=512, seed=0
    )
    built.config.eos_token_id = built.generation_config.eos_token_id = tokenizer.eos_token_id
    path = tmp_path_factory.mktemp("chat") / "model"
    save_model(built, tokenizer, path)
    return path


def conversation(n: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": {"sum": n + 1}, "level": n}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(conversation(n)) + "\n" for n in range(40)))
    return path


def data_check(capsys: pytest.CaptureFixture[str], model: Path, data: Path, *flags: str) -> tuple[int, str]:
    code = main(["data", "check", "--model", str(model), "--data", str(data), "--data.eval-prompts", "8", *flags])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_data_check_prints_counts_template_text_and_token_ids(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path
) -> None:
    code, output = data_check(capsys, model, data, "--show", "1")
    assert code == 0, output
    assert "rows          40: 32 to train on, 8 held out" in output
    assert "template      of the checkpoint" in output
    assert "longest" in output
    assert "'<|im_end|>'" in output
    assert "template's end of turn alone" in output
    assert r"text '<|im_start|>user\n0 + 1?<|im_end|>\n<|im_start|>assistant\n'" in output
    ids = next(line for line in output.splitlines() if line.startswith("ids  "))
    assert all(word.isdecimal() for word in ids.split()[1:])


@pytest.mark.parametrize(
    ("rows", "flags", "expected"),
    [
        (
            [{"prompt": "text", "answer": "1"}] * 9,
            (),
            "line 1: the prompt is plain text, and the checkpoint has a chat",
        ),
        ([conversation(n) for n in range(9)], ("--data.max-prompt-tokens", "3"), "9 prompts over 3 tokens, refused"),
        (
            [conversation(n) for n in range(9)],
            ("--rollout.max-new-tokens", "506"),
            "9 prompts over 6 tokens (512 positions of the model, 506 for rollout.max_new",
        ),
        (
            [conversation(n % 8) for n in range(16)],
            (),
            "8 training rows have a held-out prompt, refused by a run; first",
        ),
        ([{"prompt": n, "answer": "1"} for n in range(30)], (), "at least 10 mistakes in the data: data file"),
        ([conversation(1)] * 3, (), "has 3 rows, no more than data.eval_prompts=8"),
        ([conversation(n) for n in range(9)], ("--guards.command", "'a"), 'guards.command "\'a" is no command line'),
    ],
)
def test_data_check_refuses_what_a_run_would_refuse(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    rows: list[Any],
    flags: tuple[str, ...],
    expected: str,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = data_check(capsys, model, path, "--rollout.max-new-tokens", "16", *flags)
    assert code == 2, output
    assert expected in " ".join(output.split())


def test_data_check_refuses_prompts_without_tokens_and_ids_above_the_vocabulary(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    smaller = tmp_path / "smaller"
    shutil.copytree(model, smaller)
    whole = AutoModelForCausalLM.from_pretrained(model)
    whole.resize_token_embeddings(40)
    whole.save_pretrained(smaller)
    dropping = chat_tokenizer(FAMILIES["qwen"])
    dropping.backend_tokenizer.normalizer = normalizers.Replace("z", "")
    dropping.save_pretrained(smaller)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "z" if n == 3 else f"{n}", "answer": "1"}) + "\n" for n in range(12)))
    flags = ("--rollout.max-new-tokens", "16", "--data.chat-template", "none")
    code, output = data_check(capsys, smaller, path, *flags)
    assert code == 2, output
    assert "empty         1 prompts without a token, refused by a run; first: data file" in output
    text = json.dumps({"prompt": "What is one and one?", "answer": "2"}) + "\n"
    path.write_text(text + "".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(12)))
    code, output = data_check(capsys, smaller, path, *flags, "--deep")
    assert code == 2, output
    assert "vocabulary    1 prompts with token ids above the vocab_size of 40, refused by a run" in output


def test_data_check_of_several_data_sets(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "more.jsonl"
    other.write_text("".join(json.dumps(conversation(n)) + "\n" for n in [39, *range(100, 120)]))
    sets = ["--data", f"plus={data}:0.75", "--data", f"more={other}:0.25"]
    command = ["data", "check", "--model", str(model), *sets, "--data.eval-prompts", "8"]
    code = main(command)
    output = capsys.readouterr().out
    assert code == 2, output
    assert "rows plus     40: 34 to train on, 6 held out, 0.75 of the prompts" in output
    assert "rows more     21: 19 to train on, 2 held out, 0.25 of the prompts" in output
    assert f"1 training rows have a held-out prompt, refused by a run; first: data file {other}, line 1" in output
    assert main([*command, "--data.allow-overlap", "True", "--show", "35"]) == 0
    assert f"data file {other}, line 1\nids" in capsys.readouterr().out  # the 35th prompt to train on


def test_data_check_counts_rows_dropped_by_difficulty(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path
) -> None:
    code, output = data_check(capsys, model, data, "--data.difficulty-key", "level", "--data.max-difficulty", "19")
    assert code == 0
    assert "rows          20: 12 to train on, 8 held out; 20 by their difficulty left out" in output


def test_data_check_accepts_the_command_line_of_a_run(
    capsys: pytest.CaptureFixture[str], model: Path, data: Path, tmp_path: Path
) -> None:
    flags = ["custom", "--steps", "3", "--reward", "length:20", "--rollout.max-new-tokens=8"]
    where = ["--model", str(model), "--data", str(data)]
    assert main(["data", "check", *flags, *where]) == 2
    assert "has 40 rows, no more than data.eval_prompts=64" in " ".join(capsys.readouterr().err.split())
    file = tmp_path / "run.toml"
    file.write_text(f'recipe = "custom"\nmodel = "{model}"\n[data]\npath = "{data}"\neval_prompts = 4\n')
    assert main(["data", "check", "--config", str(file), "--algorithm", "dapo"]) == 0
    assert "rows          40: 36 to train on, 4 held out" in capsys.readouterr().out


def test_data_check_help_lists_every_data_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["data", "check", "--help", "all"])
    assert raised.value.code == 0
    output = capsys.readouterr().out
    for field in dataclasses.fields(DataConfig):
        flag = "--data" if field.name == "sets" else f"--data.{field.name.replace('_', '-')}"
        assert ("reward" in field.name) != (f"{flag} " in output), field.name
    assert "--rollout.max-new-tokens" in output
    assert "--show N" in output
    assert "--steps" not in output


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["data"], "flowrt data takes check, not ''"),
        (["data", "chekc"], "flowrt data takes check, not 'chekc'"),
        (["data", "check", "--data", "x"], "flowrt data check needs --model DIRECTORY"),
        (["data", "check", "--model", "x"], "recipe custom reads its problems from a file; give one with"),
        (["data", "check", "gsm8k", "--model", "x", "--data", "y"], "reads data as recipe custom does, not as gsm8k"),
        (["data", "check", "--show", "two"], "--show 'two' is not a whole number"),
        (["data", "check", "--model", "x", "--data", "a=y:-1"], "data.sets[0].weight is -1.0; use a value above 0"),
        (["data", "check", "--model", "x", "--data", "y", "--data.prefill", "maybe"], "one of True, False, not"),
        (["data", "check", "--model", "x", "--data", "y", "--shwo", "3"], "takes no flag --shwo; did you mean --show?"),
        (["data", "check", "--model", "x", "--data", "y", "--data.eval-prompts", "-1"], "data.eval_prompts is -1; use"),
    ],
)
def test_data_check_refuses_flags_as_a_run_does(
    capsys: pytest.CaptureFixture[str], command: list[str], expected: str
) -> None:
    assert main(command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert expected in line


def test_data_check_counts_duplicate_prompts(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(conversation(n)) + "\n" for n in [1, 1, 1, *range(2, 11)]))
    code, output = data_check(capsys, model, path)
    assert code == 0
    assert f"2 training rows repeat a prompt; first: data file {path}, line 2" in output


def test_control_characters_in_data_do_not_reach_the_terminal(model: Path, tmp_path: Path) -> None:
    hostile = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m[red]bold[/red] \u202e\u200b\x00:smile:"
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": hostile}], "answer": hostile}) + "\n")
    flowrt = Path(sys.executable).with_name("flowrt")
    command = [str(flowrt), "data", "check", "--model", str(model), "--data", str(path)]
    master_fd, slave_fd = pty.openpty()
    with subprocess.Popen(
        [*command, "--data.eval-prompts", "0", "--show", "1"], stdout=slave_fd, stderr=slave_fd
    ) as process:
        os.close(slave_fd)
        output = b""
        try:
            while part := os.read(master_fd, 1 << 16):
                output += part
        except OSError:  # end of file: the process has ended
            pass
        assert process.wait(120) == 0, output
    os.close(master_fd)
    assert b"[red]bold[/red]" in output
    assert not {byte for byte in output if byte < 0x20} - set(b"\r\n")
    text = output.decode()
    assert not any(character in text for character in "\x7f\x9b\u202e\u200b")


def test_reward_function_receives_columns_by_name(tmp_path: Path) -> None:
    reward_file = tmp_path / "mine.py"
    reward_file.write_text(
        "def reward(text, gold, *, level, hint=None, **more):\n    assert more == {'x': [1]}\n    return level\n"
    )
    options = RewardOptions(functions=(str(reward_file),))
    check_rewards(options, [json.dumps({"answer": {"a": 1}, "level": 2, "x": [1]}).encode()], print)
    with pytest.raises(ConfigError, match=r":1\): it takes 'level', and the row has no such column; it has x"):
        check_rewards(options, [b'{"answer": "7", "x": [1]}'], print)


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.slow
def test_run_with_chat_messages_reward_columns_and_a_template_for_each_set(
    launch: Callable[..., Any], model: Path, data: Path, tmp_path: Path
) -> None:
    """The turn of the model begins as the template of the prompt's own set opens it, also for held-out prompts."""
    reward_file, template, other = tmp_path / "mine.py", tmp_path / "thinks.jinja", tmp_path / "other.jsonl"
    reward_file.write_text(REWARD)
    template.write_text(THINKS)
    other.write_text("".join(json.dumps(conversation(100 + n)) + "\n" for n in range(40)))
    launched = launch(
        *("--recipe", "custom", "--data", f"plain={data}", "--data", f"thinks={other} chat_template={template}"),
        *("--reward", str(reward_file), "--reward.on-failure", "stop", "--model", str(model)),
        *("--data.eval-prompts", "4", "--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "8"),
        *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "0", "--steps", "3"),
    )
    assert launched.wait(120.0) == 0, launched.output
    summary = json.loads((launched.run_dir / "summary.json").read_text())
    assert summary["prompts_lost"] == summary["prompts_trained_twice"] == 0
    lines = [json.loads(line) for line in (launched.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [(line["reward_of/plain"], line["reward_of/thinks"]) for line in lines] == [(0.0, 1.0)] * 3
    assert summary["eval_first"] == summary["eval_last"] == 0.5


@pytest.mark.slow
def test_run_drops_overlong_prompts(launch: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    reward_file, path = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    reward_file.write_text(
        "def reward(response, answer):\n    assert answer == 'short', answer\n    return len(response) / 8\n"
    )
    rows = [{"prompt": "1" * (60 if n % 2 else 4) + str(n), "answer": "long" if n % 2 else "short"} for n in range(28)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    launched = launch(
        *("--recipe", "custom", "--data", str(path), "--reward", str(reward_file), "--reward.on-failure", "stop"),
        *("--model", str(model)),
        *("--data.chat-template", "chat", "--data.max-prompt-tokens", "40", "--data.overlong", "drop"),
        *("--data.eval-prompts", "4", "--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "8"),
        *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "0", "--steps", "4"),
    )
    assert launched.wait(120.0) == 0, launched.output


@pytest.mark.slow
def test_plain_text_prompts_for_a_chat_model_are_refused(
    launch: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    reward_file, path = tmp_path / "mine.py", tmp_path / "rows.jsonl"
    reward_file.write_text("def reward(response, answer):\n    return 0.0\n")
    path.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(9)))
    launched = launch(
        "--recipe",
        "custom",
        "--data",
        str(path),
        "--reward",
        str(reward_file),
        "--model",
        str(model),
        "--data.eval-prompts",
        "1",
        "--rollout.max-new-tokens",
        "8",
    )
    assert launched.wait(60.0) == 2, launched.output
    assert "line 1: the prompt is plain text, and the checkpoint has a chat template" in launched.words


@pytest.mark.slow
def test_messages_are_evaluated_with_the_template_of_a_flag(
    launch: Callable[..., Any], model: Path, data: Path, tmp_path: Path
) -> None:
    """flowrt eval of messages with a model without a template names the flag that it takes."""
    without = Path(shutil.copytree(model, tmp_path / "without"))
    (without / "chat_template.jinja").unlink()
    text, reward_file, template = tmp_path / "text.jsonl", tmp_path / "mine.py", tmp_path / "chat.jinja"
    text.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(9)))
    reward_file.write_text("def reward(response, answer):\n    return len(response) / 8\n")
    template.write_text("{{ messages[0].content }}<|im_end|>")
    trained = launch(
        *("--recipe", "custom", "--data", str(text), "--reward", str(reward_file), "--model", str(without)),
        *("--data.eval-prompts", "0", "--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "8"),
        *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--steps", "1"),
    )
    assert trained.wait(120.0) == 0, trained.output
    words = ("eval", str(trained.run_dir), "--data", str(data))
    refused = run_flowrt(*words)
    assert refused.returncode == 2
    assert "give one with --data.chat-template FILE.jinja" in " ".join(refused.stdout.split())
    done = run_flowrt(*words, "--data.chat-template", str(template))
    assert done.returncode == 0, done.stdout


def test_data_check_needs_no_weights(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(conversation(1)) + "\n")
    command = ["data", "check", "--model", str(tmp_path / "bare"), "--data", str(path), "--data.eval-prompts", "0"]
    assert main(command) == 0
