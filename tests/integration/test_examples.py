"""The examples and the commands of the README do what they say."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrt.cli import WATCH_FLAG
from flowrt.recipes.config_io import parse

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNKNOWN = "--no-such-flag"

QUICK = ["--data.eval-prompts", "0", "--sft.steps", "60", "--sft.answer-only-steps", "5"]


def output(name: str, *arguments: str) -> str:
    """What an example prints."""
    path = ROOT / "examples" / name
    ended = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("name", ["custom_loop.py", "asyncflow_service.py"])
def test_a_loop_is_short_and_learns(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 60
    found = re.search(r"paying arm: ([\d.]+)", output(name))
    assert found is not None
    assert float(found[1]) > 0.9


def test_service_calls_are_all_that_their_example_uses() -> None:
    text = (ROOT / "examples" / "asyncflow_service.py").read_text()
    assert re.findall(r"^from flowrt.*$", text, re.MULTILINE) == ["from flowrt import asyncflow"]
    for call in ("put_prompts_data", "get_experience_data", "put_experience_data", "weight_sync_notify"):
        assert f"calls.{call}(" in text
    assert "asyncflow.init_engines(" in text


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose trainer is the example's."""
    run_dir = tmp_path_factory.mktemp("own") / "run"
    said = output("custom_trainer.py", "--steps", "4", "--prompts-per-step", "8", "--run-dir", str(run_dir), *QUICK)
    assert re.search(r"4 steps, mean reward ([\d.]+) -> ([\d.]+)", said) is not None, said
    return run_dir


def test_a_trainer_of_your_own_trains_a_run(own_run: Path) -> None:
    """Its metrics are its own, and what it made of the weights is what is written."""
    steps = [json.loads(line) for line in (own_run / "metrics.jsonl").read_text().splitlines()]
    assert max(step["grad_norm"] for step in steps) > 0
    assert not any("lr" in step for step in steps)
    before, after = (load_file(own_run / name / "model.safetensors") for name in ("model", "final"))
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_rollout_engine_of_your_own_generates_for_a_run(own_run: Path) -> None:
    said = output("custom_rollout.py", "--model", str(own_run / "model"), "--steps", "3", *QUICK)
    found = re.search(r"3 steps, mean reward ([\d.]+)", said)
    assert found is not None, said
    assert 0 < float(found[1]) <= 1


@pytest.mark.parametrize("name", ["custom_trainer.py", "custom_rollout.py"])
def test_an_engine_of_your_own_is_short(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 60


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip().removeprefix(".venv/bin/") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def scripts() -> list[str]:
    """What the documents have Python run, in blocks and within sentences; names of variables before it left out."""
    found = (
        re.findall(r"python ((?:-m|bench|scripts|launch|workers)\b[^`#\n]*)", one.read_text()) for one in DOCUMENTS
    )
    return sorted({words.strip() for some in found for words in some})


def refusal(words: list[str]) -> str:
    """What a script has against these words: nothing of it runs, as one more flag is there that it cannot know.

    With ``--help`` in that place argparse would leave before it looks at the others.
    """
    command = [sys.executable, *words, UNKNOWN]
    ended = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 2, (ended.returncode, ended.stderr)
    said = ended.stderr.strip().splitlines()[-1].split("error: ", 1)[1]
    return "" if said == f"unrecognized arguments: {UNKNOWN}" else said


def test_there_are_commands() -> None:
    assert len(commands()) >= 4
    assert len(scripts()) >= 12


@pytest.mark.parametrize("command", scripts())
def test_every_script_of_the_documents_takes_its_flags(command: str) -> None:
    assert refusal(shlex.split(command)) == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench/passes.py --quick --made-up 3", "--made-up 3"),
        ("bench/compare_trl.py --baseline-python PYTHON --no-compiling", "--no-compiling"),
        ("bench/compare_trl.py --baseline-python PYTHON --dtypes float99", "invalid choice: 'float99'"),
        ("bench/compare_trl.py --no-compile", "required: --baseline-python"),
    ],
)
def test_a_flag_that_a_script_does_not_have_is_found(command: str, said: str) -> None:
    assert said in refusal(shlex.split(command))


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_exists(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
        assert words[1] in targets
    elif words[:2] == ["flowrt", "run"]:
        flags = " ".join(shlex.quote(word) for word in words[2:]).replace("--model DIR", "")  # it has to be there
        assert parse([flag for flag in shlex.split(flags) if flag != WATCH_FLAG]).steps > 0
    elif words[0] == "flowrt":
        subprocess.run([sys.executable, "-m", "flowrt.cli", words[1], "--help"], check=True, timeout=60)
    elif words[0] == "python":
        assert command.removeprefix("python ") in scripts()
    else:
        assert words[0] in ("git", "cd"), f"what is {words[0]}?"


def test_every_block_of_the_readme_is_one_of_commands_or_a_drawing() -> None:
    """Nothing in it stays unchecked."""
    assert set(re.findall(r"^```(.*)\n(?:[^`].*\n|\n)*```", README, re.MULTILINE)) == {"sh", "mermaid"}
    assert README.count("```") == 2 * len(re.findall(r"^```(?:sh|mermaid)$", README, re.MULTILINE))


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110


def test_the_figures_of_the_documents_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    assert sorted(figures.PAGES) == ["README.md", "docs/benchmarks.md", "docs/objectives.md"]
    for name, make in figures.PAGES.items():
        text = (ROOT / name).read_text()
        assert figures.rendered(text, make()) == text, f"{name} is out of date; run scripts/figures.py"
