"""Loss and gradient of every loss type of TRL, compared with TRL's own code in a separate environment.

- On given log-probabilities: all loss types, corrections, masks, divergences and entropy terms, in float64.
- Through a whole GPT-2 in float64: TRL's trainer against flowrt's training engine. TRL computes log-probabilities in
  float32 there, which explains the distance.

``python -m tests.proofs.trl PYTHON FILE`` writes what tests/unit/algorithms/test_trl.py reads.
"""

import dataclasses
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from flowrt.algorithms.algorithm import Plan
from flowrt.algorithms.losses import Cispo, Gspo, PolicyLoss, Ppo, Sapo, Vespo
from flowrt.algorithms.objective import Aggregation, Correction, Entropy, Kl, Objective, Rejection
from flowrt.engines.base import TrainingBatch
from flowrt.engines.torch.trainer import TorchTrainer
from tests.proofs.formulas import Sample, corrected, step_of, tokens_of
from tests.proofs.steps import (
    GROUPS,
    LIMIT,
    TEMPERATURE,
    make_model,
    make_step,
    options,
    run_step,
    save_model,
)

SCRIPT = Path(__file__).parent / "trl_values.py"
TIMEOUT_S = 600.0
SPREADS = (0.02, 0.3, 2.0)
"""Standard deviations of the log ratios between policies, in nats."""
SEQUENCE_MEAN, CONSTANT = Aggregation("sequence_mean"), Aggregation("constant", LIMIT)
OFF = Correction("off")
ROLLOUT, STEP = Plan("rollout"), Plan("step")

Settings = dict[str, float | str | bool]


class Values(TypedDict):
    """The values that TRL computed for a request; ``entropy_gradient`` only for requests without a model."""

    loss: float
    gradient: list[float]
    entropy_gradient: list[float]


def make_objective(policy: PolicyLoss, aggregation: Aggregation | None = None, plan: Plan = STEP) -> Objective:
    """An objective with this loss and without importance correction."""
    return Objective(policy=policy, plan=plan, correction=OFF, aggregation=aggregation or Aggregation())


DAPO = make_objective(Ppo(0.2, 0.28))
CLIP: Settings = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
SEQUENCE: Settings = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
LOSSES: dict[str, tuple[Settings, Objective]] = {
    "grpo": ({"loss_type": "grpo"}, make_objective(Ppo(), SEQUENCE_MEAN)),
    "bnpo": ({"loss_type": "bnpo"}, make_objective(Ppo())),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": LIMIT}, make_objective(Ppo(), CONSTANT)),
    "dapo": (CLIP, DAPO),
    "two_sided": (CLIP | {"delta": 1.5}, make_objective(Ppo(0.2, 0.28, delta=1.5))),
    "gspo": (SEQUENCE | {"loss_type": "grpo"}, make_objective(Gspo(), SEQUENCE_MEAN)),
    "luspo": (SEQUENCE | {"loss_type": "luspo"}, make_objective(Gspo(length_weighted=True), SEQUENCE_MEAN)),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, make_objective(Cispo())),
    "sapo": ({"loss_type": "sapo"}, make_objective(Sapo(), SEQUENCE_MEAN)),
    "vespo": ({"loss_type": "vespo"}, make_objective(Vespo())),
    "k3": (CLIP | {"beta": 0.1, "use_bias_correction_kl": False}, dataclasses.replace(DAPO, kl=Kl(0.1))),
    "unbiased_k3": (
        CLIP | {"beta": 0.1, "use_bias_correction_kl": True},
        dataclasses.replace(DAPO, plan=ROLLOUT, kl=Kl(0.1, "unbiased")),
    ),
}
"""The loss types of TRL: its settings, and the objective of flowrt that must be equal."""
CORRECTIONS: dict[str, Correction] = {
    "token_truncate": Correction("token", "truncate", 0.0, 2.0),
    "token_truncate_band": Correction("token", "truncate", 0.5, 2.0),
    "token_mask": Correction("token", "mask", 0.5, 2.0),
    "sequence_truncate": Correction("sequence", "truncate", 0.0, 2.0),
    "sequence_mask": Correction("sequence", "mask", 0.5, 2.0),
}
TERMS: dict[str, tuple[Settings, Objective]] = {
    "off_policy_mask": (
        CLIP | {"off_policy_mask_threshold": 0.05},
        dataclasses.replace(DAPO, rejection=Rejection(negative_kl=0.05)),
    ),
    "entropy_bonus": (CLIP | {"entropy_coef": 0.01}, dataclasses.replace(DAPO, entropy=Entropy(0.01))),
    "top_entropy": (CLIP | {"top_entropy_quantile": 0.23}, dataclasses.replace(DAPO, entropy=Entropy(top=0.23))),
}
TOKEN_CASES: dict[str, tuple[Settings, Objective]] = {
    **LOSSES,
    **TERMS,
    **{name: (CLIP, dataclasses.replace(DAPO, correction=correction)) for name, correction in CORRECTIONS.items()},
}


