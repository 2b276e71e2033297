"""The examples and the commands of the README work as documented."""

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

from flowrt import asyncflow
from flowrt.errors import ConfigError
from flowrt.recipes.config_io import parse
from flowrt.recipes.flags import WATCH_FLAG
from tests.integration.helpers.forked import argument_error
from tests.integration.helpers.forked_flowrt import run_flowrt

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

QUICK = [
    *("--data.eval-prompts", "0", "--sft.steps", "60", "--sft.answer-only-steps", "5", "--sft.eval-prompts", "8"),
    *("--build.hidden-size", "64", "--build.layers", "1", "--build.heads", "2", "--build.intermediate-size", "128"),
]


def output(name: str, *arguments: str) -> str:
    """What an example prints."""
    path = ROOT / "examples" / name
    completed = run_flowrt(str(path), *arguments)
    assert completed.returncode == 0, completed.stdout
    return completed.stdout


@pytest.mark.parametrize(
    ("name", "most_lines"), [("custom_loop.py", 60), ("asyncflow_service.py", 60), ("two_models.py", 85)]
)
def test_example_loop_is_short_and_learns(name: str, most_lines: int) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= most_lines
    match = re.search(r"paying arm: ([\d.]+)", output(name))
    assert match is not None
    assert float(match[1]) > 0.9


def test_stream_example_reads_all_rows_in_order_of_urgency() -> None:
    assert "64 rows, the most urgent first: True" in output("stream_dataset.py")


def test_asyncflow_example_imports_only_the_service_calls() -> None:
    text = (ROOT / "examples" / "asyncflow_service.py").read_text()
    assert re.findall(r"^from flowrt.*$", text, re.MULTILINE) == ["from flowrt import asyncflow"]
    for call in ("put_prompts_data", "get_experience_data", "put_experience_data", "weight_sync_notify"):
        assert f"calls.{call}(" in text
    assert "asyncflow.init_engines(" in text


async def test_a_generating_engine_without_tensors_ends_the_run_with_an_error() -> None:
    columns = (asyncflow.Column("prompt", "int64", "group"), asyncflow.Column("response", "int64", "slot"))
    generation = asyncflow.Stage("rollout", needs=("prompt",), makes=("response",), generates=True)
    training = asyncflow.Stage("update", needs=("response",), makes=(), flow=asyncflow.PROMPTS, whole_groups=True)

    async def data(calls: asyncflow.Service) -> None:
        await calls.put_prompts_data({"prompt": [torch.zeros(1, dtype=torch.int64)]}, samples=2)

    async def rollout(calls: asyncflow.Service) -> None:
        batch = await calls.get_experience_data("rollout", 2, {"weight": torch.zeros(1)})
        await calls.put_experience_data("rollout", batch, {"response": [0.0] * len(batch)})

    async def update(calls: asyncflow.Service) -> None:
        await calls.get_experience_data("update")

    engines = {"data": data, "rollout": rollout, "update": update}
    with pytest.raises(ConfigError, match="task rollout generates, and none of its columns is a tensor"):
        await asyncflow.init_engines(
            columns, (generation, training), engines, update="update", steps=1, prompts_per_step=1
        )


async def test_two_engines_put_prompts_of_their_own() -> None:
    columns = (asyncflow.Column("prompt", "int64", "group"), asyncflow.Column("response", "int64", "slot"))
    generation = asyncflow.Stage("rollout", needs=("prompt",), makes=("response",), generates=True)
    training = asyncflow.Stage(
        "update", needs=("prompt", "response"), makes=(), flow=asyncflow.PROMPTS, whole_groups=True
    )
    trained: list[int] = []

    def data(value: int) -> asyncflow.Engine:
        async def engine(calls: asyncflow.Service) -> None:
            while await calls.put_prompts_data({"prompt": [torch.tensor([value])]}, samples=1):
                pass

        return engine

    async def rollout(calls: asyncflow.Service) -> None:
        while batch := await calls.get_experience_data("rollout", 2, {"weight": torch.zeros(1)}):
            await calls.put_experience_data("rollout", batch, {"response": batch.tensors["prompt"]})

    async def update(calls: asyncflow.Service) -> None:
        for _ in range(6):
            while not (batch := await calls.get_experience_data("update")).closed:
                trained.extend(int(prompt) for prompt in batch.tensors["prompt"])
            await calls.weight_sync_notify({"weight": torch.zeros(1)})

    engines = {"left": data(1), "right": data(2), "rollout": rollout, "update": update}
    await asyncflow.init_engines(
        columns, (generation, training), engines, update="update", steps=6, prompts_per_step=4, micro_batch_tokens=8
    )
    assert len(trained) == 24
    assert set(trained) == {1, 2}


