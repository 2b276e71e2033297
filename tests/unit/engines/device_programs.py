"""Whole programs of the torch engines on a simulated NPU, each compared with its run on the CPU.

`test_devices` runs `main` in a separate process: it prints a JSON object with the traceback of each program, empty if
the program has passed.
"""

import copy
import json
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.base import Prompt, Response, TrainingBatch
from flowrt.engines.descriptor import WHOLE_LOGITS
from flowrt.engines.hf import named_parameters
from flowrt.engines.options import TrainOptions, Truncation
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.engines.training.forward import enable_packing
from flowrt.roles.reference import score_on
from flowrt.transport.devices import Device, torch_npu
from flowrt.transport.weights.snapshot import Snapshot
from tests.decoders import COMMON, DECODERS
from tests.simulated_device import SimulatedDevice, on_device, simulate_npu

KINDS = {name: DECODERS[name] for name in ("gpt2", "llama", "gemma2")}
KINDS["qwen3"] = (Qwen3ForCausalLM, Qwen3Config(**COMMON, head_dim=8))
NEW_TOKENS, ROWS = 8, 4
STOP_TOKEN = 7
PROGRAMS: dict[str, Callable[[SimulatedDevice], None]] = {}


def program(run: Callable[[SimulatedDevice], None]) -> Callable[[SimulatedDevice], None]:
    PROGRAMS[run.__name__] = run
    return run


def model(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    model_class, config = KINDS[kind]
    return model_class(copy.deepcopy(config)).to(dtype).eval()


def prompts(count: int = 6, greedy: Sequence[int] = (1,)) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(2, 40, (3 + row % 3,), generator=generator, dtype=torch.int32) for row in range(count)]
    return [Prompt(row, tokens[row - row % 2], 50 + row, row in greedy) for row in range(count)]


class After:
    """An interrupt that is set at the N-th poll: the engine returns after N steps."""

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def is_set(self) -> bool:
        self._steps_left -= 1
        return self._steps_left <= 0

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def engine(network: Any, **options: Any) -> TorchRollout:
    return TorchRollout(
        network, stop=StopConditions((1, 2, 3)), rows=ROWS, max_new_tokens=NEW_TOKENS, temperature=0.9, **options
    )


def finish(rollout: TorchRollout, todo: list[Prompt], done: dict[int, Response]) -> dict[int, Response]:
    never = threading.Event()
    while todo or rollout.running:
        while todo and rollout.room:
            rollout.add([todo.pop(0)])
        done |= {response.key: response for response in rollout.run(never)}
    return done


def assert_same_responses(on_cpu: dict[int, Response], on_npu: dict[int, Response], tolerance: float = 1e-5) -> None:
    """Compare the responses of the CPU and of the device, all in host memory."""
    assert on_cpu.keys() == on_npu.keys()
    for key, response in on_cpu.items():
        other = on_npu[key]
        assert other.tokens.device.type == other.logprobs.device.type == "cpu"
        assert torch.equal(response.tokens, other.tokens), (response.tokens, other.tokens)
        assert float((response.logprobs - other.logprobs).abs().max()) <= tolerance
        assert (response.spans, response.truncated) == (other.spans, other.truncated)
        if response.support is not None:
            assert other.support is not None
            assert torch.equal(response.support.tokens_E, other.support.tokens_E)


def generates(kind: str, device: SimulatedDevice, **options: Any) -> None:
    on_cpu = finish(engine(model(kind), **options), prompts(), {})
    on_npu = finish(engine(on_device(model(kind), device.device), **options), prompts(), {})
    assert_same_responses(on_cpu, on_npu)
    assert len({len(response.tokens) for response in on_cpu.values()}) > 1  # some end early


for _kind in KINDS:
    PROGRAMS[f"generates_{_kind}"] = partial(generates, _kind)


@program
def draws_from_truncated_distributions(device: SimulatedDevice) -> None:
    generates("llama", device, truncation=Truncation(top_k=10, top_p=0.9, min_p=0.01))


