"""Bad input is refused with exit code 2 and one sentence that names the thing and the fix; nothing is written."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FLOWRT = Path(sys.executable).with_name("flowrt")
LONGEST_SENTENCE = 400


class Refusal:
    """The end of a command that was given bad input."""

    def __init__(self, ended: subprocess.CompletedProcess[str]) -> None:
        self.code = ended.returncode
        self.stdout = ended.stdout
        self.stderr = ended.stderr

    def sentence(self) -> str:
        """The one line on stderr."""
        assert self.code == 2, self.stderr
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("flowrt: ")
        assert len(lines[0]) < LONGEST_SENTENCE
        return lines[0]

    def box(self) -> str:
        """What the command-line parser says, without its frame."""
        assert self.code == 2, self.stderr
        assert "Traceback" not in self.stderr
        return " ".join("".join(" " if c in "╭╮╰╯│─" else c for c in self.stderr).split())


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., Refusal]:
    """Run ``flowrt run ARGUMENTS --run-dir FRESH``; whatever it says, it must leave no file behind."""

    def run(*arguments: str, run_dir: Path | None = None) -> Refusal:
        before = tree(tmp_path)
        ended = subprocess.run(
            [str(FLOWRT), "run", *arguments, "--run-dir", str(run_dir or tmp_path / "run")],
            cwd=tmp_path,
            timeout=60,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert "Traceback" not in ended.stderr, ended.stderr
        assert tree(tmp_path) == before
        return Refusal(ended)

    return run


def tree(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


def write_rows(path: Path, *rows: object) -> str:
    """A data file; text is written as it is, anything else as JSON."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def row(question: str = "One and one?", answer: str = "1+1=2\n#### 2") -> dict[str, str]:
    return {"question": question, "answer": answer}


@pytest.fixture
def model_shell(tmp_path: Path) -> str:
    """What looks like a checkpoint from outside; for runs that end before anybody loads it."""
    path = tmp_path / "shell"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    (path / "tokenizer.json").write_text("{}")
    return str(path)


