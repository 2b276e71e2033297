"""All measurements that need a GPU, part by part.

    python bench/gpu.py [--json PATH] [--parts PART ...] [--quick] [--device cuda]

Each part is a process with a time limit, so that a failing or hanging part does not affect the others;
``PART_exit_code`` is its exit code. Not run on a GPU yet; ``--device cpu --quick`` tries all parts on the CPU.

- tests: the tests marked gpu.
- weights: snapshot and swap of the weights of a 7B model.
- generation: eager decoding and CUDA graphs, a model of 0.6 billion parameters.
- training: steps of that model with shared and padded prompts, memory relative to the estimate, a checkpoint.
- overlap: generation and training at the same time.
- job: the default job, trainer and rollout workers on the device.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerator import engines
from accelerator.overlap import overlap as overlap_on
from accelerator.weights import measure_on_gpu
from common.harness import ROOT, Bench, Figures, Options, Part
from common.jobs import run_job
from main_job import metrics_of

from flowrt.errors import EXIT_BAD_INPUT, ConfigError
from flowrt.transport.devices import Device, choose

LIMITS_S = {"tests": 900.0, "weights": 300.0, "generation": 600.0, "training": 600.0, "overlap": 900.0, "job": 600.0}
HUNG = -1


def tests(device: Device, quick: bool) -> Figures:  # noqa: ARG001 (the same arguments for all parts)
    """The exit code of the tests marked gpu, which are skipped on a CPU."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    if device.kind == "cuda":
        words += ["--must", "gpu"]
    return {"tests_exit_code": float(subprocess.run(words, cwd=ROOT, check=False).returncode)}


def weights(device: Device, quick: bool) -> Figures:
    """Snapshot and swap of the weights of a 7B model."""
    return measure_on_gpu(quick) if device.kind == "cuda" else {}


def overlap(device: Device, quick: bool) -> Figures:
    """Generation and training at the same time."""
    return overlap_on(device.kind, quick)


def job(device: Device, quick: bool) -> Figures:
    """The default job on the device: rewards, throughput and busy shares of the roles."""
    small = ("--sft.steps", 20, "--data.eval-prompts", 8) if quick else ()
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        words = ("--steps", 3 if quick else 120, "--device", device.kind, *small)
        return metrics_of([run_job(Path(folder) / "run", *words)], 1)


MEASURED: dict[str, Callable[[Device, bool], Figures]] = {
    "tests": tests,
    "weights": weights,
    "generation": engines.generation,
    "training": engines.training,
    "overlap": overlap,
    "job": job,
}


def isolated(name: str) -> Part:
    """A part in a process of its own, with a time limit."""

    def part(options: Options) -> Figures:
        device = device_of(options)
        if options.here:
            device.use()
            return MEASURED[name](device, options.quick)
        with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
            path = Path(folder) / "figures.json"
            words = ["--here", "--parts", name, "--device", options.device, "--json", str(path)]
            words += ["--quick"] if options.quick else []
            try:
                command = [sys.executable, __file__, *words]
                code = subprocess.run(command, timeout=LIMITS_S[name], check=False).returncode
            except subprocess.TimeoutExpired:
                code = HUNG
            metrics = json.loads(path.read_text())["metrics"] if path.exists() else {}
        return {f"{name}_exit_code": float(code), **{f"{name}_{key}": value for key, value in metrics.items()}}

    part.__doc__ = MEASURED[name].__doc__
    return part


def device_of(options: Options) -> Device:
    """The device that is measured. Raises SystemExit without one."""
    try:
        return choose(options.device)
    except ConfigError as error:
        print(f"there is no GPU to measure: {error}")
        raise SystemExit(EXIT_BAD_INPUT) from None


def machine(options: Options) -> dict[str, Any]:
    device = device_of(options)
    name = torch.cuda.get_device_name(device.index) if device.kind == "cuda" else device.kind
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda or "none"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", help="cuda, npu, or cpu")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)


BENCH = Bench(
    about=__doc__,
    parts={name: isolated(name) for name in MEASURED},
    most={f"{name}_exit_code": 0.0 for name in MEASURED},
    add_options=add_options,
    machine=machine,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(BENCH.main())
