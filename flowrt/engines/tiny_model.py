"""The embedded model: a small decoder with random weights, and its supervised fine-tuning (SFT)."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from flowrt.algorithms import cut_by_tokens
from flowrt.engines.base import Prompt, Response
from flowrt.engines.stopping import StopConditions
from flowrt.engines.torch.rollout import TorchRollout
from flowrt.engines.training.forward import response_logprobs

INITIALIZER_RANGE = 0.05
EVALUATION_INTERVAL = 10
ANSWER_ONLY_EVALUATION_INTERVAL = 1
"""Optimiser steps between two evaluations of a stage; the second is of the stage of answers only."""
WARMUP_STEPS = 10
FORWARD_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class SftExample:
    """A prompt and its target response: token ids, 1-D int tensors."""

    prompt: torch.Tensor
    response: torch.Tensor


@dataclass(frozen=True, slots=True)
class SftStage:
    """A stage of supervised training.

    Attributes:
        steps: maximum number of optimiser steps.
        first_evaluation: step (from 1) after which the model is evaluated for the first time.
        interval: number of steps between two evaluations.
        lr: learning rate after the warm-up.
        example: draws a training example.
        is_done: whether the stage ends early, given the mean reward of sampled responses.
    """

    steps: int
    first_evaluation: int
    interval: int
    lr: float
    example: Callable[[random.Random], SftExample]
    is_done: Callable[[float], bool]


def build_model(
    *, vocab_size: int, hidden_size: int, layers: int, heads: int, intermediate_size: int, max_length: int, seed: int
) -> Any:
    """Build a Qwen3 decoder with random weights (float32) and heads of width 32; token 0 is padding, token 1 the end.

    ``max_length`` is the number of positions in tokens; ``seed`` seeds torch's global generator.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        head_dim=32,
        max_position_embeddings=max_length,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).float()


def wrap_tokenizer(tokenizer: Any) -> Any:
    """Wrap a `tokenizers.Tokenizer` in the class that transformers saves and loads."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def sft(
    model: Any,
    stages: Sequence[SftStage],
    reward: Callable[[list[Response]], float],
    probes: Sequence[Prompt],
    *,
    batch: int,
    max_new_tokens: int,
    seed: int,
) -> list[tuple[int, float]]:
    """Train the model through the stages.

    Args:
        model: trained in place.
        stages: stages in their order.
        reward: returns the mean reward of responses to the probes.
        probes: prompts of the evaluations.
        batch: number of examples per step.
        max_new_tokens: maximum length of sampled responses, in tokens.
        seed: seed of the random examples.

    Returns:
        (step, mean reward) of each evaluation; steps are counted from 1 over all stages.
    """
    rng = random.Random(f"warm start {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.0)
    evaluations: list[tuple[int, float]] = []
    total_steps = 0
    for stage in stages:
        for step in range(1, stage.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = stage.lr * min(1.0, (total_steps + 1) / WARMUP_STEPS)
            _train_step(model, optimizer, [stage.example(rng) for _ in range(batch)])
            total_steps += 1
            if step >= stage.first_evaluation and (step - stage.first_evaluation) % stage.interval == 0:
                mean = reward(_sample(model, probes, max_new_tokens))
                evaluations.append((total_steps, mean))
                if stage.is_done(mean):
                    break
    return evaluations


def _train_step(model: Any, optimizer: torch.optim.Optimizer, examples: Sequence[SftExample]) -> None:
    """One optimiser step on the mean negative log-likelihood of the response tokens."""
    model.train()
    tokens = sum(len(example.response) for example in examples)
    lengths = [len(example.prompt) + len(example.response) for example in examples]
    for rows in cut_by_tokens(lengths, FORWARD_TOKENS):
        logprobs_T, _ = response_logprobs(
            model, [examples[row].prompt for row in rows], [examples[row].response for row in rows], 1.0
        )
        (-logprobs_T.sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _sample(model: Any, probes: Sequence[Prompt], max_new_tokens: int) -> list[Response]:
    engine = TorchRollout(
        model,
        stop=StopConditions((model.config.eos_token_id,)),
        rows=len(probes),
        max_new_tokens=max_new_tokens,
        temperature=1.0,
    )
    engine.add(probes)
    responses: list[Response] = []
    while engine.running:
        responses += engine.run(threading.Event())  # never interrupted
    return responses
