"""Complete runs with other objectives: a user-defined class, and several updates per step."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

OBJECTIVES = Path(__file__).parents[2] / "docs" / "objectives.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"
WITHIN_S = 150.0
SMALL = [
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "0"),
    *("--rollout.workers", "1", "--trainer.warmup-steps", "1", "--checkpoint.every", "1"),
]
BROKEN = {
    "import": ("import no_such_module\n", "ModuleNotFoundError"),
    "exit": ("raise SystemExit(3)\n", "mine.py:1: it ended the program with exit(3), while Mine was made"),
    "missing": ("class Other: ...\n", "no attribute 'Mine'"),
    "no method": ("class Mine: ...\n", "has no credit"),
    "raises": (
        EXAMPLE.read_text().replace("ShortReinforce", "Mine").replace("return [Term(", "return [1 / 0, Term("),
        "fails on two samples: ZeroDivisionError",
    ),
    "metric": (
        EXAMPLE.read_text().replace("ShortReinforce", "Mine").replace(".double().sum()", ".double()"),
        "metric 'weights' of term 'policy' is no scalar",
    ),
}


def metrics(run: Any) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_example_algorithm_is_one_short_file() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def commands() -> list[str]:
    """The commands of the section on one sample a prompt, without the program and its command."""
    section = OBJECTIVES.read_text().split("### One sample a prompt")[1].split("###")[0]
    return re.findall(r"^flowrt run (.*)$", section, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "measured"), list(zip(commands(), ({"ratio", "rejected"}, {"clip_range_factor"}), strict=True))
)
def test_the_commands_of_the_page_train(
    launch: Callable[..., Any], untrained_model: Path, command: str, measured: set[str]
) -> None:
    flags = ["--model", str(untrained_model), "--steps", "2", "--data.eval-prompts", "0", "--rollout.workers", "1"]
    run = launch(*command.split(), *flags, "--checkpoint.every", "0", "--trainer.save", "False")
    assert run.wait(WITHIN_S) == 0, run.output + run.log("trainer")
    assert len(metrics(run)) == 2
    assert all(measured <= line.keys() for line in metrics(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "ranks"),
    [("torch", "1"), *(pytest.param(name, "2", marks=pytest.mark.long) for name in ("torch", "fsdp"))],
)
def test_user_defined_objective_trains_and_resumes(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path, engine: str, ranks: str
) -> None:
    file = tmp_path / "mine.py"
    shutil.copy(EXAMPLE, file)
    flags = ["--model", str(untrained_model), "--algorithm", f"{file}:ShortReinforce", "--trainer.engine", engine]
    run = launch(*SMALL, *flags, "--trainer.ranks", ranks)
    assert run.wait(WITHIN_S) == 0, run.output + run.log("trainer")
    assert f"algorithm {file}:ShortReinforce" in run.output
    assert all(line["weights"] > 0 for line in metrics(run)), "metric of the user-defined class"
    assert "reference" not in [path.stem for path in (run.run_dir / "logs").iterdir()]
    resumed = launch("--steps", "3", resume=run.run_dir)
    assert resumed.wait(WITHIN_S) == 0, resumed.output + resumed.log("trainer")
    assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == 3


@pytest.mark.long
@pytest.mark.slow
def test_reference_model_starts_if_a_user_defined_objective_needs_it(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    text = EXAMPLE.read_text().replace("needs = Needs()", "needs = Needs(reference=True)")
    file.write_text(
        text.replace("weights_T.detach().double()", "(weights_T.detach() + 0 * tokens.reference_T).double()")
    )
    run = launch(*SMALL, "--model", str(untrained_model), "--algorithm", f"{file}:ShortReinforce")
    assert run.wait(WITHIN_S) == 0, run.output + run.log("trainer")
    assert "own_reference = true" in (run.run_dir / "config.toml").read_text()
    assert all(line["weights"] > 0 for line in metrics(run))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", pytest.param("fsdp", marks=pytest.mark.long)])
def test_several_updates_per_step_publish_one_version(launch: Callable[..., Any], sft_model: Path, engine: str) -> None:
    flags = ["--model", str(sft_model), "--algorithm", "decoupled", "--trainer.engine", engine]
    run = launch(*SMALL, *flags, "--algorithm.plan.epochs", "2")
    assert run.wait(WITHIN_S) == 0, run.output + run.log("trainer")
    assert "algorithm decoupled, with plan.epochs 2" in run.output
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (2, 2 * 4 * 4)
    events = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "published"] == [1, 2]
    # After the first update of a step the policy differs from that before the step.
    assert all(abs(line["ratio"] - 1) > 1e-6 for line in metrics(run))
    after = load_file(run.run_dir / "final" / "model.safetensors")
    before = load_file(sft_model / "model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    "name", [name if at < 1 else pytest.param(name, marks=pytest.mark.long) for at, name in enumerate(BROKEN)]
)
def test_file_without_a_valid_objective_is_refused_before_the_run(
    refused: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    text, expected = BROKEN[name]
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert expected in refused("--algorithm", f"{file}:Mine").sentence()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "algorithm"),
    [
        ("torch", "dpo_online"),
        pytest.param("torch", "decoupled", marks=pytest.mark.long),
        pytest.param("fsdp", "dpo_online", marks=pytest.mark.long),
    ],
)
def test_step_without_trainable_samples_leaves_the_weights_unchanged(
    launch: Callable[..., Any], untrained_model: Path, tmp_path: Path, engine: str, algorithm: str
) -> None:
    """All rewards are equal, so no group has a better and a worse sample; `decoupled` has advantages of 0."""
    (tmp_path / "reward.py").write_text("def reward(response, answer):\n    return 0.5\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 16)
    flags = [
        "--recipe",
        "custom",
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--reward",
        f"{tmp_path}/reward.py:reward",
    ]
    run = launch(
        *SMALL, *flags, "--model", str(untrained_model), "--algorithm", algorithm, "--trainer.engine", engine,
        "--rollout.max-new-tokens", "4",
    )  # fmt: skip
    assert run.wait(WITHIN_S) == 0, run.output + run.log("trainer")
    lines = metrics(run)
    assert [(line["loss"], line["grad_norm"]) for line in lines] == [(0.0, 0.0)] * 2
    before, after = (load_file(path / "model.safetensors") for path in (untrained_model, run.run_dir / "final"))
    if algorithm == "dpo_online":
        assert "no sample of this step is trained" in run.log("trainer")
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