@pytest.fixture
def held_port() -> Iterator[int]:
    """A port of this machine on which somebody listens, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]


# ---- data


def test_a_recipe_that_needs_data_says_how_to_give_it(refused: Callable[..., Refusal]) -> None:
    said = refused("gsm8k").sentence()
    assert "gsm8k" in said
    assert "--data" in said


def test_missing_data_file(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    said = refused("gsm8k", "--data", "nowhere.jsonl").sentence()
    assert str(tmp_path / "nowhere.jsonl") in said
    assert "does not exist" in said
    assert "--data" in said


@pytest.mark.parametrize("content", ["", "\n\n"], ids=["no byte", "only blank lines"])
def test_empty_data_file(refused: Callable[..., Refusal], tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    said = refused("gsm8k", "--data", str(path)).sentence()
    assert f"{path} is empty" in said
    assert "at least one row" in said


def test_malformed_line_is_named_by_its_number(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), "", '{"question": "Half', row())
    said = refused("gsm8k", "--data", data).sentence()
    assert f"{data}, line 3 " in said
    assert "JSON" in said


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
def test_row_without_the_field(
    refused: Callable[..., Refusal], tmp_path: Path, bad: object, expected: list[str]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), bad, row())
    said = refused("gsm8k", "--data", data, "--data.eval-prompts", "1").sentence()
    for part in [data, *expected]:
        assert part in said


def test_solution_without_a_final_number(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), row(answer="it is two"), row())
    said = refused("gsm8k", "--data", data, "--data.eval-prompts", "1").sentence()
    assert f"{data}, row 2" in said
    assert "#### number" in said


def test_fewer_rows_than_are_held_out(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", row(), row())
    said = refused("gsm8k", "--data", data, "--data.eval-prompts", "2").sentence()
    assert "2 rows" in said
    assert "data.eval_prompts=2" in said


# ---- model


def test_model_directory_does_not_exist(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    path = tmp_path / "no-model"
    said = refused("--model", str(path)).sentence()
    assert str(path) in said
    assert "no directory" in said
    assert "config.json" in said


def test_directory_is_no_model(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    said = refused("--model", str(tmp_path)).sentence()
    assert str(tmp_path) in said
    assert "no config.json" in said


def test_model_without_weights(refused: Callable[..., Refusal], model_shell: str) -> None:
    Path(model_shell, "model.safetensors").unlink()
    said = refused("--model", model_shell).sentence()
    assert model_shell in said
    assert "no weights" in said
    assert "download" in said


def test_model_without_tokenizer(refused: Callable[..., Refusal], model_shell: str) -> None:
    Path(model_shell, "tokenizer.json").unlink()
    said = refused("--model", model_shell).sentence()
    assert model_shell in said
    assert "no tokenizer" in said


# ---- values and flags


def test_negative_staleness(refused: Callable[..., Refusal]) -> None:
    said = refused("--staleness", "-1").sentence()
    assert "staleness is -1" in said
    assert "0 or more" in said


def test_group_of_one_with_the_standard_deviation(refused: Callable[..., Refusal]) -> None:
    said = refused("--group-size", "1").sentence()
    assert "group_size is 1" in said
    assert "standard deviation" in said
    assert "--loss.normalize False" in said


def test_zero_steps(refused: Callable[..., Refusal]) -> None:
    said = refused("--steps", "0").sentence()
    assert "steps is 0" in said
    assert "above 0" in said


def test_unknown_flag_suggests_the_right_one(refused: Callable[..., Refusal]) -> None:
    said = refused("--group-sise", "4").box()
    assert "--group-sise" in said
    assert "--group-size" in said


def test_unknown_recipe_suggests_the_right_one(refused: Callable[..., Refusal]) -> None:
    said = refused("arithmetik").sentence()
    assert "'arithmetik'" in said
    assert "did you mean 'arithmetic'?" in said


@pytest.mark.parametrize(
    ("flag", "value"), [("--steps", "many"), ("--trainer.lr", "fast"), ("--deterministic", "perhaps")]
)
def test_wrong_type_on_a_flag(refused: Callable[..., Refusal], flag: str, value: str) -> None:
    said = refused(flag, value).box()
    assert flag in said
    assert value in said


def test_unknown_command_names_the_right_one() -> None:
    ended = subprocess.run([str(FLOWRT), "ran"], timeout=30, capture_output=True, text=True)
    said = Refusal(ended).sentence()
    assert "'ran'" in said
    assert said.endswith("run")


# ---- TOML


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("group_sise = 4", ["'group_sise'", "did you mean 'group_size'?"]),
        ("[trainer]\nlearning_rte = 1.0", ["'trainer.learning_rte'"]),
        ("[rollout]\nworker = 1", ["'rollout.worker'", "did you mean 'workers'?"]),
        ('steps = "many"', ["'steps'", "takes int", "str 'many'"]),
        ("steps = true", ["'steps'", "takes int", "bool"]),
        ("[trainer]\nlr = [1.0]", ["'trainer.lr'", "takes float", "list"]),
        ("trainer = 1", ["'trainer'", "table"]),
        ('recipe = "gsm9k"', ["'gsm9k'", "did you mean 'gsm8k'?"]),
        ("steps == 4", ["no TOML", "line 1"]),
    ],
)
def test_mistakes_in_toml(refused: Callable[..., Refusal], tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    said = refused("--config", str(path)).sentence()
    for part in expected:
        assert part in said
    assert str(path) in said or "recipe" in text


def test_config_file_is_missing(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    said = refused("--config", "nowhere.toml").sentence()
    assert "nowhere.toml" in said
    assert "No such file" in said


def test_config_file_and_command_line_disagree_on_the_recipe(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('recipe = "gsm8k"')
    said = refused("arithmetic", "--config", "run.toml").sentence()
    assert "'gsm8k'" in said
    assert "'arithmetic'" in said


# ---- run directory


def test_run_directory_already_holds_something(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    said = refused(run_dir=used).sentence()
    assert str(used) in said
    assert "already holds something" in said
    assert "--run-dir" in said
    assert (used / "notes.txt").read_text() == "mine"


def test_run_directory_is_a_file(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    said = refused(run_dir=path).sentence()
    assert str(path) in said
    assert "--run-dir" in said
    assert path.read_text() == "mine"


def test_run_directory_cannot_be_made(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    said = refused(run_dir=path / "run").sentence()
    assert str(path / "run") in said
    assert "--run-dir" in said


# ---- addresses


def test_controller_port_in_use(refused: Callable[..., Refusal], model_shell: str, held_port: int) -> None:
    address = f"tcp://127.0.0.1:{held_port}"
    said = refused("--model", model_shell, "--controller.bind", address).sentence()
    assert f"{address} is in use" in said
    assert "another port" in said


def test_controller_port_in_use_is_noticed_before_the_model_is_built(
    refused: Callable[..., Refusal], held_port: int, tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{held_port}"
    refusal = refused("--controller.bind", address, "--warm-start.steps", "0", run_dir=tmp_path / "runs" / "first")
    assert "is in use" in refusal.sentence()
    assert "building the model" not in refusal.stdout


@pytest.mark.parametrize("address", ["somewhere", "tcp://127.0.0.1", "tcp://127.0.0.1:70000", "tcp://127.0.0.1:http"])
def test_malformed_bind_address(refused: Callable[..., Refusal], model_shell: str, address: str) -> None:
    said = refused("--model", model_shell, "--controller.bind", address).sentence()
    assert address in said
    assert "tcp://HOST:PORT" in said


def worker(address: str) -> tuple[int, str]:
    """Start a reward worker that looks for its controller for a second; its exit code and what it said."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    ended = subprocess.run(
        [sys.executable, "-m", "flowrt.workers.reward", "--controller", address, "--join-s", "1"],
        timeout=90,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("listening", [False, True], ids=["nobody listens", "somebody listens and is silent"])
def test_worker_whose_controller_does_not_answer(listening: bool, held_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free_port = closed.getsockname()[1]
    address = f"tcp://127.0.0.1:{held_port if listening else free_port}"
    code, said = worker(address)
    lines = said.splitlines()
    assert len(lines) == 1, said
    assert "waited 1 s" in lines[0]
    assert f"controller at {address}" in lines[0]
    assert code == 2


def test_worker_with_a_malformed_controller_address() -> None:
    code, said = worker("somewhere:http")
    lines = said.splitlines()
    assert len(lines) == 1, said
    assert "'somewhere:http'" in lines[0]
    assert "tcp://HOST:PORT" in lines[0]
    assert code == 2
