"""Bad input is refused with exit code 2 and one sentence that names the cause and the fix; nothing is written."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.helpers.forked import run_flowrt

FLOWRT = Path(sys.executable).with_name("flowrt")


def write_rows(path: Path, *rows: object) -> str:
    """A data file; text is written as it is, anything else as JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def row(question: str = "One and one?", answer: str = "1+1=2\n#### 2") -> dict[str, str]:
    return {"question": question, "answer": answer}


def test_a_limited_address_space_is_refused_before_the_run(tmp_path: Path) -> None:
    command = f"ulimit -v 600000; exec {FLOWRT} run --run-dir run"
    completed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert completed.returncode == 2, completed.stderr
    assert "is limited to 585 MB, and a process of a run needs 2048 MB; raise it (ulimit -v" in completed.stderr
    assert len(completed.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# ---- data


def test_recipe_without_its_data_names_the_flag(refused: Callable[..., Any]) -> None:
    error = refused("gsm8k").sentence()
    assert "gsm8k" in error
    assert "--data" in error


def test_missing_data_file(refused: Callable[..., Any], tmp_path: Path) -> None:
    error = refused("gsm8k", "--data", "nowhere.jsonl").sentence()
    assert str(tmp_path / "nowhere.jsonl") in error
    assert "does not exist" in error
    assert "--data" in error


@pytest.mark.parametrize("content", ["", "\n\n"], ids=["no byte", "only blank lines"])
def test_empty_data_file(refused: Callable[..., Any], tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    error = refused("gsm8k", "--data", str(path)).sentence()
    assert f"{path} is empty" in error
    assert "at least one row" in error


def test_malformed_line_is_reported_with_its_number(refused: Callable[..., Any], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), "", '{"question": "Half', row())
    error = refused("gsm8k", "--data", data).sentence()
    assert f"{data}, line 3 " in error
    assert "JSON" in error


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"question": "No answer?"}, ["line 2", "'answer'", "it has 'question'"]),
        ({"prompt": "?", "answer": "#### 1"}, ["line 2", "'question'", "'prompt', 'answer'"]),
        ({"question": "?", "answer": 1}, ["line 2", "'answer'", "int", "text"]),
        (["question", "answer"], ["line 2", "list", "object"]),
    ],
    ids=["field missing", "field has another name", "field is a number", "row is a list"],
)
def test_row_without_a_required_field(
    refused: Callable[..., Any], tmp_path: Path, bad: object, expected: list[str]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), bad, row())
    error = refused("gsm8k", "--data", data, "--data.eval-prompts", "1").sentence()
    for part in [data, *expected]:
        assert part in error


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("[" * 100_000, "line 2 is nested too deeply"),
        ('{"question": ' + "9" * 10_000 + "}", "line 2 cannot be read"),
        (row(question=""), "line 2: field 'question', the prompt, is empty"),
        (row(question="half \ud83d"), "line 2: field 'question' has half a character"),
    ],
    ids=["deep nesting", "a huge number", "an empty prompt", "a lone surrogate"],
)
def test_row_that_workers_cannot_process(
    refused: Callable[..., Any], tmp_path: Path, bad: object, expected: str
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), bad, row())
    error = refused("gsm8k", "--data", data, "--data.eval-prompts", "1").sentence()
    assert f"{data}, {expected}" in error


def test_data_file_is_a_directory(refused: Callable[..., Any], tmp_path: Path) -> None:
    assert f"data file {tmp_path} is a directory" in refused("gsm8k", "--data", str(tmp_path)).sentence()


def test_solution_without_a_final_number(refused: Callable[..., Any], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), row(answer="it is two"), row())
    error = refused("gsm8k", "--data", data, "--data.eval-prompts", "1").sentence()
    assert f"{data}, line 2" in error
    assert "#### number" in error


def test_fewer_rows_than_are_held_out(refused: Callable[..., Any], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), row())
    error = refused("gsm8k", "--data", data, "--data.eval-prompts", "2").sentence()
    assert "2 rows" in error
    assert "data.eval_prompts=2" in error


# ---- model