@program
def waits_for_the_device_once_a_decode_step(device: SimulatedDevice) -> None:
    rollout = engine(on_device(model("qwen3"), device.device))
    rollout.add(prompts(ROWS, greedy=()))
    rollout.run(After(1))
    device.waits.clear()
    rollout._decode()
    assert device.waits == [], device.waits
    rollout._remove_finished()
    assert len(device.waits) == 1, device.waits
    device.waits.clear()
    rollout.run(After(NEW_TOKENS))
    ended = ROWS - rollout.running
    assert ended
    assert len(device.waits) <= NEW_TOKENS + 1, device.waits  # once more to read all that end in a step


@program
def ends_at_a_stop_string(device: SimulatedDevice) -> None:
    class LetterTokenizer:
        """A tokenizer with a letter for each token."""

        eos_token_id = 1

        def decode(self, tokens: Sequence[int], **_: Any) -> str:
            return "".join(chr(60 + token) for token in tokens)

    stop = StopConditions((1,), (chr(60 + STOP_TOKEN),), LetterTokenizer())

    def responses(network: Any) -> dict[int, Response]:
        rollout = TorchRollout(network, stop=stop, rows=ROWS, max_new_tokens=NEW_TOKENS, temperature=3.0)
        return finish(rollout, prompts(16, greedy=()), {})

    on_cpu = responses(model("llama"))
    assert_same_responses(on_cpu, responses(on_device(model("llama"), device.device)))
    assert any(response.tokens[-1] == STOP_TOKEN for response in on_cpu.values())


def updates(device: SimulatedDevice, *, recompute: bool) -> None:
    def responses(network: Any) -> dict[int, Response]:
        rollout = TorchRollout(
            network,
            stop=StopConditions(),
            rows=ROWS,
            max_new_tokens=3 * NEW_TOKENS,
            temperature=0.9,
            recompute=recompute,
        )
        rollout.add(prompts(1, greedy=()))
        done = {response.key: response for response in rollout.run(After(NEW_TOKENS))}
        rollout.add([replace(prompt, key=prompt.key + 1) for prompt in prompts(ROWS - 1, greedy=())])
        done |= {response.key: response for response in rollout.run(After(NEW_TOKENS))}
        snapshot = Snapshot.take(7, named_parameters(model("llama", 1)))
        while (work := rollout.prepare(snapshot)) is not None:
            work()
            # Long enough for the first sequence to end: the last one reuses its row, also in the cache of the shadow.
            done |= {response.key: response for response in rollout.run(After(1 if done else NEW_TOKENS + 2))}
        rollout.swap(snapshot)
        rollout.add([Prompt(90, torch.tensor([4, 5, 6], dtype=torch.int32), 9)] if rollout.room else [])
        return finish(rollout, [], done)

    on_cpu = responses(model("llama"))
    assert_same_responses(on_cpu, responses(on_device(model("llama"), device.device)))
    assert any(7 in response.spans[::2] and 0 in response.spans[::2] for response in on_cpu.values())


@program
def updates_in_flight_with_a_shadow_model(device: SimulatedDevice) -> None:
    updates(device, recompute=True)


@program
def catches_up_on_a_stream_of_its_own(device: SimulatedDevice) -> None:
    """Memory that the cache gives back when it grows there may be of the other stream."""
    calls = torch_npu().npu.calls
    network = on_device(model("llama"), device.device)
    rollout = TorchRollout(network, stop=StopConditions(), rows=1, max_new_tokens=NEW_TOKENS, temperature=0.9)
    rollout.add([Prompt(0, torch.arange(2, 62, dtype=torch.int32) % 40, 1)])
    rollout.run(After(1))
    snapshot = Snapshot.take(1, named_parameters(model("llama", 1)))
    begin = len(calls)
    rollout._decode()
    assert "stream" not in calls[begin:], calls[begin:]
    work = rollout.prepare(snapshot)
    assert work is not None
    begin = len(calls)
    work()
    queued = [name for name in calls[begin:] if name in ("wait_stream", "stream", "synchronize")]
    assert queued[:2] == ["wait_stream", "stream"], queued  # then that of the copies of the weights, within
    assert queued[-1] == "synchronize", queued
    begin = len(calls)
    while rollout.running and "record_stream" not in calls[begin:]:
        rollout._decode()  # into a cache for 64 more positions
        rollout._remove_finished()
    assert "record_stream" in calls[begin:]


