"""A task of your own in one file: the response to abcd= is dcba (flowrt run examples/own_task.py)."""

from itertools import product
from random import Random

from tokenizers import Tokenizer

from flowrt.tasks import Example, Recipe, RunConfig, SftConfig, Task, TrainerConfig, character_tokenizer


class Reversal(Task):
    def __init__(self, config: RunConfig) -> None:
        words = ["".join(letters) for letters in product("abcdef", repeat=4)]
        Random(config.seed).shuffle(words)
        examples = [Example(f"{word}=", word[::-1], word[::-1]) for word in words]
        self._held_out, self._training = examples[: config.data.eval_prompts], examples[config.data.eval_prompts :]

    def training_problems(self) -> list[Example]:
        return self._training

    def held_out_problems(self) -> list[Example]:
        return self._held_out

    def reward(self, response: str, answer: str) -> float:
        return sum(character == other for character, other in zip(response, answer, strict=False)) / len(answer)

    def tokenizer(self) -> Tokenizer:
        return character_tokenizer("abcdef=")

    def sft_example(self, rng: Random, answer_only: bool) -> Example:  # noqa: ARG002
        return rng.choice(self._training)


RECIPE = Recipe(
    "words to be reversed, and a small embedded model",
    RunConfig(steps=60, sft=SftConfig(stop_reward=0.6, answer_only_steps=0), trainer=TrainerConfig(lr=3e-4)),
    Reversal,
)