def test_model_directory_does_not_exist(refused: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "no-model"
    error = refused("--model", str(path)).sentence()
    assert str(path) in error
    assert "is not a directory" in error
    assert "config.json" in error


def test_directory_without_a_model(refused: Callable[..., Any], tmp_path: Path) -> None:
    error = refused("--model", str(tmp_path)).sentence()
    assert str(tmp_path) in error
    assert "no config.json" in error


def test_model_without_weights(refused: Callable[..., Any], model_shell: str) -> None:
    Path(model_shell, "model.safetensors").unlink()
    error = refused("--model", model_shell).sentence()
    assert model_shell in error
    assert "no weights" in error
    assert "download" in error


def test_model_without_tokenizer(refused: Callable[..., Any], model_shell: str) -> None:
    Path(model_shell, "tokenizer.json").unlink()
    error = refused("--model", model_shell).sentence()
    assert model_shell in error
    assert "no tokenizer" in error


def test_model_whose_weights_do_not_fit_its_configuration(
    refused: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    """transformers reports it, in a separate process before any other starts; no file is left."""
    model = Path(shutil.copytree(untrained_model, tmp_path / "model"))
    table = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(table | {"vocab_size": 999}))
    error = refused("--model", str(model), loads_model=True).sentence()
    assert f"model {model}: model.embed_tokens.weight has shape [17, 64]" in error


def test_prompts_too_long_for_the_embedded_model(refused: Callable[..., Any], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), row(question="a b " * 40), row())
    error = refused("gsm8k", "--data", data, "--data.eval-prompts", "1", "--build.max-length", "150").sentence()
    assert f"{data}, line 2: the prompt has " in error
    assert "with rollout.max_new_tokens 128 more than the 150 positions" in error


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("", "which has no SGLang; name the Python of an environment with SGLang (scripts/install_sglang makes one)"),
        ("#!/bin/sh\n", "which is no Python"),
        ("#!/no/such/interpreter\n", "which cannot be started: No such file or directory"),
    ],
)
def test_a_python_without_sglang(refused: Callable[..., Any], tmp_path: Path, script: str, expected: str) -> None:
    (tmp_path / "sglang").mkdir()  # a directory of that name where the command is started is not the package
    (tmp_path / "sglang" / "__init__.py").touch()
    python = sys.executable
    if script:
        python = str(tmp_path / "python")
        Path(python).write_text(script)
        Path(python).chmod(0o755)
    error = refused("--rollout.engine", "sglang", "--rollout.sglang.python", python).sentence()
    assert f"rollout.sglang.python is {python!r}, {expected}" in error


# ---- values and flags


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--eval.interval 5 --data.eval-prompts 0",
            "eval.interval is 5, which changes nothing with data.eval",
        ),
        (
            "--eval.samples 4 --eval.temperature 0",
            "eval.samples is 4 and eval.temperature 0: all answers to a prompt would be the same",
        ),
        ("--eval.max-new-tokens 16", "eval.max_new_tokens is 16, as rollout.max_new_tokens: it changes nothing"),
        (
            "--eval.max-new-tokens 512",
            "eval.max_new_tokens is 512, and build.max_length, for prompt and answer together",
        ),
        ("--eval.min-p 0.1", "eval.top_k, eval.top_p and eval.min_p change nothing where the most likely token"),
        ("--eval.top-p 0.9", "eval.top_k, eval.top_p and eval.min_p change nothing where the most likely token"),
        ("--eval.interval 500", "eval.interval is 500, and steps is 120: no version would be due"),
        ("--eval.overlap wait", "eval.overlap is 'wait', which changes nothing with eval.interval 0"),
        ("--eval.stop-at 0.9 --eval.at-start False", "eval.stop_at is 0.9, which changes nothing with eval.interval 0"),
        ("--eval.data a=x.jsonl --data.eval-prompts 7", "with eval.data no rows are held out"),
        ("--eval.data nameless.jsonl", "eval.data has 'nameless.jsonl'; give NAME=PATH"),
        ("--eval.data a=x.jsonl --eval.data a=y.jsonl", "eval.data has two data sets of the name 'a'"),
        ("--eval.data a=x.jsonl", "recipe arithmetic makes its own problems"),
        ("--checkpoint.best held_out/avg@2", "checkpoint.best is 'held_out/avg@2', which is no result"),
        ("--checkpoint.best held_out/avg@1 --data.eval-prompts 0", "there is: none, because nothing is evaluated"),
        ("--checkpoint.keep-best 3", "checkpoint.keep_best is 3, which changes nothing with checkpoint.best ''"),
        ("--eval.only True --data.eval-prompts 0", "eval.only is on, and there is nothing to evaluate"),
        ("--eval.only True --eval.interval 5", "eval.only is on, so nothing is trained"),
    ],
)
def test_inconsistent_evaluation_options(refused: Callable[..., Any], flags: str, expected: str) -> None:
    assert expected in refused(*flags.split()).sentence()


