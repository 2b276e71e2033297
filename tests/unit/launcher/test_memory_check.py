"""A run that needs more memory than its machine has is refused before it starts; limits of control groups count."""

from pathlib import Path

import pytest

from flowrt.errors import ConfigError
from flowrt.launcher.doctor.estimate import estimate, host_bytes
from flowrt.launcher.doctor.model_shape import shape_of
from flowrt.launcher.memory_check import TOLERANCE, check_memory
from flowrt.recipes.config_io import parse
from flowrt.runtime import resource_limits

GIB = 2**30
LONG = ["--build.max-length", "40000", "--rollout.max-new-tokens", "32000", "--rollout.max-running-requests", "64"]


def test_a_run_is_refused_by_the_estimate_of_doctor() -> None:
    config = parse(LONG)
    needed = host_bytes(config, estimate(config, shape_of(config)), 1)
    check_memory(config, int(needed / TOLERANCE) + 1, has_devices=False)
    with pytest.raises(
        ConfigError, match=r"needs about \d+\.\d GiB of memory on this machine, which has .*rollout workers"
    ):
        check_memory(config, int(needed / TOLERANCE) - 1, has_devices=False)


def test_the_response_length_raises_the_need_by_the_cache() -> None:
    """64 rows of 32,000 tokens of a model of 28 layers with 8 heads of 128 for keys and values: 470 GB in float32."""
    short, long = (parse([*LONG, "--rollout.max-new-tokens", tokens]) for tokens in ("512", "32000"))
    grown = estimate(long, shape_of(long)).rollout - estimate(short, shape_of(short)).rollout
    cache = 64 * (32000 - 512) * shape_of(long).cache_token_elements * 4
    assert cache < grown < 2 * cache


WIDE = ["--build.hidden-size", "2048", "--build.layers", "28", "--build.intermediate-size", "8192"]
MANY = ["--prompts-per-step", "1024", "--group-size", "256", "--build.max-length", "4096"]
MANY += ["--rollout.max-new-tokens", "2000", "--rollout.max-running-requests", "1"]


@pytest.mark.parametrize(
    ("flags", "largest", "fix"),
    [
        (WIDE, "trainer", "use a smaller model"),
        ([*WIDE, "--reference.workers", "99"], "99 reference workers", "lower reference.workers"),
        (LONG, "2 rollout workers", "lower rollout.max_running_requests"),
        (MANY, "controller, source and rewards", "lower prompts_per_step"),
    ],
)
def test_the_refusal_names_what_lowers_the_largest_part(flags: list[str], largest: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"which has 1\.0: {largest}.*; .*{fix}"):
        check_memory(parse(flags), GIB, has_devices=False)


def test_unknown_memory_refuses_nothing() -> None:
    check_memory(parse(LONG), 0, has_devices=False)


@pytest.mark.parametrize(
    ("groups", "files", "total", "available"),
    [
        ("", {}, 8 * GIB, 4 * GIB),
        ("0::/job", {"job/memory.max": GIB, "job/memory.current": GIB // 4}, GIB, GIB * 3 // 4),
        ("0::/job/step", {"job/memory.max": GIB, "job/memory.current": 2 * GIB}, GIB, 0),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": GIB, "memory/job/memory.usage_in_bytes": 0}, GIB, GIB),
        ("0::/job", {"job/memory.max": "max", "job/memory.current": 5}, 8 * GIB, 4 * GIB),
        ("0::/job", {"memory.max": 2 * GIB, "memory.current": GIB}, 2 * GIB, GIB),
    ],
    ids=["machine", "version 2", "parent", "version 1", "unlimited", "container"],
)
def test_the_limit_of_a_control_group_counts(
    groups: str,
    files: dict[str, object],
    total: int,
    available: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, content in {
        "meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n",
        "cgroup": groups,
        **files,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n" if content else "")
    monkeypatch.setattr(resource_limits, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(resource_limits, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(resource_limits, "MOUNT", tmp_path)
    assert (resource_limits.total_bytes(), resource_limits.available_bytes()) == (total, available)
