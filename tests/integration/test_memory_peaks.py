"""The estimated memory of a run, compared with the peak memory of its processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowrt.launcher.doctor.estimate import ResourceEstimate, estimate
from flowrt.launcher.doctor.model_shape import built_shape
from flowrt.recipes.config_io import parse

BUILD = [
    *("--build.hidden-size", "768", "--build.layers", "8", "--build.heads", "24"),
    *("--build.intermediate-size", "3072", "--sft.steps", "0", "--sft.answer-only-steps", "0"),
]
"""71 million parameters: no other part of a process is larger than a few copies of them."""
RUN = [
    *("--steps", "2", "--prompts-per-step", "8", "--group-size", "8", "--data.eval-prompts", "0"),
    *("--rollout.workers", "1", "--rollout.max-running-requests", "16", "--trainer.micro-batch-tokens", "512"),
    *("--trainer.forward-tokens", "512", "--checkpoint.keep", "1", "--trainer.save", "False"),
]
MIN_FRACTION = 0.5
"""Smallest peak, as a fraction of the estimate, which also covers accelerators and the largest possible step."""

pytestmark = [pytest.mark.long]


MODULES = ("flowrt.roles.", "flowrt.ranks.", "flowrt.runtime.parent_death")
"""Modules of workers, of torchrun, and of a trainer rank under torchrun."""


def peaks(run: Any) -> dict[str, int]:
    """Peak memory in bytes of a process of each role, by its module, after the end of the run."""
    highest: dict[str, int] = {}

    def poll() -> bool:
        for process in run.processes():
            try:
                arguments = process.cmdline()
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (OSError, psutil.NoSuchProcess):
                continue
            role = next((word for word in " ".join(arguments).split() if word.startswith(MODULES)), "")
            if "VmHWM:" in status:
                bytes_now = 1024 * int(status.split("VmHWM:")[1].split()[0])
                highest[role] = max(highest.get(role, 0), bytes_now)
        return bool((run.run_dir / "summary.json").is_file())

    run.wait_for(poll, "end of the run", 240.0)
    assert run.wait(60.0) == 0, run.output
    return highest


@pytest.mark.parametrize(
    ("flags", "trainer"),
    [
        (["--rollout.weight-update", "in_flight"], "flowrt.roles.trainer"),
        pytest.param(
            ["--trainer.engine", "fsdp", "--trainer.fsdp.dtype", "bfloat16"],
            "flowrt.roles.trainer",
            marks=pytest.mark.long,
        ),
        (
            ["--trainer.engine", "fsdp", "--trainer.ranks", "2", "--trainer.fsdp.gather", "pass"],
            "flowrt.runtime.parent_death",
        ),
    ],
    ids=["torch", "fsdp", "two_ranks"],
)
def test_no_process_exceeds_its_estimated_memory(flags: list[str], trainer: str, launch: Callable[..., Any]) -> None:
    arguments = [*BUILD, *RUN, *flags]
    config = parse(arguments)
    needs: ResourceEstimate = estimate(config, built_shape(config))
    peak_bytes = peaks(launch(*arguments))
    estimated = {
        trainer: needs.trainer_rank + needs.trainer_first + needs.trainer_device,
        "flowrt.roles.rollout": needs.rollout,
        "flowrt.roles.reference": needs.reference + needs.reference_device,
    }
    measured = {role: f"{peak_bytes[role] / 1e6:.0f} MB of {bytes_ / 1e6:.0f}" for role, bytes_ in estimated.items()}
    assert all(MIN_FRACTION * bytes_ < peak_bytes[role] < bytes_ for role, bytes_ in estimated.items()), measured
