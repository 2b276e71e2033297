"""The torch engines on an accelerator, against the same engines on the CPU."""

import copy
import threading
from typing import Any

import pytest
import torch

from flowrt.algorithms.objective import Kl, Objective
from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import named_parameters
from flowrt.engines.options import TrainOptions
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.cached_model import CachedModel
from flowrt.engines.torch.graphs import GraphedStep
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.torch.trainer import TorchTrainer
from flowrt.roles.reference import score_on
from flowrt.transport.devices import Device
from flowrt.transport.weights.snapshot import Snapshot
from tests.unit.engines.device_programs import KINDS, After, model, prompts, samples

ROWS, NEW = 4, 80


def engine(network: Any, **options: Any) -> TorchRollout:
    return TorchRollout(network, stop=StopConditions((1,)), rows=ROWS, max_new_tokens=NEW, temperature=0.9, **options)


def finish(rollout: TorchRollout, pending: list[Prompt]) -> dict[int, Response]:
    done: dict[int, Response] = {}
    while pending or rollout.running:
        while pending and rollout.room:
            rollout.add([pending.pop(0)])
        done |= {response.key: response for response in rollout.run(threading.Event())}
    return done


def rescored(device: Device, kind: str, responses: dict[int, Response]) -> float:
    """The largest difference of recorded log-probabilities from those of the model, in nats."""
    tokens_of = {prompt.key: prompt.tokens for prompt in prompts()}
    keys = sorted(responses)
    scored = score_on(
        device,
        model(kind).to(device.torch),
        [tokens_of[key] for key in keys],
        [responses[key].tokens for key in keys],
        0.9,
        256,
    )
    return max(
        float((logprobs - responses[key].logprobs).abs().max()) for key, logprobs in zip(keys, scored, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_generated_log_probabilities_are_those_of_the_cpu(kind: str, accelerator: Device) -> None:
    responses = finish(engine(model(kind).to(accelerator.torch)), prompts())
    assert rescored(Device("cpu"), kind, responses) < 1e-2
    assert rescored(accelerator, kind, responses) < 1e-2


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_cuda_graphs_give_the_results_of_the_plain_step(kind: str, accelerator: Device) -> None:
    if accelerator.kind != "cuda":
        pytest.skip("graphs are for CUDA")
    rollout = engine(model(kind).to(accelerator.torch), compiled=True)
    assert isinstance(rollout._cached, CachedModel)
    assert isinstance(rollout._cached.step, GraphedStep)
    rollout.add(prompts()[:ROWS])
    done = {response.key: response for response in rollout.run(After(5))}
    snapshot = Snapshot.take(7, named_parameters(model(kind, 1)))
    while (work := rollout.prepare(snapshot)) is not None:
        thread = threading.Thread(target=work)  # in parallel with decoding, as in the role
        thread.start()
        done |= {response.key: response for response in rollout.run(After(3))}
        thread.join(60.0)
    rollout.swap(snapshot)
    done |= finish(rollout, [])
    assert all(bool(response.logprobs.isfinite().all()) for response in done.values())
    again = finish(rollout, prompts())  # with the weights of version 7
    plain = engine(model(kind, 1).to(accelerator.torch))
    expected = finish(plain, prompts())
    for key, response in expected.items():
        length = min(len(response.tokens), len(again[key].tokens), 3)
        assert torch.allclose(response.logprobs[:length], again[key].logprobs[:length], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_the_training_gradient_is_that_of_the_cpu(kind: str, narrow: torch.dtype | None, accelerator: Device) -> None:
    gradients: list[torch.Tensor] = []
    for place in (torch.device("cpu"), accelerator.torch):
        trainer = TorchTrainer(
            copy.deepcopy(model(kind)).to(place),
            TrainOptions(lr=1e-3, warmup_steps=1, forward_tokens=64),
            Objective(kl=Kl(1e-2)),
            temperature=0.9,
            narrow=narrow,
        )
        trainer.on_gradient = lambda gradient: gradients.append(gradient.cpu().clone())
        trainer.accumulate(samples(0))
        trainer.step()
        assert all(parameter.device == place for parameter in trainer.parameters().values())
    on_cpu, on_device = gradients
    assert float((on_cpu - on_device).norm() / on_cpu.norm()) < (1e-3 if narrow is None else 0.1)
