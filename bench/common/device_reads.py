"""How often the host waits for a device: whole programs on the simulated device of the tests, which counts."""

import json
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowrt.engines.base import Prompt
from flowrt.engines.options import Truncation
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import enable_packing
from flowrt.roles.reference import score_on
from flowrt.transport.devices import Device
from tests.simulated_device import SimulatedDevice, on_device, simulate_npu
from tests.unit.engines.device_programs import model, samples, trainer

STEPS = 8
ROWS = 4


class LetterTokenizer:
    """A tokenizer with a letter for each token."""

    eos_token_id = 1

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        return "".join(chr(60 + token) for token in tokens)


@contextmanager
def waits_of(device: SimulatedDevice) -> Iterator[list[str]]:
    """The operations within the context for which the host waits."""
    waits: list[str] = []
    begin = len(device.waits)
    yield waits
    waits += device.waits[begin:]


def of_decode_steps(device: SimulatedDevice, stop: StopConditions, truncation: Truncation) -> float:
    """Waits of a decode step in which no sequence ends."""
    rollout = TorchRollout(
        on_device(model("qwen3"), device.device),
        stop=stop,
        rows=ROWS,
        max_new_tokens=4 * STEPS,
        temperature=0.9,
        truncation=truncation,
    )
    rollout.add([Prompt(key, torch.tensor([4, 5, 6], dtype=torch.int32), key) for key in range(ROWS)])
    rollout._prefill()
    rollout._remove_finished()
    counts = []
    for _ in range(STEPS):
        with waits_of(device) as waits:
            rollout._decode()
            ended = rollout._remove_finished()
        counts += [] if ended else [len(waits)]
    return statistics.fmean(counts)


def of_an_ending_step(device: SimulatedDevice) -> float:
    """Waits of a decode step in which all sequences end."""
    network = on_device(model("qwen3"), device.device)
    rollout = TorchRollout(network, stop=StopConditions(), rows=ROWS, max_new_tokens=2, temperature=0.9)
    rollout.add([Prompt(key, torch.tensor([4, 5, 6], dtype=torch.int32), key) for key in range(ROWS)])
    rollout._prefill()
    with waits_of(device) as waits:
        assert len(rollout.run(threading.Event())) == ROWS
    return len(waits)


def of_a_step(device: SimulatedDevice) -> tuple[float, float]:
    """Waits of the passes of a training step, a pass; and waits of the step besides them."""
    torch_trainer = trainer(on_device(model("qwen3"), device.device))
    batch = samples(0)
    passes = len(torch_trainer._passes.cut(torch_trainer.model, batch))
    with waits_of(device) as in_passes:
        torch_trainer.accumulate(batch)
    with waits_of(device) as of_step:
        torch_trainer.step()
    return len(in_passes) / passes, len(of_step)


def of_scores(device: SimulatedDevice) -> float:
    """Waits of a call of the reference."""
    batch, network = samples(0), on_device(model("qwen3"), device.device)
    enable_packing(network)
    with waits_of(device) as waits:
        score_on(Device("npu"), network, batch.prompts, batch.responses, 0.9, 64)
    return len(waits)


def main() -> None:
    """Print the figures as JSON."""
    torch.set_num_threads(1)
    device, _ = simulate_npu()
    letters = StopConditions((1,), ("zz",), LetterTokenizer())
    with device, sdpa_kernel(SDPBackend.MATH):
        plain = of_decode_steps(device, StopConditions(), Truncation())
        strings = of_decode_steps(device, letters, Truncation())
        reads_pass, reads_step = of_a_step(device)
        with patch("flowrt.engines.training.fused_head.WHOLE_LOGITS", 0):
            reads_fused, _ = of_a_step(device)
        figures = {
            "reads_decode": max(plain, strings),
            "reads_decode_truncated": of_decode_steps(device, StopConditions(), Truncation(top_k=10)),
            "reads_decode_ended": of_an_ending_step(device),
            "reads_pass": reads_pass,
            "reads_pass_fused": reads_fused,
            "reads_step": reads_step,
            "reads_reference": of_scores(device),
        }
    print(json.dumps(figures))
