"""Findings of flowrt doctor: a failure (or a warning) of every check, with its message."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flowrt.engines.tiny_model import build_model
from flowrt.errors import ConfigError
from flowrt.launcher.doctor import checks
from flowrt.launcher.doctor.checks import Finding, Verdict, Wanted, judge
from flowrt.launcher.doctor.command import merge_good, with_unique_names
from flowrt.launcher.doctor.facts import PACKAGES, Accelerator, Facts, from_json, rounds
from flowrt.launcher.doctor.model_shape import built_shape, read_shape
from flowrt.recipes.config_io import parse

GIB = 2**30
GPU = Accelerator(name="H200", free_bytes=100 * GIB)
HEALTHY = Facts(
    node="a",
    python="3.11.7",
    versions=dict.fromkeys(PACKAGES, "1.0"),
    protocol=4,
    free_memory_bytes=64 * GIB,
    free_disk_bytes=64 * GIB,
    directory_error="",
    open_files=65536,
    addresses={"lo": "127.0.0.1", "ib0": "10.0.0.1"},
    own_address="10.0.0.1",
    port_error="",
    model_error="",
    lanes=["shm", "gloo"],
    probe="probe-a-1",
    round_trip_s=1e-4,
)
WANT = Wanted(host_bytes=8 * GIB, disk_bytes=GIB, controller=True)
ON_GPU = dataclasses.replace(WANT, device="cuda", device_bytes=50 * GIB)
SHARED = dataclasses.replace(ON_GPU, shared_device_bytes=500 * GIB)


def other(name: str, **changes: Any) -> Facts:
    return dataclasses.replace(HEALTHY, node=name, probe=f"probe-{name}-1", **changes)


def pair(speed: float = 1e9) -> list[Facts]:
    """Two connected nodes."""
    return [other("a", bytes_per_s={"probe-b-1": speed}), other("b", bytes_per_s={"probe-a-1": speed})]


def bad(findings: list[Finding], verdict: Verdict = Verdict.BAD) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is verdict]


def test_healthy_nodes_pass_every_check() -> None:
    assert {finding.verdict for finding in judge([HEALTHY], WANT)} == {Verdict.GOOD}
    assert {finding.verdict for finding in judge(pair(), WANT)} == {Verdict.GOOD}
    on_gpu = [dataclasses.replace(facts, devices=[GPU]) for facts in pair()]
    assert {finding.verdict for finding in judge(on_gpu, ON_GPU)} == {Verdict.GOOD}


@pytest.mark.parametrize(
    ("check", "changes", "want", "fix"),
    [
        ("Python", {"python": "3.10.2"}, WANT, "3.11 or newer"),
        ("torch", {"torch_error": "ImportError: libcudart.so"}, WANT, "flowrt.launcher.doctor.facts"),
        ("devices", {}, ON_GPU, "ask for devices"),
        ("shared device", {"devices": [GPU]}, SHARED, "rollout.workers"),
        ("device memory", {"devices": [GPU, {**GPU, "free_bytes": 40 * GIB}]}, ON_GPU, "trainer.forward_tokens"),
        ("model", {"model_error": "there is no directory /m"}, WANT, "that all nodes mount"),
        ("memory", {"free_memory_bytes": 7 * GIB}, WANT, "rollout.max_running_requests"),
        ("disk", {"free_disk_bytes": GIB // 2}, WANT, "checkpoint.keep"),
        ("disk", {"directory_error": "/r is not writable"}, WANT, "another --run-dir"),
        ("port", {"port_error": "10.0.0.1: Permission denied"}, WANT, "listen on that address"),
        ("controller", {"round_trip_s": None, "peer_error": "no answer"}, WANT, "firewall"),
    ],
)
def test_a_failed_check_names_its_fix(check: str, changes: dict[str, Any], want: Wanted, fix: str) -> None:
    (line,) = bad(judge([dataclasses.replace(HEALTHY, **changes)], want))
    assert (line.check, line.where) == (check, "a")
    assert fix in line.fix
    assert all(value in line.state for value in changes.values() if isinstance(value, str))


SCORING = dataclasses.replace(WANT, reference_device="cuda", reference_bytes=50 * GIB)


def test_reference_workers_need_an_accelerator_with_free_memory() -> None:
    (line,) = bad(judge([HEALTHY], SCORING))
    assert (line.check, line.where, line.state) == ("reference device", "a", "no accelerator")
    assert "reference.device is cuda" in line.fix
    first, second = pair()
    assert [finding.where for finding in bad(judge([first, second], SCORING))] == ["all"]
    assert not bad(judge([first, dataclasses.replace(second, devices=[GPU])], SCORING))
    small = dataclasses.replace(HEALTHY, devices=[{**GPU, "free_bytes": 40 * GIB}])
    (line,) = bad(judge([small], SCORING))
    assert (line.check, "reference.dtype" in line.fix) == ("reference device", True)
    assert "40.0 GiB free" in line.state
    assert "50.0 GiB" in line.state


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("memory", {"free_memory_bytes": 9 * GIB}),
        ("open files", {"open_files": 1024}),
        ("controller", {"round_trip_s": 0.2}),
    ],
)
def test_a_warning_is_not_a_failure(check: str, changes: dict[str, Any]) -> None:
    findings = judge([dataclasses.replace(HEALTHY, **changes)], WANT)
    assert [line.check for line in bad(findings, Verdict.WARN)] == [check]
    assert checks.is_well(findings)


def test_a_loopback_address_fails_only_with_several_nodes() -> None:
    single = dataclasses.replace(HEALTHY, own_address="127.0.0.1")
    assert not bad(judge([single], WANT))
    first, second = pair()
    (line,) = bad(judge([dataclasses.replace(first, own_address="127.0.0.1"), second], WANT))
    assert (line.check, "controller.host" in line.fix) == ("address", True)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"versions": {**HEALTHY.versions, "torch": "2.0"}}, "versions: torch"),
        ({"versions": {**HEALTHY.versions, "flowrt": ""}}, "versions: flowrt"),
        ({"python": "3.12.1"}, "versions: Python"),
        ({"protocol": 3}, "versions: protocol"),
    ],
)
def test_version_differences_between_nodes_are_found(change: dict[str, Any], check: str) -> None:
    first, second = pair()
    (line,) = bad(judge([first, dataclasses.replace(second, **change)], WANT))
    assert line.check == check
    assert "a " in line.state
    assert "b " in line.state


def test_python_patch_versions_may_differ() -> None:
    first, second = pair()
    assert not bad(judge([first, dataclasses.replace(second, python="3.11.9")], WANT))


def test_a_pair_without_a_connection_fails() -> None:
    first, second = pair()
    lost = dataclasses.replace(second, bytes_per_s={}, peer_error="waited 60 s for its turn with probe-a-1")
    (line,) = bad(judge([first, lost], WANT))
    assert (line.check, line.where) == ("lane", "a to b")
    assert "waited 60 s" in line.state
    assert "firewall" in line.fix


def test_a_pair_without_a_connection_reports_only_its_own_errors() -> None:
    first, second = pair()
    unmet: dict[str, Any] = {"bytes_per_s": {}}
    lines = bad(judge([dataclasses.replace(first, **unmet), dataclasses.replace(second, **unmet)], WANT))
    assert {line.state for line in lines} == {"nothing arrived"}
    reported = dataclasses.replace(first, **unmet, lane_errors={"probe-b-1": "timed out", "probe-c-1": "another error"})
    lines = bad(judge([reported, dataclasses.replace(second, **unmet)], WANT))
    assert {line.where: line.state for line in lines} == {"a to b": "timed out", "b to a": "timed out"}


def test_a_slow_lane_is_a_warning() -> None:
    assert [line.where for line in bad(judge(pair(speed=5e7), WANT), Verdict.WARN)] == ["a to b", "b to a"]


def test_a_lane_below_the_minimum_transfer_rate_fails() -> None:
    lines = bad(judge(pair(speed=5e5), dataclasses.replace(WANT, lane_bytes_per_s=1e6)))
    assert [(line.where, line.state) for line in lines] == [("a to b", "0.5 MB/s"), ("b to a", "0.5 MB/s")]
    assert "controller.min_transfer_mb_per_s (1)" in lines[0].fix


def test_nodes_of_the_same_name_get_unique_names() -> None:
    first, second = (other("vm", own_address=f"10.0.0.{number}", protocol=number) for number in (1, 2))
    unique = with_unique_names([first, second, other("c")])
    assert [facts.node for facts in unique] == ["vm (10.0.0.1)", "vm (10.0.0.2)", "c"]
    (line,) = [line for line in bad(judge(unique[:2], Wanted())) if line.check.startswith("versions")]
    assert line.state == "vm (10.0.0.1) 1, vm (10.0.0.2) 2"


def test_only_good_findings_are_merged() -> None:
    findings = judge([other("a"), other("b", python="3.10.1"), other("c")], Wanted())
    lines = merge_good(findings)
    assert [line.where for line in lines if line.check == "Python"] == ["a and 1 more", "b"]
    assert len(bad(lines)) == len(bad(findings)) > 0


# ---- facts of other nodes


def test_facts_round_trip_through_json() -> None:
    facts = other("b", devices=[GPU], bytes_per_s={"x": 0.5})
    assert from_json(facts.to_json(), "here") == facts


@pytest.mark.parametrize("text", ["{", "{}", '{"node": "a", "cores": 8}', "[]"])
def test_facts_of_another_version_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="srun printed no facts of this version of flowrt"):
        from_json(text, "srun")


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_of_nodes_is_probed_once(count: int) -> None:
    schedule = rounds(count)
    pairs = [pair for round_of_pairs in schedule for pair in round_of_pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for round_of_pairs in schedule:
        assert len({node for pair in round_of_pairs for node in pair}) == 2 * len(round_of_pairs)
    assert len(schedule) <= count


# ---- memory


def test_the_shape_of_a_model_is_read_from_its_files(tmp_path: Path) -> None:
    config = parse([])
    build = config.build
    model = build_model(
        vocab_size=build.vocab_size,
        hidden_size=build.hidden_size,
        layers=build.layers,
        heads=build.heads,
        intermediate_size=build.intermediate_size,
        max_length=build.max_length,
        seed=0,
    )
    model.save_pretrained(tmp_path)
    assert read_shape(tmp_path) == built_shape(config)
    assert built_shape(config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no config\.json of a causal LM"):
        read_shape(tmp_path)