@pytest.fixture(scope="module")
def custom_trainer_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose trainer is the example's."""
    run_dir = tmp_path_factory.mktemp("own") / "run"
    printed = output("custom_trainer.py", "--steps", "4", "--prompts-per-step", "8", "--run-dir", str(run_dir), *QUICK)
    assert re.search(r"4 steps, mean reward ([\d.]+) -> ([\d.]+)", printed) is not None, printed
    return run_dir


def test_custom_trainer_trains_a_run(custom_trainer_run: Path) -> None:
    """The metrics are those of the custom trainer, and the weights that it trained are written."""
    steps = [json.loads(line) for line in (custom_trainer_run / "metrics.jsonl").read_text().splitlines()]
    assert max(step["grad_norm"] for step in steps) > 0
    assert not any("lr" in step for step in steps)
    before, after = (load_file(custom_trainer_run / name / "model.safetensors") for name in ("model", "final"))
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_custom_rollout_engine_generates_for_a_run(custom_trainer_run: Path) -> None:
    printed = output(
        "custom_rollout.py",
        *("--model", str(custom_trainer_run / "model"), "--steps", "3", "--data.eval-prompts", "0"),
    )
    match = re.search(r"3 steps, mean reward ([\d.]+)", printed)
    assert match is not None, printed
    assert 0 < float(match[1]) <= 1


@pytest.mark.parametrize("name", ["custom_trainer.py", "custom_rollout.py"])
def test_custom_engine_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) <= 60


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip().removeprefix(".venv/bin/") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def scripts() -> list[str]:
    """The Python commands of the documents, in blocks and within sentences, without variables set before them."""
    matches = (
        re.findall(r"python ((?:-m|bench|scripts|launch|workers)\b[^`#\n]*)", document.read_text())
        for document in DOCUMENTS
    )
    return sorted({words.strip() for some in matches for words in some})


def test_the_documents_contain_commands() -> None:
    assert len(commands()) >= 4
    assert len(scripts()) >= 12


@pytest.mark.parametrize("command", scripts())
def test_documented_scripts_accept_their_documented_flags(command: str) -> None:
    assert argument_error(shlex.split(command)) == ""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("bench/passes.py --quick --made-up 3", "--made-up 3"),
        ("bench/compare_trl.py --baseline-python PYTHON --no-compiling", "--no-compiling"),
        ("bench/compare_trl.py --baseline-python PYTHON --dtypes float99", "invalid choice: 'float99'"),
        ("bench/compare_trl.py --no-compile", "required: --baseline-python"),
    ],
)
def test_wrong_script_arguments_are_detected(command: str, expected: str) -> None:
    assert expected in argument_error(shlex.split(command))


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_exists(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
        assert words[1] in targets
    elif words[:2] == ["flowrt", "run"]:
        flags = " ".join(shlex.quote(word) for word in words[2:]).replace("--model DIR", "")  # DIR would have to exist
        assert parse([flag for flag in shlex.split(flags) if flag != WATCH_FLAG]).steps > 0
    elif words[0] == "flowrt":
        subprocess.run([sys.executable, "-m", "flowrt.cli", words[1], "--help"], check=True, timeout=600)
    elif words[0] == "python":
        assert command.removeprefix("python ") in scripts()
    else:
        assert words[0] in ("git", "cd"), f"unknown command {words[0]}"


def test_every_block_of_the_readme_has_commands_or_a_diagram() -> None:
    """Other blocks would not be tested."""
    assert set(re.findall(r"^```(.*)\n(?:[^`].*\n|\n)*```", README, re.MULTILINE)) == {"sh", "mermaid"}
    assert README.count("```") == 2 * len(re.findall(r"^```(?:sh|mermaid)$", README, re.MULTILINE))


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 110


def test_the_figures_of_the_documents_match_the_results() -> None:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    assert sorted(figures.PAGES) == ["README.md", "docs/benchmarks.md", "docs/guides/models.md", "docs/objectives.md"]
    for name in figures.PAGES:
        text = (ROOT / name).read_text()
        assert figures.rendered(text, figures.figures(name)) == text, f"{name} is out of date; run scripts/figures.py"
