"""``flowrt time``: the table and sentences of a run's time, for whole and damaged run directories."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowrt.controller.attribution.causes import KINDS
from flowrt.errors import ConfigError
from flowrt.launcher.views.time import show, steps_range
from flowrt.observability.attribution import add_up


def line(step: int, busy: float, gate: float) -> dict[str, object]:
    seconds = {**dict.fromkeys(KINDS, 0.0), "busy": busy, "gate": gate, "other": 1.0 - busy - gate}
    trainer = {**dict.fromkeys(KINDS, 0.0), "busy": 1.0}
    return {
        "step": step,
        "from_s": float(step),
        "to_s": step + 1.0,
        "roles": {"rollout": {"workers": 2, **seconds}, "trainer": {"workers": 1, **trainer}},
        "roots": [["rollout", "gate", "trainer", 0.6 * gate], ["rollout", "gate", "rollout-1", 0.4 * gate]],
        "worst": {"gate": [["rollout-0", 0.7 * gate], ["rollout-1", 0.3 * gate]]},
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").touch()
    lines = [line(0, 0.5, 0.4), line(1, 0.3, 0.6), line(2, 0.1, 0.8)]
    (tmp_path / "attribution.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in lines) + '{"step": 3, "fr\n'
    )
    return tmp_path


def shown(run_dir: Path, steps: str = "", worker: str = "", *, as_json: bool = False) -> str:
    out = io.StringIO()
    show(run_dir, steps, worker, Console(file=out, width=80), as_json=as_json)
    return out.getvalue()


def test_the_table_has_shares_and_a_sentence_for_each_role(run_dir: Path) -> None:
    text = shown(run_dir)
    assert "steps 0 to 2, 0.0 s to 3.0 s" in text
    row = next(text for text in text.splitlines() if "rollout" in text)
    assert row.split()[:5] == ["2", "rollout", "30.0", "-", "60.0"]
    assert "rollout: 60 % behind the gate, because of the trainer (60 %)" in text
    assert "trainer: 100 % busy" in text
    assert "1 damaged lines" in text


@given(st.dictionaries(st.sampled_from(["trainer", "rollout-0", "rollout-1", "reward-0"]), st.floats(0.01, 10)))
def test_a_root_is_named_if_it_explains_half_of_a_wait(seconds: dict[str, float]) -> None:
    roots = [["rollout", "gate", root, length_s] for root, length_s in seconds.items()]
    total_s = sum(seconds.values()) or 1.0
    roles = {"rollout": {"workers": 1, **dict.fromkeys(KINDS, 0.0), "gate": total_s}}
    sentence = add_up([{"step": 0, "from_s": 0.0, "to_s": 1.0, "roles": roles, "roots": roots, "worst": {}}]).sentence(
        "rollout"
    )
    largest = max(seconds, key=lambda root: seconds[root], default="")
    text = f"{seconds.get(largest, 0.0) / total_s:.0%}".replace("%", " %")
    because = f", because of several ({largest} {text})"
    if not largest:
        because = ""
    elif seconds[largest] >= total_s / 2:
        because = f", because of {largest} ({text})"
    assert sentence == f"rollout: 100 % behind the gate{because}"


def test_the_steps_option_selects_a_range(run_dir: Path) -> None:
    assert "rollout: 60 % behind the gate" in shown(run_dir, "1")
    assert "rollout: 70 % behind the gate" in shown(run_dir, "1:")
    assert json.loads(shown(run_dir, ":1", as_json=True))["steps"] == [0, 1]
    with pytest.raises(ConfigError, match=r"no step of 7:9 is there; .* has steps 0 to 2"):
        shown(run_dir, "7:9")
    for invalid in ("a", "1:2:3", "-1", "5:4"):
        with pytest.raises(ConfigError, match="--steps"):
            steps_range(invalid)


def test_missing_or_damaged_data_is_reported(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing of worker 'rollout-9' .* rollout-0"):
        shown(run_dir, worker="rollout-9")
    (run_dir / "attribution.jsonl").write_text("noise\n")
    with pytest.raises(ConfigError, match="none of its 1 lines can be read"):
        shown(run_dir)
    (run_dir / "attribution.jsonl").unlink()
    with pytest.raises(ConfigError, match="it is empty or missing"):
        shown(run_dir)
    (run_dir / "config.toml").unlink()
    with pytest.raises(ConfigError, match="is not a run directory"):
        shown(run_dir)


def test_the_times_of_one_worker_come_from_the_timeline(run_dir: Path) -> None:
    from flowrt.controller.storage.timeline_file import TimelineFile

    file = TimelineFile(run_dir)
    worker = {"worker": "rollout-1", "role": "rollout"}
    file.add({**worker, "kind": "generate", "start_s": 0.0, "end_s": 1.0})
    file.add({**worker, "wait": "weights", "root": "trainer", "start_s": 1.0, "end_s": 3.0})
    file.close()
    text = shown(run_dir, worker="rollout-1")
    assert "rollout-1: 67 % waiting for weights, because of trainer (100 %)" in text
