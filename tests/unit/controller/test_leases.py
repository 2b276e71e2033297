"""Leases: their numbers after a restart of the controller, and their extension while the work of a worker advances."""

from pathlib import Path

import pytest

from flowrt.controller.events import Tick
from flowrt.controller.settings import Settings
from flowrt.errors import ConfigError
from flowrt.protocol import messages as m
from flowrt.recipes.config_io import parse
from flowrt.recipes.grpo import request_timeout_s
from flowrt.runtime import time_limits
from tests.simulation.core_driver import CoreDriver


def test_renewing_a_lease_numbered_from_first_lease_on_is_illegal() -> None:
    """The number would be issued to another worker later, and the slots of the renewed lease would be lost."""
    driver = CoreDriver()
    driver.offer()
    (slot,) = driver.core.state.table.slots.values()
    for number in (driver.core.state.table.first_lease, driver.core.state.table.first_lease + 5):
        driver.assert_illegal(
            "rollout0", m.RenewLease(lease=number, stage="rollout", step=-1, slots=(slot.id,), attempts=(slot.attempt,))
        )
    grant = driver.pull("rollout1", "rollout")
    assert grant is not None
    assert grant.slots == (slot.id,)


def test_leases_expire_before_the_no_progress_timeout() -> None:
    """The lease of a hung rollout worker ends in time for another worker to do its work."""
    controller = parse([]).controller
    assert controller.lease_s < controller.no_progress_timeout_s
    assert Settings().lease_s < Settings().no_progress_timeout_s


HOUR_S = 3600
LEASE_S = 600.0
BEAT_S = 100
"""Interval of the heartbeats of these tests, in seconds."""


def _beat(driver: CoreDriver, worker: str, *, hours: float, advances: bool) -> None:
    """Heartbeats of a worker for some hours; the other workers are alive, too."""
    end_s = driver.now + hours * HOUR_S
    while driver.now < end_s:
        driver.now += BEAT_S
        for member in driver.core.state.membership.members():
            driver.send(member.id, m.Heartbeat(advances=advances and member.id == worker))
        driver.event(Tick())


def _ended(driver: CoreDriver) -> int:
    """The exit code of the run; 0 while it goes on."""
    return 0 if driver.core.ended is None else driver.core.ended.code


def test_a_sample_that_takes_hours_is_generated_once() -> None:
    driver = CoreDriver()
    driver.configure(lease_s=LEASE_S)
    driver.offer()
    grant = driver.pull("rollout0", "rollout")
    assert grant is not None
    _beat(driver, "rollout0", hours=4, advances=True)
    assert driver.core.ended is None, "the run makes progress"
    assert not driver.core.state.table.count_ready("rollout"), "the sample would be generated a second time"
    [(_, committed)] = driver.sent(driver.send("rollout0", driver.generated(grant)), m.Committed)
    assert committed.refused == ()
    scored = driver.pull("reward0", "reward")
    assert scored is not None
    _beat(driver, "reward0", hours=4, advances=True)
    assert not driver.core.state.table.count_ready("reward"), "a slow judge would be asked a second time"


def test_a_worker_without_progress_loses_its_lease() -> None:
    driver = CoreDriver()
    driver.configure(lease_s=LEASE_S, no_progress_timeout_s=10 * HOUR_S)
    driver.offer()
    assert driver.pull("rollout0", "rollout") is not None
    _beat(driver, "rollout0", hours=1, advances=True)
    assert not driver.core.state.table.count_ready("rollout")
    _beat(driver, "rollout0", hours=LEASE_S / HOUR_S, advances=False)
    assert driver.core.state.table.count_ready("rollout") == 1, "the work hangs, and its lease did not expire"
    assert driver.pull("rollout1", "rollout") is not None


def test_progress_of_another_worker_extends_no_lease() -> None:
    driver = CoreDriver()
    driver.configure(lease_s=LEASE_S)
    driver.offer()
    assert driver.pull("rollout0", "rollout") is not None
    _beat(driver, "rollout1", hours=1, advances=True)
    assert driver.core.state.table.count_ready("rollout") == 1


def test_a_step_of_hours_is_no_stall_and_a_hung_one_is() -> None:
    """The trainer reports progress, and nothing else happens."""
    driver = CoreDriver()
    driver.configure(no_progress_timeout_s=900.0)
    driver.offer()
    _beat(driver, "trainer0", hours=3, advances=True)
    assert not _ended(driver)
    _beat(driver, "trainer0", hours=1, advances=False)
    assert _ended(driver) == 3


SHORT = ["--rollout.max-new-tokens", "64", "--rollout.max-running-requests", "256"]


def test_the_request_timeout_follows_the_step_and_a_shorter_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = ["--build.max-length", "40000", "--rollout.max-new-tokens", "32000", "--group-size", "64"]
    assert request_timeout_s(parse([])) == time_limits.MIN_REQUEST_S
    assert request_timeout_s(parse([*long, "--controller.request-timeout-s", "90000"])) == 90_000
    assert request_timeout_s(parse(long)) > 16 * 32_000 / 50, "16 sequences at 50 tokens/s, one after the other"
    evaluated = [*SHORT, "--eval.samples", "64", "--data.eval-prompts", "4096", "--rollout.workers", "1"]
    assert request_timeout_s(parse(evaluated)) > 64 * 4096 // 256 * 64 / 10, (
        "the trainer waits for the first evaluation"
    )
    unknown = [*SHORT, "--eval.data", "one=rows.jsonl", "--data.eval-prompts", "0"]
    assert request_timeout_s(parse(unknown)) > request_timeout_s(parse([*unknown, "--eval.limit", "1000"]))
    assert request_timeout_s(parse(unknown)) == request_timeout_s(parse([*unknown, "--eval.limit", "1000000"]))
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "one", "answer": "1"}\n' * 100_000)
    assert request_timeout_s(parse(unknown)) == request_timeout_s(parse([*unknown, "--eval.limit", "100000"]))
    with pytest.raises(ConfigError, match=r"request_timeout_s is 60, and .* at least \d+ s \(rollout"):
        parse([*long, "--controller.request-timeout-s", "60"])


def test_the_request_timeout_follows_the_passes_of_a_step(tmp_path: Path) -> None:
    """Other workers wait for a step of the trainer: 32,000 tokens a sample, of a model of 200 MB."""
    long = ["--build.max-length", "40000", "--rollout.max-new-tokens", "32000", "--prompts-per-step", "2"]
    config = parse([*long, "--rollout.max-running-requests", "4096", "--run-dir", str(tmp_path)])
    before_s = request_timeout_s(config)
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "model.safetensors").open("wb") as weights:
        weights.truncate(200_000_000)
    tokens = config.prompts_per_step * config.group_size * 32_000
    assert request_timeout_s(config) > before_s
    assert request_timeout_s(config) > time_limits.pass_s(tokens, 200_000_000)
