"""Word problems from a file, in the format of GSM8K (arXiv 2110.14168): solutions end in ``#### NUMBER``.

Reward: 1 if the response ends in ``#### `` and the right number, 0.1 if it ends in another well-formed number, else 0.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrt.errors import ConfigError
from flowrt.recipes.config import BuildConfig, RolloutConfig, RunConfig, SftConfig, TrainerConfig
from flowrt.recipes.data.base import Mistakes
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.tasks.base import Example, Recipe, Task
from flowrt.recipes.tasks.rows import Row, data_path, split_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FINAL = re.compile(r"#### (-?(?>[\d,]*)(?:\.\d++|(?<=\d)))\s*+$")
"""``#### NUMBER`` at the end of a text. Its quantifiers are possessive, because backtracking takes minutes on a
response of many digits."""
WELL_FORMED_REWARD = 0.1


class Gsm8k(Task):
    """Word problems; the last ``eval_problems`` rows of the file are held out.

    Raises ConfigError, when made, for data that cannot be read, too few rows, and rows that cannot be used.
    """

    def __init__(
        self, path: Path, prompt_key: str, answer_key: str, eval_problems: int, vocab_size: int, split: str = "train"
    ) -> None:
        mistakes = Mistakes()
        self._training, self._held_out = (
            _problems(part, mistakes) for part in split_rows(path, split, (prompt_key, answer_key), eval_problems)
        )
        mistakes.report()
        self._vocab_size = vocab_size

    def training_problems(self) -> Sequence[Example]:
        return self._training

    def held_out_problems(self) -> Sequence[Example]:
        return self._held_out

    def sft_example(self, rng: random.Random, answer_only: bool) -> Example:
        problem = rng.choice(self._training)
        return replace(problem, solution=f"#### {problem.answer}") if answer_only else problem

    def reward(self, response: str, answer: str) -> float:
        match = FINAL.search(response)
        if match is None:
            return 0.0
        return 1.0 if _number(match[1]) == _number(answer) else WELL_FORMED_REWARD

    def tokenizer(self) -> "Tokenizer":
        """Train a byte-level BPE on the training rows; every text has a tokenization."""
        from flowrt.recipes.tasks.embedded_tokenizers import byte_pair_tokenizer  # the controller needs none

        return byte_pair_tokenizer((p.prompt + p.solution for p in self._training), self._vocab_size)


def _problems(rows: Sequence[Row], mistakes: Mistakes) -> list[Example]:
    problems = []
    for row in rows:
        try:
            problems.append(_problem(row.values[0], row.values[1], row.where))
        except ConfigError as error:
            mistakes.add(error)
    return problems


def _problem(question: str, solution: str, where: str) -> Example:
    match = FINAL.search(solution)
    if match is None:
        raise ConfigError(f"{where}: the solution does not end in '#### number', so no answer can be checked")
    return Example(question + "\n", match[1], solution, where)


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _task(config: RunConfig) -> Gsm8k:
    return Gsm8k(
        path=data_path(config),
        prompt_key=config.data.prompt_key,
        answer_key=config.data.answer_key,
        eval_problems=config.data.eval_prompts,
        vocab_size=config.build.vocab_size,
        split=config.data.split,
    )


RECIPE = Recipe(
    "word problems and a small embedded model: --data FILE.jsonl",
    RunConfig(
        recipe="gsm8k",
        steps=80,
        prompts_per_step=16,
        group_size=8,
        data=DataConfig(eval_prompts=64),
        build=BuildConfig(hidden_size=192, layers=3, heads=4, intermediate_size=512, vocab_size=1024, max_length=1024),
        sft=SftConfig(steps=150, batch=16, lr=2e-3, eval_prompts=64, stop_reward=0.02, answer_only_steps=0),
        rollout=RolloutConfig(max_running_requests=64, max_new_tokens=128),
        trainer=TrainerConfig(lr=2e-4, beta2=0.98, warmup_steps=3, micro_batch_tokens=6144),
    ),
    _task,
)
"""A small embedded model; SFT stops once some responses end in a well-formed number."""
