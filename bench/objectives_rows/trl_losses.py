"""Row `trl`: loss and gradient of every loss type of TRL, against TRL's own code in an environment of its own.

- On given log-probabilities: all loss types, corrections, masks, divergences and entropy terms, in float64.
- Through a whole GPT-2 in float64: TRL's trainer against flowrt's training engine. The log-probabilities of TRL are
  computed in float32 there, which is what the distance shows.

In bench/, ``python -m objectives_rows.trl_losses PYTHON FILE`` writes what tests/unit/algorithms/test_trl.py reads.
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
from objectives_rows.closed_forms import Sample, corrected, step_of, tokens_of
from objectives_rows.steps import (
    GROUPS,
    LIMIT,
    TEMPERATURE,
    make_model,
    make_step,
    options,
    run_step,
    samples_of,
    save_model,
)

SCRIPT = Path(__file__).parent / "trl_values.py"
TIMEOUT_S = 600.0
SPREADS = (0.02, 0.3, 2.0)
"""Nats between two policies."""
SEQUENCE_MEAN, CONSTANT = Aggregation("sequence_mean"), Aggregation("constant", LIMIT)
OFF = Correction("off")
ROLLOUT, STEP = Plan("rollout"), Plan("step")

Settings = dict[str, float | str | bool]


class Values(TypedDict):
    """What TRL computed of an order; the gradient by entropies only of tokens."""

    loss: float
    gradient: list[float]
    entropy_gradient: list[float]


def of(policy: PolicyLoss, aggregation: Aggregation | None = None, plan: Plan = STEP) -> Objective:
    return Objective(policy=policy, plan=plan, correction=OFF, aggregation=aggregation or Aggregation())


DAPO = of(Ppo(0.2, 0.28))
CLIP: Settings = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
SEQUENCE: Settings = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
LOSSES: dict[str, tuple[Settings, Objective]] = {
    "grpo": ({"loss_type": "grpo"}, of(Ppo(), SEQUENCE_MEAN)),
    "bnpo": ({"loss_type": "bnpo"}, of(Ppo())),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": LIMIT}, of(Ppo(), CONSTANT)),
    "dapo": (CLIP, DAPO),
    "two_sided": (CLIP | {"delta": 1.5}, of(Ppo(0.2, 0.28, delta=1.5))),
    "gspo": (SEQUENCE | {"loss_type": "grpo"}, of(Gspo(), SEQUENCE_MEAN)),
    "luspo": (SEQUENCE | {"loss_type": "luspo"}, of(Gspo(length_weighted=True), SEQUENCE_MEAN)),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, of(Cispo())),
    "sapo": ({"loss_type": "sapo"}, of(Sapo(), SEQUENCE_MEAN)),
    "vespo": ({"loss_type": "vespo"}, of(Vespo())),
    "k3": (CLIP | {"beta": 0.1, "use_bias_correction_kl": False}, dataclasses.replace(DAPO, kl=Kl(0.1))),
    "unbiased_k3": (
        CLIP | {"beta": 0.1, "use_bias_correction_kl": True},
        dataclasses.replace(DAPO, plan=ROLLOUT, kl=Kl(0.1, "unbiased")),
    ),
}
"""The loss types of TRL, by its names, and their equals here."""
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
    **{name: (CLIP, dataclasses.replace(DAPO, correction=one)) for name, one in CORRECTIONS.items()},
}


def draw_samples(rng: random.Random, spread: float, rollout_anchor: bool) -> list[Sample]:
    """Six samples of 1 to 8 tokens."""
    samples = []
    for length in (1, 8, 3, 5, 2, 7):
        policy: list[complex] = [-rng.expovariate(0.7) - 1e-3 for _ in range(length)]
        moved = [[min(one.real + rng.gauss(0, spread), -1e-4) for one in policy] for _ in range(3)]
        samples.append(
            Sample(
                policy=policy,
                entropy=[rng.uniform(0, 4) for _ in range(length)],
                anchor=moved[1] if rollout_anchor else moved[0],
                rollout=moved[1],
                reference=moved[2],
                advantage=rng.gauss(0, 1),
                weight=1.0,
                group=0,
            )
        )
    return samples


def token_cases() -> dict[str, list[Sample]]:
    """The samples of each case of tokens, by its name and spread."""
    rng = random.Random(17)
    return {
        f"{name} {spread}": draw_samples(rng, spread, objective.plan.anchor == "rollout")
        for name, (_, objective) in TOKEN_CASES.items()
        for spread in SPREADS
    }


def token_order(name: str, samples: Sequence[Sample]) -> dict[str, object]:
    """An order on given log-probabilities; the importance weights are those of the scalar formula."""
    settings, objective = TOKEN_CASES[name]
    return {
        "settings": settings,
        "logprobs": [[complex(value).real for value in one.policy] for one in samples],
        "entropy": [[complex(value).real for value in one.entropy] for one in samples],
        "anchor": [one.anchor for one in samples],
        "rollout": [one.rollout for one in samples],
        "reference": [one.reference for one in samples],
        "advantages": [one.advantage for one in samples],
        "importance": [corrected(one, objective.correction) for one in samples] if name in CORRECTIONS else None,
    }


def token_errors(name: str, samples: Sequence[Sample], values: Values) -> tuple[float, float]:
    """Distance of loss and gradient from TRL's, relative to their size above 1 and to the largest slope."""
    objective = TOKEN_CASES[name][1]
    tokens = tokens_of(samples, objective.measure(step_of([samples])))
    if not objective.needs.entropy:
        tokens = dataclasses.replace(tokens, entropy_T=None)
    counts = {"token": len(tokens.logprobs_T), "sample": len(samples), "group": 1}
    loss = torch.stack([term.loss_sum / counts[term.per] for term in objective.terms(tokens)]).sum()
    inputs = [tokens.logprobs_T] if tokens.entropy_T is None else [tokens.logprobs_T, tokens.entropy_T]
    slopes = torch.autograd.grad(loss, inputs, allow_unused=True)
    wanted = [torch.tensor(values[key], dtype=torch.float64) for key in ("gradient", "entropy_gradient")]
    got = [torch.zeros_like(one) if slope is None else slope for one, slope in zip(inputs, slopes, strict=True)]
    size = max(float(one.abs().max()) for one in wanted) or 1.0  # all masked
    gradient = max(float((one - other).abs().max()) for one, other in zip(got, wanted, strict=False)) / size
    return abs(float(loss.detach()) - values["loss"]) / max(1.0, abs(values["loss"])), gradient


