"""Options of reward functions. Imports none of these: configurations contain the options."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from flowrt.rewards.reward_names import LOCAL, REMOTE, parse_function
from flowrt.runtime.bounds import Seconds
from flowrt.runtime.conditions import OnlyIf, Value


class WithFunction(OnlyIf):
    """The field acts only with a reward function of one of the kinds ``have``."""

    def holds_for(self, value: Value) -> bool:
        """Whether one of the texts of functions is of these kinds; without any the task has a reward of its own."""
        assert isinstance(value, tuple)
        kinds = {parse_function(text).kind for text in value} or {"task"}
        return not kinds.isdisjoint(self.have)

    @property
    def fix(self) -> str:
        return f"name a function of kind {' or '.join(map(str, self.have))}, or leave it out"


FUNCTIONS = "reward.functions"
CHILD = WithFunction(FUNCTIONS, have=LOCAL)
REQUEST = WithFunction(FUNCTIONS, have=REMOTE)
CONCURRENT = WithFunction(FUNCTIONS, have=("file", *REMOTE))
BATCHED = WithFunction(FUNCTIONS, have=("file", "model"))
MODEL, CODE, JUDGE = (WithFunction(FUNCTIONS, have=(kind,)) for kind in ("model", "code", "judge"))


@dataclass(frozen=True)
class JudgeOptions:
    """A language model as the judge (`--reward judge`): any server with the path /v1/chat/completions."""

    url: str = ""
    """Address of the server, http://HOST:PORT, with or without the path /v1/chat/completions."""
    model: str = ""
    """Name of the model, as the server knows it."""
    prompt: str = (
        "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "How good is the response? Give a number from 0 (wrong) to 1 (right) as your last word."
    )
    """The message; {prompt}, {answer} and {response} are replaced."""
    pattern: str = r"([-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)"
    """Regular expression of the reward in the judge's answer: the first group of its last match, a number."""
    max_tokens: Annotated[int, Interval(gt=0, le=16_777_216)] = 512
    """Maximum length of the judge's answer, in tokens."""


@dataclass(frozen=True)
class RewardOptions:
    """Reward functions of recipe custom: which ones, their processes, and calls that fail."""

    functions: tuple[str, ...] = ()
    """Each as [NAME=]FUNCTION[:WEIGHT]: FILE.py[:FUNCTION], math, exact, regex:PATTERN, format:PATTERN,
    length:N, code, model:DIR, http:URL or judge; the weight of a pattern or URL is written in front,
    WEIGHT*regex:PATTERN."""
    workers: Annotated[int, Interval(ge=1, le=1_024), CHILD] = 1
    """Child processes of each reward worker; they are started when they are needed."""
    timeout_s: Seconds = 10.0
    """Deadline of each call, in seconds."""
    load_timeout_s: Annotated[Seconds, CHILD] = 60.0
    """Deadline for loading the files of the functions, in seconds."""
    memory_mb: Annotated[int, Interval(ge=16, le=16_777_216), CHILD] = 1024
    """Memory that a child may take in addition to what it has after loading, in MiB of address space."""
    retries: Annotated[int, Interval(ge=0, le=100)] = 1
    """Repetitions of a call in which the child died, and of a request that failed for a reason that may pass."""
    on_failure: Literal["zero", "drop", "stop"] = "zero"
    """What follows a failed call: zero: the function's value is 0; drop: the sample counts as lost, and
    on_lost_sample decides, except in an evaluation (with a function that takes whole groups: all samples of the group);
    stop: the run ends with exit code 2."""
    max_failures: Annotated[float, Interval(ge=0, le=1)] = 0.5
    """The run ends once more than this share of a worker's last 200 calls has failed; 1: never."""
    parts: tuple[str, ...] = ()
    """Names of the parts of functions that return several (FUNCTION/PART), and of functions that take whole groups
    (FUNCTION/); found out when the run starts."""
    after: str = ""
    """Text after whose last occurrence in the turn of the model the response begins, </think> for example; functions
    format and length see the whole turn; empty: the response is the whole turn."""
    without_after: Annotated[Literal["empty", "whole"], OnlyIf("reward.after", but=("",))] = "empty"
    """What is scored if the turn does not have that text, because it was cut: an empty response, or the whole turn."""
    code_sandbox: Annotated[Literal["bwrap", "limits"], CODE] = "bwrap"
    """Where function code runs programs: bwrap: without network and files (bubblewrap); limits: with your rights, under
    resource limits alone."""
    concurrency: Annotated[int, Interval(ge=1, le=4_096), CONCURRENT] = 64
    """Requests of functions http and judge at a time, and calls of async functions, of each reward worker."""
    rate_per_s: Annotated[float, Interval(ge=0, le=1e6), CONCURRENT] = 0.0
    """Requests, and calls of async functions, that each reward worker begins in a second; 0: any number."""
    batch_size: Annotated[int, Interval(ge=1, le=65_536), BATCHED] = 64
    """Maximum number of samples in a call of a batch function (one that takes completions), and in a pass of
    model:DIR."""
    model_device: Annotated[str, MODEL] = "cpu"
    """Device of function model, as torch names it (cuda:0)."""
    key_variable: Annotated[str, REQUEST] = ""
    """Environment variable with the API key of http and judge, sent as a bearer token; empty: none."""
    judge: Annotated[JudgeOptions, JUDGE] = field(default_factory=JudgeOptions)
    """The judge."""

    @property
    def of_groups(self) -> tuple[str, ...]:
        """Names of the functions that take all samples of a prompt."""
        return tuple(part.removesuffix("/") for part in self.parts if part.endswith("/"))
