"""Estimates of the memory that a run needs, by role and kind."""

import sys

import pytest

from flowrt.engines.descriptor import ModelShape
from flowrt.engines.training.saved_state import FILE_BYTES
from flowrt.launcher.doctor.checks import wanted
from flowrt.launcher.doctor.estimate import FILE_BYTES as ASSUMED_FILE_BYTES
from flowrt.launcher.doctor.estimate import estimate, host_bytes, reference_bytes, training_memory
from flowrt.recipes.config_io import parse
from tests.unit.launcher.test_doctor_checks import GPU, other

SEVEN_B = ModelShape(
    parameters=7 * 10**9,
    layers=32,
    hidden_size=4096,
    kv_size=1024,
    vocab_size=150_000,
    max_length=32768,
    intermediate_size=11008,
)
WEIGHTS = 28 * 10**9
RANKS = 8
FSDP = ["--trainer.engine", "fsdp", "--trainer.ranks", str(RANKS)]
LORA = ["--trainer.lora.rank", "16"]
SGLANG = ["--rollout.engine", "sglang", "--rollout.sglang.python", sys.executable]


@pytest.mark.parametrize(
    ("gather", "dtype", "whole", "gradients"),
    [
        ("step", "float32", 4, 4),
        ("step", "bfloat16", 2, 4),
        ("pass", "float32", 4 / 32, 4 / 32),
        ("pass", "bfloat16", 2 / 32, 4 / 32),
    ],
)
def test_bytes_per_parameter_match_the_documented_table(
    gather: str, dtype: str, whole: float, gradients: float
) -> None:
    """8 + 16/n and 6 + 16/n, or 16/n and one of 32 layers; with adapters, a shard of the frozen weights."""
    flags = [*FSDP, "--trainer.fsdp.gather", gather, "--trainer.fsdp.dtype", dtype]
    full = training_memory(parse(flags), SEVEN_B).model / SEVEN_B.parameters
    assert full == pytest.approx(whole + gradients + 16 / RANKS)
    assert training_memory(parse(flags + LORA), SEVEN_B).model / SEVEN_B.parameters == pytest.approx(
        whole + 4 / RANKS, rel=0.06
    )
    assert training_memory(parse([]), SEVEN_B).model == 20 * SEVEN_B.parameters


def test_memory_needs_of_a_7b_model_by_role() -> None:
    needs = estimate(parse([]), SEVEN_B)
    assert needs.trainer_device > 4 * WEIGHTS  # parameters, gradients, two moments
    assert needs.trainer_first == 2 * WEIGHTS  # snapshots
    assert 3 * WEIGHTS < needs.rollout < 4 * WEIGHTS  # the model, a version, and the next one
    assert WEIGHTS < needs.reference_device < 2 * WEIGHTS
    assert needs.server == 0


@pytest.mark.parametrize(
    ("flags", "versions"), [([], 0), (["--eval.overlap", "skip"], 1), (["--eval.overlap", "wait"], 2)]
)
def test_versions_in_evaluation_add_to_the_trainer_memory(flags: list[str], versions: int) -> None:
    needs = estimate(parse([*flags, *(["--eval.interval", "5"] if flags else [])]), SEVEN_B)
    assert needs.trainer_first == (2 + versions) * WEIGHTS


@pytest.mark.parametrize(
    ("flags", "role", "more"),
    [
        (["--trainer.forward-tokens", "65536"], "trainer_device", True),
        (["--rollout.max-running-requests", "512"], "rollout", True),
        (["--rollout.weight-update", "in_flight"], "rollout", True),
        (["--checkpoint.keep", "5"], "disk", True),
        (["--checkpoint.every", "0"], "disk", False),
        (["--max-staleness", "400", "--group-size", "512"], "small", True),
        (FSDP, "trainer_device", False),
        (["--reference.dtype", "bfloat16"], "reference_device", False),
        ([*FSDP, "--trainer.fsdp.dtype", "bfloat16"], "reference_device", False),
        ([*FSDP, *LORA], "trainer_first", False),
        ([*FSDP, *LORA], "rollout", False),
        ([*FSDP, "--trainer.fsdp.dtype", "bfloat16"], "rollout", False),
        (SGLANG, "server", True),
        (SGLANG, "rollout", False),
    ],
)
def test_a_setting_raises_or_lowers_the_need_of_its_role(flags: list[str], role: str, more: bool) -> None:
    default, changed = (getattr(estimate(parse(words), SEVEN_B), role) for words in ([], flags))
    assert changed > default if more else changed < default


