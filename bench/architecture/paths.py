"""A tiny model in all ways in which flowrt computes with it, against a forward pass over each whole sequence alone."""

import copy
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from architecture.tiny import build, default_error

from flowrt.engines.base import Prompt, Response
from flowrt.engines.hf import named_parameters, set_training_mode
from flowrt.engines.options import TrainOptions
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.generation_path import Way, right_way
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.architecture import check_training
from flowrt.engines.training.forward import apply_optimizations, is_packing_enabled, response_logprobs
from flowrt.errors import ConfigError
from flowrt.transport.weights.snapshot import Snapshot

PROMPTS = (5, 23, 12, 12)
"""Lengths (tokens); the last two prompts are equal, as those of a group."""
NEW = 8
TEMPERATURE = 0.7
UPDATE_AFTER = 3
"""Generated tokens of the longest sequence after which weights are updated in flight."""
TOLERANCE = 2e-3
"""Nats by which log-probabilities may be off in float32; tiny models with random weights amplify rounding."""
GRADIENT_TOLERANCE = 2e-2
"""Norm of a gradient's error over the gradient's norm."""
NO_STOP = StopConditions((10**6,))


@dataclass(frozen=True)
class Result:
    """Of a family.

    Attributes:
        state: right, refused, wrong or traceback.
        generation: `Way`, or refused.
        training: packed, padded, or refused.
        off_nats: the largest error of a log-probability that was accepted.
        reason: why it was refused, or what is wrong.
    """

    state: str
    generation: str = ""
    training: str = ""
    off_nats: float = 0.0
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}


def examine(family: str) -> Result:
    """The result of this family. Raises what a run would show as a traceback."""
    try:
        model = build(family)
    except Exception:
        if reason := default_error(family):
            return Result("refused", "refused", "refused", reason=reason)
        raise
    try:
        check_training(model)
    except ConfigError as error:
        return Result("refused", "refused", "refused", reason=str(error))
    offs = {}
    try:
        way = right_way(model)
    except ConfigError as error:
        result = Result("refused", "refused", reason=str(error))
    else:
        result = Result("right", way.value)
        offs = generation_errors(model, way)
    trained, of_training = training_errors(model)
    offs |= of_training
    wrong = {
        name: off for name, off in offs.items() if not off <= (GRADIENT_TOLERANCE if "gradient" in name else TOLERANCE)
    }
    most = max(off for name, off in offs.items() if "gradient" not in name)
    result = replace(result, training=trained, off_nats=float(f"{most:.2g}"))
    if wrong:
        return replace(
            result, state="wrong", reason=", ".join(f"{name} off by {off:.2g}" for name, off in wrong.items())
        )
    return result


def prompts_of(model: Any) -> list[torch.Tensor]:
    vocabulary = model.config.get_text_config().vocab_size
    dice = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, vocabulary, (length,), generator=dice, dtype=torch.int32) for length in PROMPTS]
    prompts[3] = prompts[2]
    return prompts


def engine(model: Any, rows: int, way: Way) -> TorchRollout:
    generating = way.of(model, rows)
    return TorchRollout(generating, stop=NO_STOP, rows=rows, max_new_tokens=NEW, temperature=TEMPERATURE)


def generate(rollout: TorchRollout, todo: Sequence[Prompt], updates: str = "") -> list[Response]:
    """The responses in the order of the prompts.

    ``updates``: how weights, equal to the model's, are updated in flight: "prepared", "at once", or not at all.
    """
    waiting, done = list(todo), dict[int, Response]()
    snapshot = Snapshot.take(1, named_parameters(rollout._cached.model)) if updates else None
    interrupt = threading.Event()
    interrupt.set()  # after each token
    steps = 0
    while waiting or rollout.running:
        count = min(rollout.room, len(waiting))
        rollout.add(waiting[:count])
        waiting = waiting[count:]
        done |= {response.key: response for response in rollout.run(interrupt)}
        steps += 1
        if snapshot is not None and steps >= UPDATE_AFTER and rollout.running:
            if updates == "prepared" and (work := rollout.prepare(snapshot)) is not None:
                work()
                continue
            rollout.swap(snapshot)
            snapshot = None
    return [done[key] for key in sorted(done)]


