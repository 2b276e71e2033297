"""Clients that break the protocol in a real run: each is dismissed with a reason, and the run completes."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrt import api
from flowrt.errors import EXIT_DISMISSED
from flowrt.protocol import messages as m
from tests.simulation.scenario import whole

pytestmark = pytest.mark.slow
STEPS = 12
SHORT = [
    *("--steps", str(STEPS), "--data.eval-prompts", "0", "--prompts-per-step", "4", "--group-size", "4"),
    *("--rollout.workers", "1", "--algorithm.kl.coef", "0", "--checkpoint.every", "0"),
]
WITHIN_S = 120.0
VIOLATIONS: dict[str, tuple[m.Message, str]] = {
    "commit": (
        m.Commit(request=1, stage="sing", slots=(0,), leases=(0,), parts=(), inline=(), spans=()),
        "stage 'sing', which is not in this dataflow",
    ),
    "answer": (m.OfferAccepted(1, 1), "sent OfferAccepted, which only the controller says"),
    "stop": (m.Stop("complete", 0), "ends the run, but its role is reward; only observer may"),
    "exhausted": (m.EndOfData("train"), "says that prompts are exhausted, but its role is reward; only source may"),
    "publish": (m.Publish((whole(10**9),), ()), "publishes weights, but its role is reward; only trainer may"),
    "step": (m.StepCompleted(3, ()), "says StepCompleted, but its role is reward; only trainer may"),
}


async def dismissed(address: str, name: str, message: m.Message) -> api.Stopped:
    """Send the message as a reward worker of this name; return its dismissal."""
    session = await api.connect(address, name, "reward", 60)
    session.send(message)
    with pytest.raises(api.Stopped) as stopped:
        await session.wait_stopped()
    await session.close()
    return stopped.value


async def test_a_real_run_dismisses_clients_that_break_the_protocol_and_completes(
    launch: Callable[..., Any], untrained_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    run = launch("--model", str(untrained_model), *SHORT)
    run.wait_for_training()
    address = (run.run_dir / "address").read_text().strip()
    for name, (message, reason) in VIOLATIONS.items():
        dismissal = await dismissed(address, name, message)
        assert dismissal.code == EXIT_DISMISSED
        assert reason in dismissal.reason
        assert dismissal.reason.startswith("you were dismissed: protocol violation: ")
    assert run.wait(WITHIN_S) == 0, run.output
    for name, (_, reason) in VIOLATIONS.items():
        (line,) = [line for line in run.log("controller").splitlines() if f"{name} is dismissed" in line]
        assert reason in line
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["prompts_lost"], summary["prompts_trained_twice"]) == (STEPS, 0, 0)