def draw_samples(rng: random.Random, spread: float, rollout_anchor: bool) -> list[Sample]:
    """Six samples of 1 to 8 tokens.

    Args:
        rng: source of randomness.
        spread: standard deviation of the log ratios between policies, in nats.
        rollout_anchor: whether the anchor is the rollout policy.
    """
    samples = []
    for length in (1, 8, 3, 5, 2, 7):
        policy: list[complex] = [-rng.expovariate(0.7) - 1e-3 for _ in range(length)]
        noisy = [[min(logprob.real + rng.gauss(0, spread), -1e-4) for logprob in policy] for _ in range(3)]
        samples.append(
            Sample(
                policy=policy,
                entropy=[rng.uniform(0, 4) for _ in range(length)],
                anchor=noisy[1] if rollout_anchor else noisy[0],
                rollout=noisy[1],
                reference=noisy[2],
                advantage=rng.gauss(0, 1),
                weight=1.0,
                group=0,
            )
        )
    return samples


def token_cases() -> dict[str, list[Sample]]:
    """The samples of each case on given log-probabilities, by "NAME SPREAD"; always the same ones."""
    rng = random.Random(17)
    return {
        f"{name} {spread}": draw_samples(rng, spread, objective.plan.anchor == "rollout")
        for name, (_, objective) in TOKEN_CASES.items()
        for spread in SPREADS
    }


def token_request(name: str, samples: Sequence[Sample]) -> dict[str, object]:
    """A request on given log-probabilities; the importance weights are those of the scalar formula."""
    settings, objective = TOKEN_CASES[name]
    return {
        "settings": settings,
        "logprobs": [[complex(value).real for value in sample.policy] for sample in samples],
        "entropy": [[complex(value).real for value in sample.entropy] for sample in samples],
        "anchor": [sample.anchor for sample in samples],
        "rollout": [sample.rollout for sample in samples],
        "reference": [sample.reference for sample in samples],
        "advantages": [sample.advantage for sample in samples],
        "importance": [corrected(sample, objective.correction) for sample in samples] if name in CORRECTIONS else None,
    }


def token_errors(name: str, samples: Sequence[Sample], values: Values) -> tuple[float, float]:
    """Distances from TRL: of the loss, relative to its size above 1; of the gradient, to its largest element."""
    objective = TOKEN_CASES[name][1]
    tokens = tokens_of(samples, objective.measure(step_of([samples])))
    if not objective.needs.entropy:
        tokens = dataclasses.replace(tokens, entropy_T=None)
    counts = {"token": len(tokens.logprobs_T), "sample": len(samples), "group": 1}
    loss = torch.stack([term.loss_sum / counts[term.per] for term in objective.terms(tokens)]).sum()
    inputs = [tokens.logprobs_T] if tokens.entropy_T is None else [tokens.logprobs_T, tokens.entropy_T]
    slopes = torch.autograd.grad(loss, inputs, allow_unused=True)
    wanted = [torch.tensor(values[key], dtype=torch.float64) for key in ("gradient", "entropy_gradient")]
    got = [torch.zeros_like(tensor) if slope is None else slope for tensor, slope in zip(inputs, slopes, strict=True)]
    size = max(float(expected.abs().max()) for expected in wanted) or 1.0  # all masked
    gradient = max(float((actual - other).abs().max()) for actual, other in zip(got, wanted, strict=False)) / size
    return abs(float(loss.detach()) - values["loss"]) / max(1.0, abs(values["loss"])), gradient


def model_objective(name: str) -> Objective:
    """The objective of a loss type with ratios to the recorded log-probabilities, which both sides receive."""
    return dataclasses.replace(LOSSES[name][1], plan=ROLLOUT)


