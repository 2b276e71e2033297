"""One naming scheme: a number of a run has the same name in every format that it is exported to."""

import json
from pathlib import Path

import pytest
from common.exported_numbers import tensorboard_numbers, wandb_numbers
from prometheus_client.parser import text_string_to_metric_families

from flowrt.observability.exporters.exported_names import exported_name, prometheus_name
from flowrt.observability.exporters.feed import Feed
from flowrt.observability.exporters.perfetto import write_trace
from flowrt.observability.exporters.prometheus import prometheus_text
from flowrt.observability.exporters.tensorboard_files import TensorBoardFiles
from flowrt.observability.exporters.wandb_run import WandbRun
from flowrt.observability.run_reader import RunFigures, RunReader
from tests.unit.observability.exporters.written_run import metrics, write_lines, write_run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
STEPS = 7
OF_PROMETHEUS = {"flowrt_step", "flowrt_events", "flowrt_worker_seconds"}
"""Families of what the other formats show in another way: as the x axis, as text, by step."""


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("reward", "train/reward"),
        ("reward/exact", "reward/exact"),
        ("reward/reward", "reward/reward"),
        ("eval/held_out/avg@4", "eval/held_out/avg@4"),
        ("guard_lr", "guard/lr"),
        ("guard_reward/exact", "guard/reward/exact"),
        ("reward/lone \ud800", "reward/lone ?"),
    ],
)
def test_metrics_without_a_group_are_in_the_group_train(metric: str, name: str) -> None:
    assert exported_name(metric) == name


def test_all_exporters_use_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_RUN_ID", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = write_run(tmp_path / "run", STEPS)
    lines = metrics(range(STEPS))
    lines[-1] |= {"guard_grad_norm": 3, "reward/sum of digits": 0.5, "reward/sum_of_digits": 0.25}
    write_lines(run_dir / "metrics.jsonl", lines)
    for sink in (TensorBoardFiles(tmp_path / "tb"), WandbRun(run_dir, tmp_path / "wb")):
        Feed(run_dir, sink).read_new(is_last=True)
        sink.close()
    [path] = (tmp_path / "wb" / "wandb").glob("offline-run-*/run-*.wandb")
    write_trace(run_dir, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    of_board = {name for line in tensorboard_numbers(tmp_path / "tb").values() for name in line}
    of_wandb = {name for line in wandb_numbers(path).values() for name in line if name[0] != "_"} - {"step"}
    assert of_board == of_wandb
    assert {exported_name(name) for line in lines for name in line if name != "step"} == {
        name for name in of_board if not name.startswith("time/")
    }
    assert "time/rollout/gate" in of_board
    assert {event["name"] for event in trace if event["ph"] == "C"} < of_board
    reader = RunReader(run_dir)
    reader.read_attribution()
    families = {family.name: family for family in text_string_to_metric_families(prometheus_text(reader.figures()))}
    assert families.keys() - OF_PROMETHEUS == {prometheus_name(name) for name in of_board}


def test_metrics_with_one_prometheus_name_differ_in_a_label() -> None:
    numbers = {"reward/a-b": 1.0, "reward/a_b": 2.0, 'reward/a"b': 3.0, "kl": 4.0, "events": 5.0, "worker/seconds": 1.0}
    figures = RunFigures(step=3, metrics=numbers, shares=None, seconds={("r\\", 'b"\n'): 1.5}, events={"x\ny": 2})
    text = prometheus_text(figures)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {sample.labels["name"]: sample.value for sample in families["flowrt_reward_a_b"].samples} == {
        "reward/a-b": 1.0,
        "reward/a_b": 2.0,
        'reward/a"b': 3.0,
    }
    assert [(sample.labels, sample.value) for sample in families["flowrt_train_kl"].samples] == [({}, 4.0)]
    [seconds] = families["flowrt_worker_seconds"].samples
    assert (seconds.name, seconds.labels) == ("flowrt_worker_seconds_total", {"role": "r\\", "cause": 'b"\n'})
    assert families["flowrt_worker_seconds"].type == "counter"
    assert text.count("# TYPE flowrt_worker_seconds_total ") == 1