def test_a_checkpoint_is_written_in_files_of_the_assumed_size() -> None:
    assert FILE_BYTES == ASSUMED_FILE_BYTES


def test_host_memory_is_that_of_the_fullest_node() -> None:
    srun = ["--launch.rollout", "srun", "--launch.trainer", "srun", "--rollout.workers", "8"]
    local, remote = parse(["--rollout.workers", "8"]), parse(srun)
    needs = estimate(local, SEVEN_B)
    trainer = needs.trainer_rank + needs.trainer_first + needs.trainer_device
    reference = needs.reference + needs.reference_device
    assert host_bytes(local, needs, 1) == needs.small + reference + 8 * needs.rollout + trainer
    assert host_bytes(remote, needs, 9) == needs.small + reference + trainer  # one rollout worker on each
    assert host_bytes(remote, needs, 2) == max(needs.small + reference + trainer, 8 * needs.rollout)


def test_accelerator_memory_is_not_counted_as_host_memory() -> None:
    """Here the nodes choose the device, for the trainer and for the server."""
    config = parse([*FSDP, *SGLANG, "--rollout.workers", "2"])
    needs = estimate(config, SEVEN_B)
    on_host, on_device = (wanted(config, needs, [other("a", devices=devices)], False) for devices in ([], [GPU]))
    assert (on_host.device_bytes, on_device.device_bytes) == (0, max(needs.trainer_device, needs.server))
    assert on_host.host_bytes - on_device.host_bytes == RANKS * needs.trainer_device + 2 * needs.server
    assert on_host.device == on_device.device == ""
    on_cpu = parse([*FSDP, *SGLANG, "--trainer.fsdp.device", "cpu", "--rollout.sglang.device", "cpu"])
    assert wanted(on_cpu, needs, [other("a", devices=[GPU])], False).device_bytes == 0
    elsewhere = parse(["--rollout.engine", "sglang", "--rollout.workers", "1", "--rollout.sglang.url", "http://there"])
    assert estimate(elsewhere, SEVEN_B).server == 0


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_torch_engines_on_a_device_need_little_host_memory(name: str) -> None:
    config = parse(["--device", name, "--trainer.dtype", "bfloat16"])
    needs = estimate(config, SEVEN_B)
    # Master weights, gradients, moments; compute weights. Activations are gone when a step needs its copy of gradients.
    assert needs.trainer_device >= (5 * 4 + 2) * SEVEN_B.parameters
    assert needs.trainer_first == WEIGHTS  # two versions of half the size
    assert WEIGHTS / 2 < needs.server < WEIGHTS
    assert needs.rollout < 1.2 * WEIGHTS  # two versions
    want = wanted(config, needs, [other("a", devices=[GPU])], False)
    assert want.device == ("cuda" if name == "cuda" else "")
    assert want.shared_device_bytes == pytest.approx(
        (needs.trainer_device + 2 * needs.server + needs.reference_device) / 0.9
    )
    assert want.host_bytes < want.device_bytes
    bf16_rollout = estimate(parse(["--device", name, "--rollout.dtype", "bfloat16"]), SEVEN_B)
    assert bf16_rollout.server == needs.server
    assert bf16_rollout.trainer_first == 2 * WEIGHTS


def test_reference_workers_share_the_trainer_device_only_if_none_is_free() -> None:
    flags = ["--trainer.engine", "fsdp", "--trainer.fsdp.device", "cuda", "--reference.device", "cuda"]
    config = parse([*flags, "--reference.workers", "3"])
    needs = estimate(config, SEVEN_B)
    each, rank = needs.reference_device, needs.trainer_device
    assert [reference_bytes(config, needs, devices) for devices in (1, 2, 3, 4)] == [
        3 * each + rank,
        3 * each,
        2 * each,
        each,
    ]
    want = wanted(config, needs, [other("a", devices=[GPU])], False)
    assert (want.reference_device, want.reference_bytes) == ("cuda", 3 * each + rank)
    for other_flags in (["--reference.device", "cpu"], ["--algorithm.kl.coef", "0", "--reference.device", "cpu"]):
        without_device = wanted(parse([*flags, *other_flags]), needs, [other("a", devices=[GPU])], False)
        assert (without_device.reference_device, without_device.reference_bytes) == ("", 0)


def test_refreshed_references_take_disk_space() -> None:
    disk = [estimate(parse(flags), SEVEN_B).disk for flags in ([], ["--reference.refresh", "5"])]
    assert disk[1] - disk[0] >= 2 * WEIGHTS
