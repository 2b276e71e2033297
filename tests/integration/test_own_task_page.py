"""docs/guides/own-task.md leads from rows to a trained model: its programs and commands, on a small chat model."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common.chat_models import FAMILIES, chat_tokenizer

from flowrt.engines.hf import save_model
from flowrt.engines.tiny_model import build_model

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "own-task.md"
FLOWRT = Path(sys.executable).with_name("flowrt")
SMALL = [
    *("--steps", "2", "--prompts-per-step", "4", "--group-size", "2", "--rollout.max-new-tokens", "8"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--data.eval-prompts", "4"),
]
"""Flags that make the run of the page a short one."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_page_leads_from_rows_to_a_trained_model(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    model = build_model(
        vocab_size=len(tokenizer), hidden_size=32, layers=1, heads=2, intermediate_size=32, max_length=512, seed=0
    )
    save_model(model, tokenizer, tmp_path / "model")
    for program in blocks("python"):
        name = program.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(program)
    subprocess.run([sys.executable, "make_rows.py"], cwd=tmp_path, check=True, timeout=60)
    commands = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert [command[:2] for command in commands] == [["flowrt", "data"], ["flowrt", "run"], ["flowrt", "run"]]
    for number, command in enumerate(commands):
        words = [str(FLOWRT), *command[1:], *([*SMALL, "--run-dir", f"run-{number}"] if command[1] == "run" else [])]
        words = [word.replace("/models/qwen", str(tmp_path / "model")) for word in words]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    for number in (1, 2):
        assert (tmp_path / f"run-{number}" / "final" / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (tmp_path / "run-2" / "metrics.jsonl").read_text().splitlines()]
    assert [line["groups_of/plus"] + line["groups_of/minus"] for line in lines] == [4, 4]
