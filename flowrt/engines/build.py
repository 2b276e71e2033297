"""The embedded model: built from a few numbers, warm-started on solutions, written as any other checkpoint."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from flowrt.algorithms import cut_by_tokens
from flowrt.engines.protocols import Prompt, Response
from flowrt.engines.scoring import response_logprobs
from flowrt.engines.torch_rollout import TorchRollout

INITIAL_SPREAD = 0.05
LOOK_EVERY = 10
BARE_LOOK_EVERY = 1
FORWARD_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class Lesson:
    """A prompt and the response to imitate, as tokens."""

    prompt: torch.Tensor
    response: torch.Tensor


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of supervised training: at most ``steps`` steps, until ``done(mean sampled reward)``."""

    steps: int
    first_look: int
    look_every: int
    lr: float
    lesson: Callable[[random.Random], Lesson]
    done: Callable[[float], bool]


def build_model(
    *, vocab_size: int, hidden_size: int, layers: int, heads: int, intermediate_size: int, max_length: int, seed: int
) -> Any:
    """A Qwen3 decoder with random weights; token 0 pads, token 1 ends."""
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
        initializer_range=INITIAL_SPREAD,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).float()


def wrap_tokenizer(tokenizer: Any) -> Any:
    """A `tokenizers.Tokenizer` as transformers saves and loads it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def warm_start(
    model: Any,
    phases: Sequence[Phase],
    reward: Callable[[list[Response]], float],
    probes: Sequence[Prompt],
    *,
    batch: int,
    max_new_tokens: int,
    seed: int,
) -> list[tuple[int, float]]:
    """Supervised training through the phases; returns (step, mean sampled reward on the probes) at each look."""
    rng = random.Random(f"warm start {seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.0)
    looks: list[tuple[int, float]] = []
    taken = 0
    for phase in phases:
        for step in range(1, phase.steps + 1):
            for group in optimizer.param_groups:
                group["lr"] = phase.lr * min(1.0, (taken + 1) / LOOK_EVERY)
            _imitate(model, optimizer, [phase.lesson(rng) for _ in range(batch)])
            taken += 1
            if step >= phase.first_look and (step - phase.first_look) % phase.look_every == 0:
                mean = reward(_answers(model, probes, max_new_tokens))
                looks.append((taken, mean))
                if phase.done(mean):
                    break
    return looks


def _imitate(model: Any, optimizer: torch.optim.Optimizer, lessons: Sequence[Lesson]) -> None:
    """One step on the mean negative log-likelihood of the responses' tokens."""
    model.train()
    tokens = sum(len(lesson.response) for lesson in lessons)
    lengths = [len(lesson.prompt) + len(lesson.response) for lesson in lessons]
    for rows in cut_by_tokens(lengths, FORWARD_TOKENS):
        logprobs_T, _ = response_logprobs(
            model, [lessons[row].prompt for row in rows], [lessons[row].response for row in rows], 1.0
        )
        (-logprobs_T.sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class _Never:
    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002 (never is at once)
        return False


def _answers(model: Any, probes: Sequence[Prompt], max_new_tokens: int) -> list[Response]:
    engine = TorchRollout(
        model, eos_id=model.config.eos_token_id, rows=len(probes), max_new_tokens=max_new_tokens, temperature=1.0
    )
    engine.add(probes)
    answers: list[Response] = []
    while engine.running:
        answers += engine.run(_Never())
    return answers