def test_malformed_eval_data_is_reported_with_its_line(refused: Callable[..., Any], tmp_path: Path) -> None:
    data, bad = write_rows(tmp_path / "data.jsonl", row(), row("Two?")), write_rows(tmp_path / "bad.jsonl", row(), "{")
    flags = ("--data", data, "--data.eval-prompts", "0", "--eval.data", f"hard={bad}")
    assert f"{bad}, line 2" in refused("gsm8k", *flags).sentence()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--step", "3"), "has no checkpoint, of which checkpoint.every is"),
        (("--best",), "has no best weights"),
    ],
)
def test_flowrt_eval_without_checkpoint_or_best_weights(tmp_path: Path, flags: tuple[str, ...], expected: str) -> None:
    config = subprocess.run([str(FLOWRT), "config", "arithmetic"], capture_output=True, text=True, check=True)
    (tmp_path / "config.toml").write_text(config.stdout)
    completed = subprocess.run(
        [str(FLOWRT), "eval", str(tmp_path), *flags], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 2
    assert expected in " ".join(completed.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.toml"]


def test_flowrt_eval_of_a_directory_without_a_run(tmp_path: Path) -> None:
    completed = subprocess.run([str(FLOWRT), "eval", str(tmp_path)], capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert "is not a run directory" in " ".join(completed.stderr.split())


def test_negative_staleness(refused: Callable[..., Any]) -> None:
    error = refused("--max-staleness", "-1").sentence()
    assert "max_staleness is -1" in error
    assert "0 or more" in error


def test_group_of_one_with_a_group_baseline(refused: Callable[..., Any]) -> None:
    error = refused("--group-size", "1").sentence()
    assert "group_size is 1" in error
    assert "nothing would be learned" in error
    assert "2 or more" in error


def test_zero_steps(refused: Callable[..., Any]) -> None:
    error = refused("--steps", "0").sentence()
    assert "steps is 0" in error
    assert "above 0" in error


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--threads", "1000000", "threads is 1000000; use a value above 0, and at most 1,024"),
        ("--threads", "1000", "this machine has"),
        ("--rollout.max-running-requests", "1000000000", "rollout.max_running_requests is 1000000000"),
        ("--group-size", "100000000", "group_size is 100000000"),
        ("--seed", "18446744073709551616", "seed is 18446744073709551616"),
        ("--rollout.temperature", "inf", "rollout.temperature is inf"),
        ("--rollout.temperature", "1e-300", "rollout.temperature is 1e-300"),
        ("--eval.temperature", "1e-300", "eval.temperature is 1e-300; use 0 for the most likely token, or at least"),
        (
            "--trainer.lora.targets",
            "q_proj",
            "trainer.lora.targets is 'q_proj', which changes nothing with trainer.engine torch;",
        ),
        ("--trainer.lr", "1e30", "trainer.lr is 1e+30"),
        ("--rollout.top-p", "1.5", "rollout.top_p is 1.5; use a value above 0, and at most 1"),
        ("--rollout.min-p", "1", "rollout.min_p is 1.0; use 0 or more, and less than 1"),
        ("--rollout.top-k", "1", "rollout.top_k is 1: all samples of a prompt would be the most likely one"),
        ("--rollout.top-k", "-1", "rollout.top_k is -1; use 0 or more"),
        ("--rollout.stop", "", "rollout.stop has ''"),
    ],
)
def test_number_out_of_range(refused: Callable[..., Any], flag: str, value: str, expected: str) -> None:
    assert expected in refused(flag, value).sentence()


def test_unknown_flag_suggests_the_right_one(refused: Callable[..., Any]) -> None:
    error = refused("--group-sise", "4").sentence()
    assert error == "flowrt: flowrt run takes no flag --group-sise; did you mean --group-size?"


def test_unknown_recipe_suggests_the_right_one(refused: Callable[..., Any]) -> None:
    error = refused("arithmetik").sentence()
    assert "'arithmetik'" in error
    assert "did you mean 'arithmetic'?" in error


@pytest.mark.parametrize(
    ("flag", "value"), [("--steps", "many"), ("--trainer.lr", "fast"), ("--deterministic", "perhaps")]
)
def test_wrong_type_on_a_flag(refused: Callable[..., Any], flag: str, value: str) -> None:
    error = refused(flag, value).sentence()
    assert flag in error
    assert value in error


def test_unknown_command_names_the_right_one() -> None:
    completed = subprocess.run([str(FLOWRT), "ran"], timeout=600, capture_output=True, text=True)
    assert completed.returncode == 2
    [error] = completed.stderr.splitlines()
    assert "'ran'" in error
    assert error.endswith(
        "there is: config, data, doctor, drain, eval, export, keys, ledger, replay, resume, reward, run, samples, "
        "slurm, status, time, watch, worker"
    )


# ---- devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices here")
def test_missing_device_is_refused_before_the_run_starts(refused: Callable[..., Any]) -> None:
    error = refused("--device", "cuda").sentence()
    assert "device cuda of trainer and rollout and reference: " in error
    assert "0 are visible here" in error
    assert "use device cpu" in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["worker", "rollout", "--nope"], "unrecognized arguments: --nope"),
        (["worker", "rollout", "--no\x1b]0;x\x07pe"], "unrecognized arguments: --no\\x1b]0;x\\x07pe"),
        (["worker", "trainer"], "--controller RUN is required"),
        (["worker", "source", "--controller"], "argument --controller: expected one argument"),
        (["worker", "reward", "--connect-timeout-s", "soon"], "invalid seconds value: 'soon'"),
    ],
)
def test_wrong_arguments_of_a_worker_are_one_sentence(arguments: list[str], expected: str) -> None:
    completed = run_flowrt(arguments)
    assert (completed.returncode, completed.stdout) == (2, "")
    [error] = completed.stderr.splitlines()
    assert error.startswith(f"flowrt worker {arguments[1]}: ")
    assert expected in error
