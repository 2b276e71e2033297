"""Generated arithmetic: sums and differences of small numbers, with the running totals as working.

The prompt ``5+3-2=`` has the solution ``8,6``: one total after each operation; the last total is the answer. The reward
is 1 if the text after the last comma of the response is the answer, else 0. SFT first shows worked solutions, then
mostly answers alone (``6``), after which the model mostly guesses in one token and is mostly wrong on the longer
problems. RL has to discover that writing the totals is rewarded, so rewards and response lengths rise together.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from flowrt.errors import ConfigError
from flowrt.recipes.config import BuildConfig, RolloutConfig, RunConfig, SftConfig, TrainerConfig
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.tasks.base import Example, Recipe, Task

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUMBERS = (2, 3, 4, 5, 6)
"""Counts of numbers in a problem; all are equally likely, except in the first stage of SFT."""
SFT_WEIGHTS = (8, 4, 2, 1, 1)
"""Relative frequency of each entry of `NUMBERS` in the first stage of SFT: mostly short problems."""
LARGEST_STEP = 3
PROMPT_CHARACTERS = 2 * max(NUMBERS) - 1
HELD_OUT_ONE_IN = 8
ANSWER_ONLY_SHARE = 0.7
TRAINING_COUNT = 20_000
CHARACTERS = "0123456789+-=, "


class Arithmetic(Task):
    """Arithmetic problems, generated from their index and, for training problems, the seed.

    Args:
        seed: of the training problems.
        eval_problems: number of held-out problems.
    """

    def __init__(self, seed: int, eval_problems: int) -> None:
        self._seed = seed
        self._eval_problems = eval_problems

    def training_problems(self) -> Sequence[Example]:
        return _problems(self._seed, TRAINING_COUNT, held_out=False)

    def held_out_problems(self) -> Sequence[Example]:
        return _problems(0, self._eval_problems, held_out=True)

    def sft_example(self, rng: random.Random, answer_only: bool) -> Example:
        weights = [1] * len(NUMBERS) if answer_only else SFT_WEIGHTS
        problem = _draw(rng, weights, held_out=False)
        if answer_only and rng.random() < ANSWER_ONLY_SHARE:
            return replace(problem, solution=problem.answer)
        return problem

    def reward(self, response: str, answer: str) -> float:
        return float(response.rsplit(",", 1)[-1] == answer)

    def tokenizer(self) -> "Tokenizer":
        """One token per character."""
        from flowrt.recipes.tasks.embedded_tokenizers import character_tokenizer  # the controller needs none

        return character_tokenizer(CHARACTERS)


@cache
def _problems(seed: int, count: int, held_out: bool) -> tuple[Example, ...]:
    rng = random.Random(f"arithmetic {seed} {held_out}")
    return tuple(_draw(rng, [1] * len(NUMBERS), held_out) for _ in range(count))


def _draw(rng: random.Random, weights: Sequence[int], held_out: bool) -> Example:
    while True:
        problem = _compose(rng, rng.choices(NUMBERS, weights)[0])
        # Split by the prompt itself: no held-out problem is in the training set under another index.
        if (zlib.crc32(problem.prompt.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
            return problem


def _compose(rng: random.Random, numbers: int) -> Example:
    """Draw a problem whose running totals are all between 0 and 9."""
    total = rng.randint(0, 9)
    prompt, totals = str(total), []
    for _ in range(numbers - 1):
        steps = [step for step in range(-LARGEST_STEP, LARGEST_STEP + 1) if step and 0 <= total + step <= 9]
        step = rng.choice(steps)
        total += step
        prompt += f"{step:+d}"
        totals.append(str(total))
    return Example(prompt.ljust(PROMPT_CHARACTERS) + "=", totals[-1], ",".join(totals))


def _task(config: RunConfig) -> Arithmetic:
    if config.data.path:
        raise ConfigError(
            f"recipe arithmetic makes its own problems and would not read {config.data.path}; "
            "for problems from a file: flowrt run gsm8k --data FILE"
        )
    return Arithmetic(config.seed, config.data.eval_prompts)


RECIPE = Recipe(
    "generated problems and a small embedded model; needs no files (the default)",
    RunConfig(
        recipe="arithmetic",
        steps=120,
        prompts_per_step=16,
        group_size=8,
        data=DataConfig(eval_prompts=256),
        build=BuildConfig(hidden_size=192, layers=2, heads=4, intermediate_size=512, max_length=128),
        # So low that no single step removes most of the working: RL needs responses with working to start from.
        sft=SftConfig(eval_prompts=128, answer_only_lr=5e-4),
        rollout=RolloutConfig(max_running_requests=64, max_new_tokens=16),
        trainer=TrainerConfig(lr=2e-4, beta2=0.98, warmup_steps=15, micro_batch_tokens=1024),
    ),
    _task,
)
"""About 0.7 million parameters, trained in a minute on two cores."""
