"""Digests of the files of a run: another content is noticed, another time or place of a file is not."""

import json
import os
from pathlib import Path

import pytest

from flowrt.recipes import input_digests as module
from flowrt.recipes.config import RunConfig, changed
from flowrt.recipes.config_io import parse
from flowrt.recipes.input_digests import changed_inputs, input_digests


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run with a data file, a directory of data for evaluation, and a file of rewards; with its digests."""
    rows = "".join(json.dumps({"prompt": f"{number}"}) + "\n" for number in range(1000))
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "test.jsonl").write_text(rows)
    (tmp_path / "eval" / "train.jsonl").write_text(rows)
    (tmp_path / "mine.py").write_text("def reward(response):\n    return 1.0\n")
    config = parse(
        [
            *("custom", "--data", str(tmp_path / "train.jsonl"), "--eval.data", f"held={tmp_path / 'eval'}"),
            *("--reward", f"{tmp_path / 'mine.py'}:reward"),
        ]
    )
    return changed(config, {"input_digests": input_digests(config)})


@pytest.mark.parametrize("name", ["train.jsonl", "eval/test.jsonl", "mine.py"])
@pytest.mark.parametrize("limit", [1 << 20, 4096])
def test_files_whose_content_has_changed_are_named(
    config: RunConfig, tmp_path: Path, name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_BYTES", limit)
    config = changed(config, {"input_digests": input_digests(config)})
    file = tmp_path / name
    text = file.read_bytes()
    os.utime(file, (1, 1))
    (tmp_path / "eval" / "train.jsonl").write_text("not read by the run")
    assert changed_inputs(config) == []
    file.write_bytes(text[:-3] + b"x" + text[-2:])
    [sentence] = changed_inputs(config)
    assert sentence.startswith(f"{file.parent if file.parent != tmp_path else file} is not the file of the start")
    file.write_bytes(text + b"\n")
    assert len(changed_inputs(config)) == 1
    file.write_bytes(text)
    assert changed_inputs(config) == []


def test_a_run_without_digests_is_not_compared(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    assert changed_inputs(changed(config, {"input_digests": ()})) == []
    assert changed_inputs(parse(["arithmetic"])) == []
    assert input_digests(parse(["arithmetic"])) == ()