@program
def updates_in_flight_and_keeps_the_cache(device: SimulatedDevice) -> None:
    updates(device, recompute=False)


@program
def computes_in_another_dtype_than_is_published(device: SimulatedDevice) -> None:
    published = Snapshot.take(1, named_parameters(model("llama", 3)))
    rollout = engine(on_device(model("llama", dtype=torch.bfloat16), device.device), published=torch.float32)
    rollout.swap(published)
    expected = named_parameters(model("llama", 3, torch.bfloat16))
    for name, tensor in named_parameters(rollout._cached.model).items():
        assert tensor.device == device.device
        assert torch.equal(tensor.cpu(), expected[name]), name
    assert len(finish(rollout, prompts(), {})) == len(prompts())


# ---- training


OPTIONS = TrainOptions(
    lr=1e-3, warmup_steps=1, max_grad_norm=0.5, weight_decay=0.1, forward_tokens=64, max_initial_mismatch=0
)  # the log-probabilities of `samples` are drawn


def samples(step: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(step)
    prompt = [torch.randint(2, 40, (4 + group,), generator=generator) for group in range(3)]
    lengths = torch.randint(1, 9, (12,), generator=generator).tolist()
    return TrainingBatch(
        prompts=[prompt[row // 4] for row in range(12)],
        responses=[torch.randint(2, 40, (length,), generator=generator) for length in lengths],
        rollout_logprobs=[-3.5 + 0.3 * torch.randn(length, generator=generator) for length in lengths],
        reference_logprobs=[-3.5 + 0.3 * torch.randn(length, generator=generator) for length in lengths],
        advantages_N=torch.randn(12, generator=generator),
        weights_N=torch.ones(12),
        groups_N=torch.arange(12) // 4,
        ages=[torch.zeros(length, dtype=torch.int64) for length in lengths],
    )


def trainer(network: Any, algorithm: Any = None, options: TrainOptions = OPTIONS, **more: Any) -> TorchTrainer:
    return TorchTrainer(network, options, algorithm or Objective(kl=Kl(1e-2)), temperature=0.9, **more)


def train(torch_trainer: TorchTrainer, steps: range) -> list[dict[str, float]]:
    metrics = []
    for step in steps:
        torch_trainer.accumulate(samples(step))
        metrics.append(torch_trainer.step())
    return metrics


def assert_same_trainers(on_cpu: Any, on_npu: Any, tolerance: float = 1e-4) -> None:
    """Compare the weights and metrics of two trainers."""
    for expected, actual in zip(on_cpu[1], on_npu[1], strict=True):
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            assert abs(value - actual[name]) <= tolerance * max(1.0, abs(value)), (name, value, actual[name])
    for name, weights in on_cpu[0].parameters().items():
        assert float((weights - on_npu[0].parameters()[name].cpu()).abs().max()) <= tolerance, name


def _moment_devices(torch_trainer: TorchTrainer) -> set[torch.device]:
    """Where AdamW keeps its moments; its step counts may be on the host."""
    states = torch_trainer._optimizer.state.values()
    return {value.device for state in states for key, value in state.items() if key != "step"}


def trains(kind: str, device: SimulatedDevice, tolerance: float = 1e-4, **more: Any) -> None:
    on_cpu, on_npu = trainer(model(kind), **more), trainer(on_device(model(kind), device.device), **more)
    gradients: list[torch.Tensor] = []
    on_cpu.on_gradient = on_npu.on_gradient = lambda gradient: gradients.append(gradient.detach().cpu().clone())
    assert_same_trainers((on_cpu, train(on_cpu, range(1))), (on_npu, train(on_npu, range(1))), tolerance)
    half = len(gradients) // 2
    for expected, actual in zip(gradients[:1], gradients[half : half + 1], strict=True):
        assert float((expected - actual).norm() / expected.norm()) < tolerance
    # Adam takes a full-size step from a gradient of rounding errors, such as that of the bias of the keys.
    assert_same_trainers((on_cpu, train(on_cpu, range(1, 2))), (on_npu, train(on_npu, range(1, 2))), 2e-2)
    assert all(parameter.device == device.device for parameter in on_npu.parameters().values())
    assert _moment_devices(on_npu) == {device.device}


for _kind in KINDS:
    PROGRAMS[f"trains_{_kind}"] = partial(trains, _kind)


@program
def trains_padded_samples(device: SimulatedDevice) -> None:
    trains("llama", device, options=replace(OPTIONS, share_prompts=False))


@program
def trains_with_the_fused_head(device: SimulatedDevice) -> None:
    with patch("flowrt.engines.training.fused_head.WHOLE_LOGITS", 0):
        trains("llama", device)
        trains("gpt2", device, options=replace(OPTIONS, share_prompts=False))


@program
def waits_for_the_device_only_between_passes(device: SimulatedDevice) -> None:
    """Twice a step, for its sums and for the norm of its gradient; with the fused head, once a pass.

    With padded samples transformers looks once whether they are packed.
    """
    for options, whole_logits, most in (
        (OPTIONS, WHOLE_LOGITS, 0),
        (replace(OPTIONS, share_prompts=False), WHOLE_LOGITS, 1),
        (OPTIONS, 0, 1),
    ):
        torch_trainer = trainer(on_device(model("qwen3"), device.device), options=options)
        batch = samples(0)
        passes = len(torch_trainer._passes.cut(torch_trainer.model, batch))
        device.waits.clear()
        with patch("flowrt.engines.training.fused_head.WHOLE_LOGITS", whole_logits):
            torch_trainer.accumulate(batch)
        assert len(device.waits) <= most * passes, device.waits
        device.waits.clear()
        torch_trainer.step()
        assert len(device.waits) <= 2, device.waits


@program
def reads_the_scores_of_a_batch_at_once(device: SimulatedDevice) -> None:
    batch, network = samples(0), on_device(model("qwen3"), device.device)
    assert enable_packing(network)
    device.waits.clear()
    scores = score_on(Device("npu"), network, batch.prompts, batch.responses, 0.9, 32)
    assert len(device.waits) == 1, device.waits
    assert [len(score) for score in scores] == [len(response) for response in batch.responses]
    assert score_on(Device("npu"), network, [], [], 0.9, 32) == []


@program
def trains_several_updates_a_step(device: SimulatedDevice) -> None:
    from flowrt.recipes.config_io import parse
    from flowrt.roles.algorithm import algorithm

    flags = ["--algorithm", "grpo", "--algorithm.plan.updates", "2", "--algorithm.plan.epochs", "2"]
    trains("qwen3", device, algorithm=algorithm(parse(flags)))


@program
def trains_in_bfloat16(device: SimulatedDevice) -> None:
    narrow = torch.bfloat16
    on_cpu, on_npu = (
        trainer(model("llama"), narrow=narrow),
        trainer(on_device(model("llama"), device.device), narrow=narrow),
    )
    assert_same_trainers((on_cpu, train(on_cpu, range(2))), (on_npu, train(on_npu, range(2))), 0.05)
    assert {parameter.dtype for parameter in on_npu.parameters().values()} == {narrow}
    assert {parameter.dtype for parameter in on_npu._parameters} == {torch.float32}
    assert all(parameter.device == device.device for parameter in on_npu._parameters)


@program
def continues_from_a_checkpoint(device: SimulatedDevice) -> None:
    """Written on the device, read on the device and on the CPU; then the snapshot and the export of the weights."""
    for narrow in (None, torch.bfloat16):
        original = trainer(on_device(model("llama"), device.device), narrow=narrow)
        train(original, range(2))
        for location in (device.device, torch.device("cpu")):
            with tempfile.TemporaryDirectory() as name:
                original.save(Path(name))
                resumed = trainer(on_device(model("llama", 5), location), narrow=narrow)
                resumed.load(Path(name))
                assert _moment_devices(resumed) == {location}
            for expected, actual in zip(original._parameters, resumed._parameters, strict=True):
                assert actual.device == location
                assert torch.equal(expected.cpu(), actual.cpu())
            states = zip(original._optimizer.state.values(), resumed._optimizer.state.values(), strict=True)
            for expected, actual in states:
                assert all(torch.equal(value.cpu(), actual[key].cpu()) for key, value in expected.items())
        before = copy.deepcopy([parameter.detach().cpu() for parameter in original._parameters])
        train(original, range(2, 3))
        train(resumed, range(2, 3))
        largest_change = max(
            float((parameter.cpu() - other).abs().max())
            for parameter, other in zip(original._parameters, before, strict=True)
        )
        tolerance = 1e-4 if narrow is None else 0.05
        for expected, actual in zip(original._parameters, resumed._parameters, strict=True):
            assert float((expected.cpu() - actual.cpu()).abs().max()) <= tolerance
        assert largest_change > 0
        snapshot = Snapshot.take(3, original.parameters())
        assert all(bucket.device.type == "cpu" for bucket in snapshot.buckets)
        target = {name: torch.zeros_like(tensor) for name, tensor in original.parameters().items()}
        snapshot.restore(target)
        for name, tensor in original.parameters().items():
            assert target[name].device == device.device
            assert torch.equal(target[name].cpu(), tensor.cpu()), name
        with tempfile.TemporaryDirectory() as name:
            original.export(Path(name) / "final")
            exported = type(original.model).from_pretrained(Path(name) / "final", dtype=torch.float32)
        for expected, other in zip(original._parameters, exported.parameters(), strict=True):
            assert torch.equal(expected.cpu(), other)


@program
def scores_with_a_reference_model(device: SimulatedDevice) -> None:
    batch = samples(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        scores = [
            score_on(
                where, on_device(model("gemma2", dtype=dtype), where.torch), batch.prompts, batch.responses, 0.9, 64
            )
            for where in (Device("cpu"), Device("npu"))
        ]
        for expected, actual in zip(*scores, strict=True):
            assert actual.device.type == "cpu"
            assert float((expected - actual).abs().max()) <= tolerance


@program
def refuses_to_mix_devices_in_one_operation(device: SimulatedDevice) -> None:
    """Test of the simulation: a program that mixes devices fails."""
    ones = torch.ones(3, device=device.device)
    mixed: list[Callable[[], torch.Tensor]] = [lambda: ones + torch.ones(3), lambda: ones[torch.tensor([0, 1])]]
    for operation in mixed:
        try:
            operation()
        except RuntimeError as error:
            assert "in one operation" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("tensors of two devices were accepted")
    assert float((ones * torch.tensor(2.0)).sum()) == 6.0


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(PROGRAMS)
    device, calls = simulate_npu()
    tracebacks: dict[str, str] = {}
    # The CPU uses the attention kernel of a device that has none of its own.
    with device, sdpa_kernel(SDPBackend.MATH):
        for name in chosen:
            start_s = time.process_time()
            try:
                PROGRAMS[name](device)
                tracebacks[name] = ""
            except BaseException:  # noqa: BLE001 (every failure is reported; CheckpointException is no Exception)
                tracebacks[name] = traceback.format_exc()
            print(f"{name}: {time.process_time() - start_s:.1f} s", file=sys.stderr)  # noqa: T201
    print(json.dumps({"programs": tracebacks, "npu_calls": sorted(set(calls.calls))}))  # noqa: T201
