"""Rows of bench/tasks.py on what reward functions are called with: async calls, rows that none applies to, types."""

import asyncio
import json
import subprocess
import tempfile
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from time import monotonic

import pyarrow as pa
from common.first_run import write_model
from common.jobs import run_job
from pyarrow import parquet

from flowrt.observability.stored_samples import SampleFilter, SampleReader
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.tasks.problems import problem
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result
from flowrt.rewards.scoring import RewardScorer

CALLS, CALL_S = 64, 1.0
ASYNC = f"""
import asyncio

async def reward(response, answer):
    await asyncio.sleep({CALL_S})
    return 1.0
"""
PARTIAL = """
def sums(response, kind):
    return len(response) / 8 if kind == "sum" else None

def words(response, kind):
    return len(response.split()) / 2 if kind == "word" else None
"""
KINDS = ("sum", "word", "other", "other")
TYPES = """
def described(value):
    if isinstance(value, dict):
        return {key: described(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(described, value)]
    return type(value).__name__

def reward(response, types, **columns):
    import json
    expected = json.loads(types)
    return float(sum(described(columns[name]) != one for name, one in expected.items()))
"""


def async_calls(quick: bool) -> dict[str, float]:  # noqa: ARG001 (takes seconds)
    """Seconds for 64 calls of an async function that each take one second."""
    return {"async_s": asyncio.run(_async_s())}


async def _async_s() -> float:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.py"
        file.write_text(ASYNC)
        scorer = RewardScorer(RewardOptions(functions=(str(file),)), output=subprocess.DEVNULL)
        try:
            await scorer.load()
            row, begin_s = b'{"answer": "7", "prompt": "1+1="}', monotonic()
            scored = await asyncio.gather(*(scorer.outcomes("7", row) for _ in range(CALLS)))
            took_s = monotonic() - begin_s
        finally:
            await scorer.close()
    if any(outcome.result is not Result.OK for outcome, *_ in scored):
        raise RuntimeError("an async call failed")
    return took_s


def inapplicable(quick: bool) -> dict[str, float]:
    """Samples without an applicable reward function that are trained, of a run in which half of the rows have none."""
    with tempfile.TemporaryDirectory() as folder:
        model, data, run_dir, file = (Path(folder) / name for name in ("model", "rows.jsonl", "run", "mine.py"))
        write_model(model)
        file.write_text(PARTIAL)
        rows = [
            {"prompt": [{"role": "user", "content": f"What is {n} plus one?"}], "kind": KINDS[n % len(KINDS)]}
            for n in range(200)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words: list[object] = [
            "--model",
            model,
            "--data",
            data,
            "--reward",
            f"{file}:sums",
            "--reward",
            f"{file}:words",
        ]
        words += ["--steps", 3 if quick else 10, "--prompts-per-step", 8, "--group-size", 4, "--data.eval-prompts", 0]
        words += ["--rollout.max-new-tokens", 16, "--algorithm.kl.coef", 0, "--samples.per-step", 1000]
        run_job(run_dir, *words, "--checkpoint.every", 0)
        samples = SampleReader(run_dir).query(SampleFilter(), limit=10**6).samples
    none = [sample for sample in samples if sample.reason.startswith("not_applicable")]
    trained = sum(sample.advantage is not None for sample in samples)
    if not none or not trained:
        raise RuntimeError(f"the run has {len(none)} samples without a reward and {trained} trained ones")
    return {
        "inapplicable": float(len(none)),
        "inapplicable_trained": float(sum(sample.advantage is not None for sample in none)),
    }


def types(quick: bool) -> dict[str, float]:  # noqa: ARG001 (takes a second)
    """Columns of JSON Lines and Parquet rows whose type is another one when they reach the reward function."""
    values = {
        "text": "é",
        "whole": 2**70,
        "half": 0.5,
        "flag": True,
        "nothing": None,
        "list": [1, "a", None],
        "object": {"a": {"b": [1.5]}},
        "floats": [1.0, 2.0],
        "empty": [],
    }
    binary = {
        "raw": b"\x89PNG",
        "image": {"bytes": b"\x00", "path": None},
        "day": date(2026, 1, 2),
        "at": datetime(2026, 1, 2, 3, 4, 5),
        "price": Decimal("1.50"),
        "span": timedelta(seconds=3),
        "list": [b"a"],
        "text": "x",
        "half": 0.5,
    }
    with tempfile.TemporaryDirectory() as folder:
        jsonl, arrow, file = (Path(folder) / name for name in ("rows.jsonl", "rows.parquet", "mine.py"))
        file.write_text(TYPES)
        described: dict[str, object] = {}
        exec(TYPES, described)
        of = described["described"]
        jsonl.write_text(json.dumps({"prompt": "1", **values, "types": _types(of, values)}) + "\n")
        parquet.write_table(pa.Table.from_pylist([{"prompt": "1", **binary, "types": _types(of, binary)}]), arrow)
        data = DataConfig(prompt_key="prompt")
        rows = [problem(open_rows(path).row(0), data, str(path)).answer.encode() for path in (jsonl, arrow)]
        changed = asyncio.run(_rewards(file, rows))
    return {"types": float(len(values) + len(binary)), "types_changed": sum(changed)}


def _types(described: object, values: dict[str, object]) -> str:
    assert callable(described)
    return json.dumps({name: described(value) for name, value in values.items()})


async def _rewards(file: Path, rows: list[bytes]) -> list[float]:
    scorer = RewardScorer(RewardOptions(functions=(str(file),)))
    try:
        outcomes = [(await scorer.outcomes("7", row))[0] for row in rows]
    finally:
        await scorer.close()
    for outcome in outcomes:
        if outcome.result is not Result.OK:
            raise RuntimeError(outcome.detail)
    return [outcome.value for outcome in outcomes]
