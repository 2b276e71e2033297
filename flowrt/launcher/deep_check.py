"""``flowrt data check --deep``: rollout and trainer compared on prompts of a run, at equal weights.

The torch rollout engine generates a few tokens for prompts of unequal lengths; their log-probabilities are compared
with those of the trainer's forward pass, packed or padded, in the trainer's dtype. Loads the model twice.

Shapes: T tokens of a response.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

import torch

from flowrt.engines.base import Prompt, Response, RolloutEngine
from flowrt.engines.hf import load_model, model_name, set_training_mode
from flowrt.engines.registry import ROLLOUT_ENGINES, TRAIN_ENGINES
from flowrt.engines.training.forward import apply_optimizations, is_packing_enabled, response_logprobs
from flowrt.errors import ConfigError, EngineError
from flowrt.launcher.model_check import as_named, check_finite, check_weights, write_models
from flowrt.launcher.start_models import merge_starts
from flowrt.recipes.config import ReferenceConfig, RunConfig, changed
from flowrt.recipes.run_dir import model_dir
from flowrt.roles.engine_setup import initial_mismatch_limit, rollout_engine

log = logging.getLogger("flowrt")
PROMPTS = 4
NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Of rollout and trainer on the same tokens.

    Attributes:
        model: its directory and type.
        k3: k3 estimate of KL(rollout || trainer), in nats per token.
        largest_nats: the largest difference of a log-probability.
        limit: the largest allowed ``k3``; 0: any.
        tokens: number of tokens compared.
        form: whether the trainer's samples were packed or padded.
    """

    model: str
    k3: float
    largest_nats: float
    limit: float
    tokens: int
    form: str

    @property
    def is_refused(self) -> bool:
        """Whether a run would end before its first step."""
        return bool(self.limit) and not self.k3 <= self.limit

    def __str__(self) -> str:
        state = f"more than the {self.limit:g} that trainer.max_initial_mismatch allows" if self.is_refused else "equal"
        return (
            f"{state}: rollout and trainer disagree by {self.k3:.2g} nats a token at equal weights, by "
            f"{self.largest_nats:.2g} at most, over {self.tokens} tokens ({self.form}), model {self.model}"
        )


def compare(config: RunConfig, prompts: Sequence[Sequence[int]]) -> Disagreement:
    """Generate for the shortest and the longest of these prompts, and compare.

    Args:
        config: of the run; its rollout engine must compute in the workers.
        prompts: token ids.

    Raises:
        ConfigError: if the rollout engine is another, or the model cannot be trained or cannot generate.
        EngineError: if the model cannot be loaded.
    """
    if not ROLLOUT_ENGINES[config.rollout.engine].is_in_worker:
        raise ConfigError(
            f"--deep generates in this process, and rollout.engine {config.rollout.engine} in a server; leave "
            "out --deep (a run makes the same comparison before its first step), or use --rollout.engine torch"
        )
    if not prompts:
        raise ConfigError("--deep has no prompt to compare with: all prompts are too long")
    ascending = sorted(prompts, key=len)
    chosen = [*ascending[: PROMPTS // 2], *ascending[PROMPTS // 2 :][-PROMPTS // 2 :]]
    with TemporaryDirectory(prefix="flowrt-") as directory:
        own = replace(config, run_dir=directory, reference=ReferenceConfig())
        try:
            write_start(own)
            mismatch = _compare(own, chosen)
        except (ConfigError, EngineError) as error:
            raise type(error)(as_named(own, str(error))) from error
    return replace(mismatch, model=as_named(own, mismatch.model))


def write_start(config: RunConfig) -> None:
    """Write the model that a run of this configuration starts from, if it writes one, to its run directory.

    Raises ConfigError if it cannot be written or loaded.
    """
    merge_starts(config)
    if config.model_overrides:
        write_models(config)
    check_weights(model_dir(config), log.info)
    check_finite(model_dir(config))


def _compare(config: RunConfig, chosen: Sequence[Sequence[int]]) -> Disagreement:
    new = min(NEW_TOKENS, config.rollout.max_new_tokens)
    short = changed(config, {"rollout.max_new_tokens": new})
    tokens = [torch.tensor(ids, dtype=torch.int32) for ids in chosen]
    responses = generate(rollout_engine(short), tokens)
    dtype: torch.dtype = getattr(torch, TRAIN_ENGINES[config.trainer.engine].forward_dtype(config.trainer))
    model = set_training_mode(load_model(model_dir(config), dtype=dtype), dropout=config.trainer.dropout)
    apply_optimizations(model, replace(config.trainer, compile=False))
    with torch.no_grad():
        supports = [response.support for response in responses if response.support is not None] or None
        of_tokens = [response.tokens for response in responses]
        found_T, _ = response_logprobs(model, tokens, of_tokens, config.rollout.temperature, supports=supports)
    delta_T = (found_T.float() - torch.cat([response.logprobs for response in responses])).double()
    return Disagreement(
        model=model_name(model),
        k3=float((delta_T.expm1() - delta_T).mean()),
        largest_nats=float(delta_T.abs().max()),
        limit=initial_mismatch_limit(config),
        tokens=len(delta_T),
        form="packed" if is_packing_enabled(model) else "padded",
    )


def generate(engine: RolloutEngine, prompts: Sequence[torch.Tensor]) -> list[Response]:
    """One response to each prompt, together as far as the engine has room, in the order of the prompts."""
    waiting = [Prompt(key, tokens, seed=key) for key, tokens in enumerate(prompts)]
    done: dict[int, Response] = {}
    while waiting or engine.running:
        count = min(engine.room, len(waiting))
        engine.add(waiting[:count])
        waiting = waiting[count:]
        done |= {response.key: response for response in engine.run(threading.Event())}
    return [done[key] for key in sorted(done)]
