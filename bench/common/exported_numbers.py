"""Reads what exporters wrote, with the libraries of the tools themselves: TensorBoard, W&B, Prometheus."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Numbers = dict[int, dict[str, float]]
"""Numbers by step and name."""
BLOCK_BYTES = 32 << 10
RECORD_HEADER_BYTES, FILE_HEADER_BYTES = 7, 7
NOT_OF_METRICS = ("flowrt_events", "flowrt_worker", "flowrt_live", "flowrt_oldest", "flowrt_time")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def tensorboard_numbers(directory: Path) -> Numbers:
    """The scalars of event files, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    by_step: Numbers = {}
    for tag in accumulator.Tags()["scalars"]:
        for scalar in accumulator.Scalars(tag):
            line = by_step.setdefault(scalar.step, {})
            assert tag not in line, f"{tag} has step {scalar.step} twice"
            line[tag] = scalar.value
    return by_step


def wandb_numbers(path: Path) -> Numbers:
    """The history of a .wandb file; the values of several records of a step are merged."""
    by_step: Numbers = {}
    for line in wandb_history(path):
        numbers = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        by_step.setdefault(int(numbers["step"]), {}).update(numbers)
    return by_step


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """The records of a .wandb file's history."""
    return [
        {
            "/".join(item.nested_key) if item.nested_key else item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in _wandb_records(path)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_run(path: Path) -> Any:
    """The record of a .wandb file that describes its run: ``run_id``, ``display_name``, ``project`` …"""
    return next(record.run for record in _wandb_records(path) if record.WhichOneof("record_type") == "run")


def _wandb_records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        yield record


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, after W&B's header."""
    assert data[:4] == b":W&B"
    position, parts = FILE_HEADER_BYTES, b""
    while position + RECORD_HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < RECORD_HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += RECORD_HEADER_BYTES
        parts += data[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def prometheus_numbers(text: str) -> dict[str, float]:
    """The gauges without labels that come from metrics.jsonl, by name."""
    from prometheus_client.parser import text_string_to_metric_families

    families = [family for family in text_string_to_metric_families(text) if not family.name.startswith(NOT_OF_METRICS)]
    return {family.name: float(family.samples[0].value) for family in families}


def metrics_numbers(run_dir: Path) -> Numbers:
    """The numbers of metrics.jsonl."""
    lines: list[Mapping[str, float]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        int(line["step"]): {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        for line in lines
    }
