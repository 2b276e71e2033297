"""The interface of a task: prompts and their reward."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from random import Random

from tokenizers import Tokenizer

from flowrt.errors import ConfigError
from flowrt.recipes.config import RunConfig
from flowrt.recipes.data.columns import Messages

BLOCK = 512
"""Prompts that are checked together."""
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
    """The prompt as a conversation, in place of text, if there are any."""


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """Some of the prompts of a data set.

    Attributes:
        data_set: name of the set.
        prompts: text and messages of each.
        where: the place of the prompt of this index, with which an error message begins.
    """

    data_set: str
    prompts: Sequence[tuple[str, Messages]]
    where: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """A data set to train on, and its share of the prompts."""

    name: str
    """Empty if it is the only one."""
    weight: float
    problems: Sequence[Example]
    difficulties: Sequence[float] = ()
    """Of the problems; empty if there is no order by difficulty."""


class Task(ABC):
    """Prompts and their reward; every worker that makes a task from the same configuration has the same one."""

    scores_truncated = False
    """Whether a response without an end token is scored as it is; otherwise it is scored as an empty one."""

    @abstractmethod
    def training_problems(self) -> Sequence[Example]:
        """The prompts to train on, of all data sets."""

    def training_sets(self) -> Sequence[TrainingSet]:
        """The data sets whose prompts are mixed; one by default. Their indices are part of the numbers of prompts."""
        return (TrainingSet("", 1.0, self.training_problems()),)

    @abstractmethod
    def held_out_problems(self) -> Sequence[Example]:
        """The prompts of the evaluation; none of them is a training prompt."""

    def prompt_blocks(self) -> Iterator[PromptBlock]:
        """All prompts, those to train on first, for checks that need no more. Raises ConfigError for a wrong row."""
        return blocks(chain(self.training_problems(), self.held_out_problems()))

    def reward(self, response: str, answer: str) -> float:
        """Score a decoded response, which is not truncated unless `scores_truncated`; the higher the better.

        Not of a recipe with `Recipe.takes_reward`, whose responses are scored by `flowrt.rewards`.
        """
        raise NotImplementedError

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of an embedded model, with the tokens <pad> and <eos>. Raises ConfigError if there is none."""
        raise ConfigError(NO_MODEL)

    def sft_example(self, rng: Random, answer_only: bool) -> Example:  # noqa: ARG002
        """Draw an example for SFT of an embedded model. Raises ConfigError if the task has none.

        Args:
            rng: source of randomness.
            answer_only: draw from the second stage's examples, mostly answers without working.
        """
        raise ConfigError(NO_MODEL)

    def check(self, progress: Callable[[str], None]) -> tuple[str, ...]:  # noqa: ARG002
        """Check what otherwise fails during the run. Raises ConfigError; ``progress`` receives notes on long waits.

        Returns:
            The names of the parts of reward functions, see `RewardOptions.parts`.
        """
        return ()


def blocks(problems: Iterable[Example]) -> Iterator[PromptBlock]:
    """The prompts of these problems."""
    source = iter(problems)
    while found := list(islice(source, BLOCK)):
        places = [one.where or f"prompt {one.prompt[:40]!r}" for one in found]
        yield PromptBlock("", [(one.prompt, one.messages) for one in found], places.__getitem__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named task with the default configuration of its runs."""

    summary: str
    """Its line in ``flowrt --help``."""
    defaults: RunConfig
    task: Callable[[RunConfig], Task]
    """Make the task of a configuration. Raises ConfigError if its data is missing or malformed."""
    takes_reward: bool = False
    """Whether the run names its reward functions (``reward.functions``)."""
