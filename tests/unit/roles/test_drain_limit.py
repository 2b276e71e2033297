"""The limit of a worker that was told to leave by SIGTERM."""

from flowrt.ids import ROLLOUT, TRAINER
from flowrt.recipes.config_io import parse
from flowrt.roles.main import _drain_s
from flowrt.runtime import time_limits

LONG = ["--build.max-length", "40000", "--rollout.max-new-tokens", "32000"]


def test_a_terminated_worker_has_the_time_to_complete_its_responses() -> None:
    assert _drain_s(ROLLOUT, parse([])) >= time_limits.MIN_DRAIN_S
    assert _drain_s(ROLLOUT, parse(LONG)) > 32_000 / 50, "a sequence at 50 tokens/s"


def test_the_setting_replaces_the_derived_limit() -> None:
    assert _drain_s(ROLLOUT, parse([*LONG, "--controller.worker-drain-timeout-s", "60"])) == 60


def test_a_trainer_without_checkpoints_does_not_drain() -> None:
    assert _drain_s(TRAINER, parse([*LONG, "--checkpoint.every", "0"])) == 0
