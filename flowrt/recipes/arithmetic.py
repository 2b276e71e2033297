"""Generated arithmetic: sums and differences of small numbers, with the running totals as working.

The prompt ``5+3-2=`` has the solution ``8,6``: one total after each operation, the last one is the answer. The reward
is 1 when the last number of the response is right. The warm start first teaches working, then a corpus in which
most answers are bare (``6`` alone): such a model mostly guesses in one token and is mostly wrong on the longer
problems. RL has to find out that writing the totals pays, so rewards and response lengths rise together.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from flowrt.recipes.config import BuildConfig, RolloutConfig, RunConfig, TrainerConfig, WarmStartConfig
from flowrt.recipes.problems import Problem

NUMBERS = (2, 3, 4, 5, 6)
"""How many numbers a problem has; each is equally likely."""
LESSON_WEIGHTS = (8, 4, 2, 1, 1)
"""The first phase of the warm start shows mostly short problems."""
LARGEST_STEP = 3
PROMPT_CHARACTERS = 2 * max(NUMBERS) - 1
HELD_OUT_SHARE = 8
BARE_SHARE = 0.7
TRAINING_PROBLEMS = 20_000
CHARACTERS = "0123456789+-=, "


def config() -> RunConfig:
    """The complete default configuration: about 0.7 million parameters that learn in a minute on two cores."""
    base = RunConfig(
        recipe="arithmetic",
        steps=120,
        prompts_per_step=16,
        group_size=8,
        build=BuildConfig(hidden_size=192, layers=2, heads=4, intermediate_size=512, max_length=128),
        # A rate so low that no single step takes most of the working away: RL has to have some left to find.
        warm_start=WarmStartConfig(probes=128, bare_lr=5e-4),
        rollout=RolloutConfig(rows=64, max_new_tokens=16),
        trainer=TrainerConfig(lr=2e-4, beta2=0.98, warmup_steps=15, micro_batch_tokens=1024),
    )
    return replace(base, data=replace(base.data, eval_prompts=256))


class Arithmetic:
    """The subject; every problem is a function of the seed and its index."""

    scores_unfinished = False

    def __init__(self, seed: int, eval_problems: int) -> None:
        self._seed = seed
        self._eval_problems = eval_problems

    def training_problems(self) -> Sequence[Problem]:
        return _problems(self._seed, TRAINING_PROBLEMS, held_out=False)

    def held_out_problems(self) -> Sequence[Problem]:
        return _problems(0, self._eval_problems, held_out=True)

    def lesson(self, rng: random.Random, bare: bool) -> Problem:
        weights = [1] * len(NUMBERS) if bare else LESSON_WEIGHTS
        problem = _draw(rng, weights, held_out=False)
        if bare and rng.random() < BARE_SHARE:
            return replace(problem, solution=problem.answer)
        return problem

    def reward(self, response: str, answer: str) -> float:
        return float(response.rsplit(",", 1)[-1] == answer)

    def tokenizer(self) -> Tokenizer:
        """One token a character."""
        words = ["<pad>", "<eos>", *CHARACTERS]
        tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()  # without it, decoding puts spaces between characters
        tokenizer.add_special_tokens(["<pad>", "<eos>"])
        return tokenizer


@cache
def _problems(seed: int, count: int, held_out: bool) -> tuple[Problem, ...]:
    rng = random.Random(f"arithmetic {seed} {held_out}")
    return tuple(_draw(rng, [1] * len(NUMBERS), held_out) for _ in range(count))


def _draw(rng: random.Random, weights: Sequence[int], held_out: bool) -> Problem:
    while True:
        problem = _compose(rng, rng.choices(NUMBERS, weights)[0])
        # The split is by the prompt itself, so no held-out problem can turn up in training under another index.
        if (zlib.crc32(problem.prompt.encode()) % HELD_OUT_SHARE == 0) == held_out:
            return problem


def _compose(rng: random.Random, numbers: int) -> Problem:
    """A problem whose running totals all stay between 0 and 9."""
    total = rng.randint(0, 9)
    prompt, totals = str(total), []
    for _ in range(numbers - 1):
        steps = [step for step in range(-LARGEST_STEP, LARGEST_STEP + 1) if step and 0 <= total + step <= 9]
        step = rng.choice(steps)
        total += step
        prompt += f"{step:+d}"
        totals.append(str(total))
    return Problem(prompt.ljust(PROMPT_CHARACTERS) + "=", totals[-1], ",".join(totals))
