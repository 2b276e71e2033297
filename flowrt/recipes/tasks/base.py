"""The interface of a task: prompts and their reward."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from random import Random
from typing import TYPE_CHECKING

from flowrt.engines.prompts import DataPrompt, Messages, PromptFormat
from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK = 512
"""Maximum number of prompts in a `PromptBlock` of `blocks`."""
NO_MODEL = "the task has no embedded model, and starts from a model of yours; name its directory with --model"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, what the reward compares with, and a worked solution for SFT."""

    prompt: str
    answer: str
    solution: str
    where: str = field(default="", compare=False)
    """Data file and line of the example; empty if it is generated."""
    messages: Messages = ()
    """The prompt as a conversation, and ``prompt`` is then empty; empty if the prompt is text."""
    tools: str = ""
    """JSON text of the list of the prompt's tools; empty: those of ``data.tools``."""
    form: PromptFormat | None = None
    """How the prompt becomes tokens; None: as the data of the run says."""

    @property
    def as_prompt(self) -> DataPrompt:
        """The prompt with its messages and its tools."""
        return DataPrompt(self.prompt, self.messages, self.tools)


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """Some of the prompts of a data set.

    Attributes:
        data_set: name of the set; empty if it is the only one.
        prompts: text, messages and tools of each.
        where: maps the index of a prompt in the block to its place, as the beginning of an error message.
        form: how they become tokens; None: as the data of the run says.
    """

    data_set: str
    prompts: Sequence[DataPrompt]
    where: Callable[[int], str]
    form: PromptFormat | None = None


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """A data set to train on, and its share of the prompts."""

    name: str
    """Empty if it is the only one."""
    weight: float
    problems: Sequence[Example]
    difficulties: Sequence[float] = ()
    """Difficulty of each problem; empty unless they are ordered by difficulty."""


class Task(ABC):
    """Prompts and their reward. Tasks of one configuration must have the same prompts and rewards in all workers."""

    scores_truncated = False
    """Whether the text of a truncated response is scored; if not, the response is scored as the empty text."""

    @abstractmethod
    def training_problems(self) -> Sequence[Example]:
        """The problems to train on, of all data sets."""

    def training_sets(self) -> Sequence[TrainingSet]:
        """The data sets whose prompts are mixed; one by default. The index of a set is part of its prompts' numbers."""
        return (TrainingSet("", 1.0, self.training_problems()),)

    @abstractmethod
    def held_out_problems(self) -> Sequence[Example]:
        """The problems of the evaluation; no prompt of them is a training prompt."""

    def prompt_blocks(self) -> Iterator[PromptBlock]:
        """All prompts, for checks that do not need answers. Raises ConfigError for a row that cannot be used."""
        return blocks(chain(self.training_problems(), self.held_out_problems()))

    def reward(self, response: str, answer: str) -> float:
        """Score a response. Not called in a recipe with `Recipe.takes_reward`: `flowrt.rewards` scores its responses.

        Args:
            response: decoded text, without the end token; empty for a truncated response unless `scores_truncated`.
            answer: `Example.answer`.

        Returns:
            The reward, a finite number; higher is better.
        """
        raise NotImplementedError

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the embedded model; it must have the tokens <pad> and <eos>.

        Raises ConfigError if the task has no embedded model.
        """
        raise ConfigError(NO_MODEL)

    def sft_example(self, rng: Random, answer_only: bool) -> Example:  # noqa: ARG002
        """Draw an example for SFT of the embedded model. Raises ConfigError if the task has no embedded model.

        Args:
            rng: source of randomness.
            answer_only: whether the example is for the second stage, mostly answers without working.
        """
        raise ConfigError(NO_MODEL)

    def check(self, progress: Callable[[str], None]) -> tuple[str, ...]:  # noqa: ARG002
        """Check, before a run, what would otherwise fail during it. Raises ConfigError for an error.

        Args:
            progress: receives notes on long waits.

        Returns:
            The names of the parts of reward functions, see `RewardOptions.parts`.
        """
        return ()


def blocks(problems: Iterable[Example]) -> Iterator[PromptBlock]:
    """The prompts of these problems, up to `BLOCK` in each block."""
    for form, alike in groupby(problems, lambda problem: problem.form):
        while block := list(islice(alike, BLOCK)):
            places = [problem.where or f"prompt {problem.prompt[:40]!r}" for problem in block]
            yield PromptBlock("", [problem.as_prompt for problem in block], places.__getitem__, form)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named task with the default configuration of its runs."""

    summary: str
    """Its line in ``flowrt --help``."""
    defaults: RunConfig
    task: Callable[[RunConfig], Task]
    """Makes the task of a configuration. Raises ConfigError if its data is missing or malformed."""
    takes_reward: bool = False
    """Whether responses are scored by ``reward.functions`` in place of `Task.reward`."""
