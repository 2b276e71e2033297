"""The programs and commands of docs/guides/own-task.md, from rows to a trained model, on a small chat model."""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from flowrt.engines.hf import save_model
from flowrt.engines.tiny_model import build_model
from tests.integration.helpers.forked_flowrt import run_flowrt
from tests.proofs.chat_families import CHAT_FAMILIES, family_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own-task.md"
KEY = "secret"
SMALL = [
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "8"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--data.eval-prompts", "4"),
]
"""Flags that shorten the runs of the guide."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_programs_and_commands_of_the_guide_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    tokenizer = family_tokenizer(CHAT_FAMILIES["qwen3"])
    model = build_model(
        vocab_size=len(tokenizer), hidden_size=32, layers=1, heads=2, intermediate_size=32, max_length=1024, seed=0
    )
    save_model(model, tokenizer, tmp_path / "model")
    for text in blocks("python"):
        name = text.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(text)
    for program in ("make_rows.py", "make_programs.py"):
        subprocess.run([sys.executable, program], cwd=tmp_path, check=True, timeout=600)
    commands = [shlex.split(line) for block in blocks("sh") for line in block.replace("\\\n", "").splitlines()]
    subcommands = [command[1] for command in commands]
    assert subcommands == [
        *("data", "run", "run", "run", "run"),
        *("data", "make_tools.py", "data", "reward", "run", "reward", "run"),
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge() as address:
        for number, command in enumerate(commands):
            if command[0] == "python":
                subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True, timeout=600)
                continue
            small = [*SMALL, "--run-dir", f"run-{number}"] if command[1] == "run" else []
            small += ["--sft.steps", "5", "--sft.eval-prompts", "8"] if command[2] == "sums.py" else []
            line = [*command[1:], *small]
            line = [word.replace("/models/qwen", str(tmp_path / "model")) for word in line]
            line = [word.replace("https://judge.example", address) for word in line]
            ended = run_flowrt(*line)
            assert ended.returncode == 0, ended.stdout
    runs = [number for number, command in enumerate(commands) if command[1] == "run" and "--help" not in command]
    for number in runs:
        assert (tmp_path / f"run-{number}" / "final" / "model.safetensors").is_file()
    sets, forms, judged = (metrics(tmp_path / f"run-{number}") for number in runs[2:])
    assert [line["groups_of/plus"] + line["groups_of/minus"] for line in sets] == [4, 4]
    assert [line["reward/judge"] for line in judged] == [0.5, 0.5]
    names = ("asked", "batch", "batch/characters", "group")
    assert all(f"reward/{name}" in line for name in names for line in forms)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class Judge(BaseHTTPRequestHandler):
    """A judge that scores every response 0.5, and requires its key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        is_allowed = self.headers["Authorization"] == f"Bearer {KEY}"
        answer = json.dumps({"choices": [{"message": {"content": "I would say 0.5"}}]}).encode()
        self.send_response(200 if is_allowed else 401)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""


@contextlib.contextmanager
def judge() -> Iterator[str]:
    """The address of a judge."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
