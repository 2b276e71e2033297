"""A first run of a user's own task: a chat model, a file of conversations, `--reward math`."""

import json
import subprocess
import tempfile
import time
from pathlib import Path

from common.jobs import FLOWRT, flowrt

from flowrt.engines.hf import save_model
from flowrt.engines.tiny_model import build_model
from tests.proofs.chat_models import FAMILIES, chat_tokenizer

ROWS = 1_000
POLL_S = 0.05
TIMEOUT_S = 300.0


def first_step(quick: bool) -> dict[str, float]:  # noqa: ARG001 (takes seconds)
    """Seconds of `flowrt data check`, and from the command of a run to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        model, data, run_dir = (Path(folder) / name for name in ("model", "rows.jsonl", "run"))
        write_model(model)
        with data.open("w") as file:
            for n in range(ROWS):
                prompt = [{"role": "user", "content": f"What is {n} plus one?"}]
                file.write(json.dumps({"prompt": prompt, "answer": str(n + 1)}) + "\n")
        own = ("--model", model, "--data", data)
        check_s = flowrt("data", "check", *own)
        start_s = time.monotonic()
        words = [*FLOWRT, "run", *map(str, own), "--reward", "math", "--steps", "3", "--run-dir", str(run_dir)]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as run:
            try:
                step_s = _until_first_step(run, run_dir / "metrics.jsonl", start_s)
            finally:
                run.terminate()
    return {"first_check_s": check_s, "first_step_s": step_s}


def _until_first_step(run: "subprocess.Popen[bytes]", metrics: Path, start_s: float) -> float:
    """Seconds until the run has written a line of metrics. Raises RuntimeError if it ends before, or is too late."""
    while not (metrics.is_file() and b"\n" in metrics.read_bytes()):
        if run.poll() is not None:
            raise RuntimeError(f"the run ended with {run.returncode} before its first step")
        if time.monotonic() - start_s > TIMEOUT_S:
            raise RuntimeError(f"the run has not done its first step within {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    return time.monotonic() - start_s


def write_model(path: Path) -> None:
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    model = build_model(
        vocab_size=len(tokenizer), hidden_size=64, layers=2, heads=2, intermediate_size=128, max_length=512, seed=0
    )
    save_model(model, tokenizer, path)
