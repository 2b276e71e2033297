"""The tables ``data`` and ``eval`` of a configuration: prompts, and evaluations."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from flowrt.engines.options import SamplingOptions, Truncation
from flowrt.engines.prompts import PromptFormat
from flowrt.runtime.bounds import Limit, Reward, Seconds, limits
from flowrt.runtime.conditions import OnlyIf

READS_FILES = OnlyIf("recipe", but=("arithmetic",))
EVALUATES = OnlyIf("eval.interval", but=(0,), or_keys=("eval.at_start", "eval.at_end", "eval.only"))
WITH_PROMPTS = OnlyIf("data.eval_prompts", but=(0, ()), or_keys=("eval.data",))
AT_INTERVALS = OnlyIf("eval.interval", but=(0,))
BEFORE_END = OnlyIf("eval.interval", but=(0,), or_keys=("eval.at_start",))
WITH_DIFFICULTY = OnlyIf("data.difficulty_key", but=("",))


@dataclass(frozen=True)
class DataSetConfig:
    """One of several data sets.

    In a file a table `[[data.sets]]` each, as a flag `--data "NAME=PATH:WEIGHT [KEY=VALUE ...]"`. What a set leaves out
    is as in data.
    """

    name: str
    """Name in metrics and in the ledger: letters, digits, - and _."""
    path: str
    """File or directory of rows, as data.path."""
    weight: Annotated[float, Interval(gt=0, le=1_000_000)] = 1.0
    """Share of the prompts of each step, relative to the weights of the other sets."""
    split: str | None = None
    """Of this set, in place of data.split; so for all keys below."""
    prompt_key: str | None = None
    """Of this set, in place of data.prompt_key."""
    answer_key: str | None = None
    """Of this set, in place of data.answer_key."""
    system_prompt: str | None = None
    """Of this set, in place of data.system_prompt."""
    chat_template: str | None = None
    """Of this set, in place of data.chat_template."""
    chat_template_kwargs: str | None = None
    """Of this set, in place of data.chat_template_kwargs."""
    tools: str | None = None
    """Of this set, in place of data.tools."""
    tools_key: str | None = None
    """Of this set, in place of data.tools_key."""


@dataclass(frozen=True)
class DataConfig:
    """Prompts."""

    path: str = ""
    """Rows, one problem each: a JSON Lines, JSON, CSV, TSV (also gzipped), Parquet or Arrow file, or a directory that
    datasets has saved or that is a snapshot of a data set on the Hub; recipe arithmetic generates its problems."""
    sets: tuple[DataSetConfig, ...] = ()
    """Recipe custom: several data sets in place of the path, mixed by weight: tables `[[data.sets]]`, or flags
    `--data NAME=PATH:WEIGHT`."""
    split: Annotated[str, READS_FILES] = "train"
    """Split that is read from a directory."""
    prompt_key: Annotated[str, READS_FILES] = "question"
    """Column of the prompt: text, or, with recipe custom, a list of messages with role and content."""
    answer_key: Annotated[str, READS_FILES] = "answer"
    """Column of the reference answer; A.B is key B in column A."""
    chat_template: str = ""
    """Chat template of prompts: none (text as it is), chat (text is a message of the user), or a Jinja file; empty:
    messages take the template of the checkpoint, and text for a checkpoint that has one is refused."""
    chat_template_kwargs: str = ""
    """Variables of the chat template, a JSON object, such as {"enable_thinking": false}."""
    system_prompt: str = ""
    """System message of conversations that begin with none."""
    tools: str = ""
    """Tools that the chat template shows for every prompt without tools of its own: a JSON list of their schemas, or a
    file with it."""
    tools_key: str = "tools"
    """Recipe custom: column of the tools of a row, a list of their schemas or JSON text of one, which rows may lack;
    empty: none."""
    prefill: bool = False
    """Recipe custom: whether a last message of role assistant is the beginning of the response."""
    max_prompt_tokens: Annotated[int, Interval(ge=0, le=16_777_216)] = 0
    """Maximum length of a prompt, in tokens; 0: what the positions of the model leave for it."""
    overlong: Literal["error", "drop"] = "error"
    """Prompts that are longer: refuse the data, or leave these rows out."""
    allow_overlap: bool = False
    """Recipe custom: whether held-out prompts may be training prompts too."""
    order: Literal["shuffled", "easy_first", "as_is"] = "shuffled"
    """Order of the rows of a data set in each pass: drawn from the seed, by ascending difficulty, or as they are."""
    difficulty_key: str = ""
    """Recipe custom: column of the difficulty, a number; A.B is key B in column A."""
    min_difficulty: Annotated[Limit, WITH_DIFFICULTY] = None
    """Rows of a lower difficulty are left out."""
    max_difficulty: Annotated[Limit, WITH_DIFFICULTY] = None
    """Rows of a higher difficulty are left out."""
    epochs: Annotated[int, Interval(ge=0, le=1_000_000)] = 0
    """Passes over the data, of several sets over any one of them, after which the run ends early; 0: as many as the
    steps need."""
    check_timeout_s: Seconds = 600.0
    """Task of your own (FILE.py): deadline for making it and reading all its prompts before a run, in seconds."""
    eval_prompts: Annotated[int, Interval(ge=0, le=100_000)] = 256
    """Held-out prompts, the last rows, of several sets in proportion to the weights; 0: none, as with eval.data."""

    @property
    def difficulties(self) -> tuple[float, float]:
        """The lowest and the highest difficulty of rows that are not left out."""
        return limits(self.min_difficulty, self.max_difficulty)

    @property
    def prompt_format(self) -> PromptFormat:
        """How prompts become token ids.

        Raises ConfigError if the variables of the template are no JSON object, and if there are variables or a system
        prompt with template none.
        """
        return PromptFormat.of(
            self.chat_template,
            self.chat_template_kwargs,
            self.system_prompt,
            prefill=self.prefill,
            tools=self.tools,
        )


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation: answers to held-out prompts, all of one version of the weights; training goes on meanwhile."""

    data: tuple[str, ...] = ()
    """Data sets "NAME=PATH [KEY=VALUE ...]" of prompts to evaluate, in the form of --data, with the keys of
    [[data.sets]]; repeatable; none: the held-out rows, as held_out."""
    split: str = ""
    """Split that is read from a directory of eval.data; empty: test, else validation."""
    interval: Annotated[int, Interval(ge=0, le=10_000_000), WITH_PROMPTS] = 0
    """Optimiser steps between evaluations; 0: only at the ends."""
    at_start: bool = True
    """Evaluate the initial weights, before training."""
    at_end: bool = True
    """Evaluate the last weights."""
    samples: Annotated[int, Interval(ge=1, le=65_536), WITH_PROMPTS, EVALUATES] = 1
    """Answers to each prompt, over which avg@k and pass@k are measured."""
    max_new_tokens: Annotated[int, Interval(ge=0, le=16_777_216), WITH_PROMPTS, EVALUATES] = 0
    """Maximum length of an answer, in tokens; 0: rollout.max_new_tokens."""
    temperature: Annotated[float | None, Interval(ge=0, le=100), WITH_PROMPTS, EVALUATES] = None
    """Sampling temperature; 0: the most likely token; not given: 0 with one sample, rollout.temperature with more."""
    top_k: Annotated[int, Interval(ge=0, le=4_096), EVALUATES] = 0
    """Sample from this many most likely tokens; 0: from all."""
    top_p: Annotated[float, Interval(gt=0, le=1), EVALUATES] = 1.0
    """Sample from the fewest most likely tokens whose probabilities sum to this; 1: from all."""
    min_p: Annotated[float, Interval(ge=0, lt=1), EVALUATES] = 0.0
    """Sample from the tokens of at least this fraction of the highest probability; 0: from all."""
    limit: Annotated[int, Interval(ge=0, le=1_000_000), WITH_PROMPTS, EVALUATES] = 0
    """Prompts of each data set, the first ones; 0: all."""
    overlap: Annotated[Literal["skip", "wait"], AT_INTERVALS] = "skip"
    """An evaluation that is due while another one runs: skip it, unless its version is still there afterwards; or let
    it wait, its version kept in the trainer's memory, for at most two at a time."""
    only: bool = False
    """Only evaluate the weights that the run starts from: no trainer is started, and nothing is trained."""
    solved_reward: Annotated[Reward, WITH_PROMPTS, EVALUATES] = 1.0
    """Reward from which an answer counts as right, in pass@k."""
    stop_at: Annotated[Reward, WITH_PROMPTS, BEFORE_END] = 0.0
    """End training once the mean reward of an evaluation of the first data set reaches this; 0: never."""

    def sampling(self, rollout_temperature: float) -> SamplingOptions | None:
        """How answers are sampled; None: the most likely tokens.

        Args:
            rollout_temperature: the temperature of several samples if `temperature` is not given.
        """
        temperature = self.temperature
        if temperature is None:
            temperature = rollout_temperature if self.samples > 1 else 0.0
        return SamplingOptions(temperature, self.truncation) if temperature else None

    @property
    def truncation(self) -> Truncation:
        """The tokens that can be drawn."""
        return Truncation(self.top_k, self.top_p, self.min_p)