@torch.no_grad()
def plain_logprobs(model: Any, prompt: torch.Tensor, response: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities [T, V] (nats) that each token of the response is drawn from."""
    tokens_1L = torch.cat([prompt, response]).long().unsqueeze(0)
    logits_LV = model(input_ids=tokens_1L, use_cache=False).logits[0].float()
    logprobs_TV: torch.Tensor = (logits_LV[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return logprobs_TV


def off_by(model: Any, prompts: Sequence[torch.Tensor], responses: Sequence[Response]) -> float:
    """The largest error (nats) of a recorded log-probability; those of greedy tokens have temperature too."""
    most = 0.0
    for prompt, response in zip(prompts, responses, strict=True):
        plain_TV = plain_logprobs(model, prompt, response.tokens, TEMPERATURE)
        expected_T = plain_TV.gather(1, response.tokens.long().unsqueeze(1))[:, 0]
        most = max(most, float((response.logprobs - expected_T).abs().nan_to_num(torch.inf).max()))
    return most


def generation_errors(model: Any, way: Way) -> dict[str, float]:
    """Errors (nats) of recorded log-probabilities, by the way in which they were generated."""
    prompts = prompts_of(model)
    todo = [Prompt(key, tokens, seed=key, greedy=key == 1) for key, tokens in enumerate(prompts)]
    batch = generate(engine(model, len(prompts), way), todo)
    prepared = generate(engine(model, len(prompts), way), todo, "prepared")
    few = generate(engine(model, 2, way), todo, "at once")
    single_row = generate(engine(model, 1, way), todo[1:2])
    return {
        "a batch": off_by(model, prompts, batch),
        "greedy tokens": greedy_error(model, prompts[1], batch[1]),
        "an update in flight": off_by(model, prompts, prepared),
        "rows that are used again, and an update at once": off_by(model, prompts, few),
        "one row": off_by(model, prompts[1:2], single_row),
    }


def greedy_error(model: Any, prompt: torch.Tensor, response: Response) -> float:
    """By how many nats the most likely token is more likely than the chosen one, at most."""
    plain_TV = plain_logprobs(model, prompt, response.tokens, 1.0)
    chosen_T = plain_TV.gather(1, response.tokens.long().unsqueeze(1))[:, 0]
    return float((plain_TV.max(-1).values - chosen_T).max())


def training_errors(model: Any) -> tuple[str, dict[str, float]]:
    """The form in which samples are trained, and errors of log-probabilities and of gradients."""
    prompts, dice = prompts_of(model), torch.Generator().manual_seed(2)
    vocabulary = model.config.get_text_config().vocab_size
    lengths = [NEW, 3, 9, 1]
    responses = [torch.randint(3, vocabulary, (length,), generator=dice) for length in lengths]
    expected_T = torch.cat(
        [
            plain_logprobs(model, prompt, response, TEMPERATURE).gather(1, response.unsqueeze(1))[:, 0]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    )
    unpadded = copy.deepcopy(model)
    for prompt, response in zip(prompts, responses, strict=True):
        response_logprobs(unpadded, [prompt], [response], TEMPERATURE)[0].sum().backward()
    wanted = gradient_of(unpadded)
    errors: dict[str, float] = {}
    trained = ""
    for options in (TrainOptions(share_prompts=False), TrainOptions()):
        copied = apply_optimizations(set_training_mode(copy.deepcopy(model)), options)
        form = "packed" if is_packing_enabled(copied) else "padded"
        if form == trained:
            continue  # packing is not supported
        trained = form
        found_T = response_logprobs(copied, prompts, responses, TEMPERATURE)[0]
        errors[f"{form} training"] = float((found_T.detach() - expected_T).abs().nan_to_num(torch.inf).max())
        found_T.sum().backward()
        errors[f"gradient of {form} training"] = float((gradient_of(copied) - wanted).norm() / wanted.norm())
    return trained, errors


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat(
        [
            (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).flatten()
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
    )