def model_batch(name: str) -> TrainingBatch:
    """The samples of a fixed step that both sides support: of weight 1, not empty, with prompts of equal length.

    The mean over no tokens is undefined. TRL pads prompts on the left, which shifts the position ids of GPT-2.
    """
    batch = make_step(make_model(), longer_by=0).batch(model_objective(name))
    batch = batch.only([row for row, response in enumerate(batch.responses) if len(response)])
    return dataclasses.replace(batch, weights_N=torch.ones(len(batch.responses), dtype=torch.float64))


def model_request(name: str, model: Path) -> dict[str, object]:
    """A request with a whole model, in the directory ``model``."""
    batch = model_batch(name)
    reference = batch.reference_logprobs or batch.rollout_logprobs
    return {
        "settings": {"max_completion_length": LIMIT} | LOSSES[name][0],
        "model": str(model),
        "temperature": TEMPERATURE,
        "prompts": [prompt.tolist() for prompt in batch.prompts],
        "responses": [response.tolist() for response in batch.responses],
        "anchor": [logprob.tolist() for logprob in batch.rollout_logprobs],
        "rollout": [logprob.tolist() for logprob in batch.rollout_logprobs],
        "reference": [logprobs.tolist() for logprobs in reference],
        "advantages": batch.advantages_N.tolist(),
    }


def model_errors(name: str, values: Values) -> tuple[float, float]:
    """Distances from TRL: of the engine's reported loss, relative to its size above 1; of its gradient, by the norm."""
    engine = TorchTrainer(make_model(), options(), model_objective(name), temperature=TEMPERATURE)
    recorded: list[Tensor] = []
    engine.on_gradient = lambda gradient: recorded.append(gradient.clone())
    metrics = run_step(engine, model_batch(name), [[group] for group in range(GROUPS)])
    wanted = torch.tensor(values["gradient"], dtype=torch.float64)
    gradient = float((recorded[0] - wanted).norm() / wanted.norm())
    return abs(metrics["loss"] - values["loss"]) / max(1.0, abs(values["loss"])), gradient


def run_trl(python: Path, requests: dict[str, dict[str, object]]) -> dict[str, Values]:
    """The values that TRL computes for the requests, by name.

    Args:
        python: interpreter of the environment that has TRL.
        orders: the requests, by name.

    Raises RuntimeError if the process fails.
    """
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        request_file, value_file = Path(folder) / "orders.json", Path(folder) / "values.json"
        request_file.write_text(json.dumps(requests))
        command = [str(python), str(SCRIPT), str(request_file), str(value_file)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)
        if process.returncode:
            raise RuntimeError(f"{python} could not compute the losses of TRL:\n{process.stderr[-4000:]}")
        values: dict[str, Values] = json.loads(value_file.read_text())
        return values


def measure(quick: bool, *, python: Path) -> dict[str, float]:
    """The largest distances of losses and gradients, on given log-probabilities and through a whole model."""
    cases = token_cases()
    models = ["dapo", "gspo"] if quick else list(LOSSES)
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        save_model(Path(folder))
        requests = {case: token_request(case.split()[0], samples) for case, samples in cases.items()}
        requests |= {f"model {loss}": model_request(loss, Path(folder)) for loss in models}
        values = run_trl(python, requests)
    tokens = [token_errors(case.split()[0], samples, values[case]) for case, samples in cases.items()]
    whole = [model_errors(loss, values[f"model {loss}"]) for loss in models]
    return {
        "trl_loss_max": max(loss for loss, _ in tokens + whole),
        "trl_gradient_max": max(gradient for _, gradient in tokens + whole),
        "trl_tokens_max": max(max(pair) for pair in tokens),
        "trl_token_cases": float(len(tokens)),
        "trl_model_cases": float(len(whole)),
    }


def write_fixture(python: Path, path: Path) -> None:
    """Write TRL's values of the cases on given log-probabilities, for a test in an environment without TRL."""
    requests = {case: token_request(case.split()[0], samples) for case, samples in token_cases().items()}
    path.write_text(json.dumps(run_trl(python, requests)) + "\n")


if __name__ == "__main__":
    write_fixture(Path(sys.argv[1]), Path(sys.argv[2]))
