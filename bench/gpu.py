"""All measurements that need a GPU, part by part.

    python bench/gpu.py [--json PATH] [--logs DIR] [--parts NAME ...] [--quick] [--device cuda]

Each part is a process with a time limit and a log of its own; its metrics are written as soon as it has ended, so that
a failing or hanging part does not affect the others. Not run on a GPU yet; ``--device cpu --quick`` tries all parts on
the CPU.

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

import torch
from common.report import write
from rich.console import Console

from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, ConfigError
from flowrt.transport.devices import Device, choose

ROOT = Path(__file__).parents[1]
LIMITS_S = {"tests": 900.0, "weights": 300.0, "generation": 600.0, "training": 600.0, "overlap": 900.0, "job": 600.0}
CONSOLE = Console(width=120)


def tests(device: Device, quick: bool) -> dict[str, float]:  # noqa: ARG001 (the same arguments for all parts)
    """The exit code of the tests marked gpu, which are skipped on a CPU."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
    if device.kind == "cuda":
        words += ["--must", "gpu"]
    return {"tests_exit_code": float(subprocess.run(words, cwd=ROOT, check=False).returncode)}


def weights(device: Device, quick: bool) -> dict[str, float]:
    from weight_sync.gpu import measure_on_gpu

    return measure_on_gpu(quick, CONSOLE) if device.kind == "cuda" else {}


def generation(device: Device, quick: bool) -> dict[str, float]:
    from accelerator import engines

    return engines.generation(device, quick)


def training(device: Device, quick: bool) -> dict[str, float]:
    from accelerator import engines

    return engines.training(device, quick)


def overlap(device: Device, quick: bool) -> dict[str, float]:
    from accelerator.overlap import overlap as measure

    return measure(device.kind, quick)


def job(device: Device, quick: bool) -> dict[str, float]:
    """The default job on the device: rewards, throughput and busy shares of the roles."""
    from main_job import metrics_of, run_job

    small = ["--sft.steps", "20", "--data.eval-prompts", "8"] if quick else []
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        result = run_job(Path(folder) / "run", 0, 1, 3 if quick else 120, "--device", device.kind, *small)
    return metrics_of([result], 1)


PARTS: dict[str, Callable[[Device, bool], dict[str, float]]] = {
    "tests": tests,
    "weights": weights,
    "generation": generation,
    "training": training,
    "overlap": overlap,
    "job": job,
}


def run_part(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The metrics of a part, run in a process of its own; its exit code is one of them."""
    path, log = folder / f"{name}.json", arguments.logs / f"{name}.log"
    words = [sys.executable, __file__, "--part", name, "--device", arguments.device, "--json", str(path)]
    words += ["--quick"] if arguments.quick else []
    with log.open("w") as out:
        try:
            code = subprocess.run(
                words, stdout=out, stderr=subprocess.STDOUT, timeout=LIMITS_S[name], check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    found: dict[str, float] = json.loads(path.read_text())["metrics"] if path.exists() else {}
    lines = ", ".join(f"{key} {value:.4g}" for key, value in found.items())
    CONSOLE.print(f"{name}: {lines or f'nothing, exit code {code}, see {log}'}", highlight=False, soft_wrap=True)
    return {f"{name}_exit_code": float(code), **{f"{name}_{key}": value for key, value in found.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write {metrics, machine} here")
    parser.add_argument("--logs", type=Path, default=Path("gpu_logs"), help="directory of the logs")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="which parts")
    parser.add_argument("--quick", action="store_true", help="models of 100,000 parameters, few rounds")
    parser.add_argument("--device", default="cuda", help="cuda, npu, or cpu")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        device = choose(arguments.device)
    except ConfigError as error:
        CONSOLE.print(f"there is no GPU to measure: {error}", highlight=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    name = torch.cuda.get_device_name(device.index) if device.kind == "cuda" else device.kind
    if arguments.part:
        torch.set_num_threads(1)
        device.use()
        write(arguments.json, PARTS[arguments.part](device, arguments.quick), device=name)
        return EXIT_OK
    arguments.logs.mkdir(parents=True, exist_ok=True)
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        for part in arguments.parts:
            metrics |= run_part(part, arguments, Path(folder))
            write(
                arguments.json,
                metrics,
                device=name,
                torch=torch.__version__,
                cuda=torch.version.cuda or "none",
                quick=arguments.quick,
            )
    failed = [part for part in arguments.parts if metrics[f"{part}_exit_code"]]
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