def model_objective(name: str) -> Objective:
    """A loss whose ratios are measured from the recorded log-probabilities, which both sides are given."""
    return dataclasses.replace(LOSSES[name][1], plan=ROLLOUT)


def model_batch(name: str) -> TrainingBatch:
    """The samples of a fixed step that both sides can be given: of weight 1, not empty, with prompts of one length.

    A mean over no tokens is not defined. TRL pads prompts on the left, which moves the positions that GPT-2 counts.
    """
    batch = make_step(make_model(), longer_by=0).batch(model_objective(name))
    batch = samples_of(batch, [row for row, response in enumerate(batch.responses) if len(response)])
    return dataclasses.replace(batch, weights_N=torch.ones(len(batch.responses), dtype=torch.float64))


def model_order(name: str, model: Path) -> dict[str, object]:
    """An order of a whole model."""
    batch = model_batch(name)
    reference = batch.reference_logprobs or batch.rollout_logprobs
    return {
        "settings": {"max_completion_length": LIMIT} | LOSSES[name][0],
        "model": str(model),
        "temperature": TEMPERATURE,
        "prompts": [one.tolist() for one in batch.prompts],
        "responses": [one.tolist() for one in batch.responses],
        "anchor": [one.tolist() for one in batch.rollout_logprobs],
        "rollout": [one.tolist() for one in batch.rollout_logprobs],
        "reference": [one.tolist() for one in reference],
        "advantages": batch.advantages_N.tolist(),
    }


def model_errors(name: str, values: Values) -> tuple[float, float]:
    """Distance of the loss that the engine reports, relative to 1, and of its gradient, relative to its norm."""
    engine = TorchTrainer(make_model(), options(), model_objective(name), temperature=TEMPERATURE)
    seen: list[Tensor] = []
    engine.on_gradient = lambda gradient: seen.append(gradient.clone())
    metrics = run_step(engine, model_batch(name), [[group] for group in range(GROUPS)])
    wanted = torch.tensor(values["gradient"], dtype=torch.float64)
    gradient = float((seen[0] - wanted).norm() / wanted.norm())
    return abs(metrics["loss"] - values["loss"]) / max(1.0, abs(values["loss"])), gradient


def ask(python: Path, orders: dict[str, dict[str, object]]) -> dict[str, Values]:
    """What TRL computes of the orders. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as folder:
        asked, answered = Path(folder) / "orders.json", Path(folder) / "values.json"
        asked.write_text(json.dumps(orders))
        command = [str(python), str(SCRIPT), str(asked), str(answered)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)
        if ended.returncode:
            raise RuntimeError(f"{python} could not compute the losses of TRL:\n{ended.stderr[-4000:]}")
        values: dict[str, Values] = json.loads(answered.read_text())
        return values


def measure(quick: bool, *, python: Path) -> dict[str, float]:
    """The largest distance of losses and gradients: of given log-probabilities, and of a whole model."""
    cases = token_cases()
    models = ["dapo", "gspo"] if quick else list(LOSSES)
    with tempfile.TemporaryDirectory(prefix="flowrt-bench-") as name:
        save_model(Path(name))
        orders = {case: token_order(case.split()[0], samples) for case, samples in cases.items()}
        orders |= {f"model {loss}": model_order(loss, Path(name)) for loss in models}
        values = ask(python, orders)
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
    """TRL's losses and gradients of the cases of tokens, for a test that has no TRL."""
    orders = {case: token_order(case.split()[0], samples) for case, samples in token_cases().items()}
    path.write_text(json.dumps(ask(python, orders)) + "\n")


if __name__ == "__main__":
    write_fixture(Path(sys.argv[1]), Path(sys.argv[2]))
