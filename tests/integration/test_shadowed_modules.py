"""Files of the user in the current directory may have the names of modules of Python."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FLOWRT = Path(sys.executable).with_name("flowrt")
ALGORITHM = Path(__file__).parents[2] / "examples" / "own_algorithm.py"
NAMES = ("types", "random", "queue", "copy", "json", "typing", "statistics", "secrets", "torch", "numpy", "tokenizers")
EXPORTER = """
from of_mine import VALUE

class Lines:
    def step(self, line):
        open("exported", "a").write(f"{VALUE}\\n")
    def samples(self, rows):
        import secrets
        secrets.token_hex
    def close(self):
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--algorithm.kl.coef", "0.01"),
        ("--algorithm", "objective.py:ShortReinforce", "--trainer.ranks", "2"),
    ],
    ids=["reference", "two ranks"],
)
def test_files_in_the_current_directory_hide_no_module_of_a_run(
    flags: tuple[str, ...], untrained_model: Path, tmp_path: Path
) -> None:
    """All processes of a run start there; files that are named by path import their neighbours nevertheless."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was imported')\n")
    (tmp_path / "of_mine.py").write_text("VALUE = 0.5\n")
    reward = "from of_mine import VALUE\nimport random, statistics\ndef reward(response, answer):\n"
    (tmp_path / "mine.py").write_text(f"{reward}    return random.random() * VALUE\n")
    (tmp_path / "objective.py").write_text(f"{ALGORITHM.read_text()}\nfrom of_mine import VALUE\n")
    (tmp_path / "lines.py").write_text(EXPORTER)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": "7"}) + "\n" for n in range(8))
    )
    completed = subprocess.run(
        [
            *(str(FLOWRT), "run", "custom", "--data", "rows.jsonl", "--reward", "mine.py", "--run-dir", "run"),
            *("--model", str(untrained_model), "--rollout.max-new-tokens", "8", "--data.eval-prompts", "0"),
            *("--steps", "1", "--prompts-per-step", "4", "--group-size", "2", "--rollout.workers", "1"),
            *("--exporters", "lines.py:Lines", *flags),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log"))
    assert completed.returncode == 0, completed.stdout + completed.stderr + logs
    assert "was imported" not in completed.stdout + completed.stderr + logs
    assert (tmp_path / "exported").read_text()


@pytest.mark.parametrize("module", ["flowrt", "flowrt.cli"])
def test_files_in_the_current_directory_hide_no_module_of_a_command(tmp_path: Path, module: str) -> None:
    for name in {*NAMES, "argparse", "dataclasses", "pathlib"} - {"types"}:  # Python itself needs types before flowrt
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was imported')\n")
    completed = subprocess.run(
        [sys.executable, "-m", module, "keys", "made"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "made").is_dir()


def test_a_package_of_the_user_that_imports_flowrt_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import flowrt\n")
    (tmp_path / "mine" / "train.py").write_text("import neighbour\nprint(neighbour.VALUE)\n")
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    command = [sys.executable, "-m", "mine.train", "-m", "flowrt"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert completed.stdout == "7\n", completed.stderr
