"""Reads what exporters wrote, with the libraries of the tools themselves: TensorBoard, W&B, Prometheus."""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

Numbers = dict[int, dict[str, float]]
"""Numbers by step and name."""
BLOCK_BYTES = 32 << 10
RECORD_HEADER_BYTES, FILE_HEADER_BYTES = 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def tensorboard_numbers(directory: Path) -> Numbers:
    """The scalars of event files, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    found: Numbers = {}
    for tag in accumulator.Tags()["scalars"]:
        for one in accumulator.Scalars(tag):
            line = found.setdefault(one.step, {})
            assert tag not in line, f"{tag} has step {one.step} twice"
            line[tag] = one.value
    return found


def wandb_numbers(path: Path) -> Numbers:
    """The history of a .wandb file; the values of several records of a step are merged."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: Numbers = {}
    for data in _records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        values = {
            "/".join(item.nested_key) if item.nested_key else item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        found.setdefault(int(numbers["step"]), {}).update(numbers)
    return found


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
    """The metrics of the last step by their name."""
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {sample.labels["name"]: float(sample.value) for sample in families["flowrt_metric"].samples}
    return {**found, "step": float(families["flowrt_step"].samples[0].value)}


def metrics_numbers(run_dir: Path) -> Numbers:
    """The numbers of metrics.jsonl."""
    lines: list[Mapping[str, float]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        int(line["step"]): {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        for line in lines
    }
