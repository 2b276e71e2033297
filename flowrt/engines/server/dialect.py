"""What differs between kinds of generation servers: their requests, their answers, and how they load weights."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flowrt.engines.options import PauseMode, Truncation
from flowrt.engines.server.client import Call, ServerClient
from flowrt.engines.server.layout import Layout
from flowrt.transport.weights.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, which all sequences share; only seeds differ."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    truncation: Truncation = field(default_factory=Truncation)
    records_supports: bool = True
    """With an active truncation: whether responses contain the tokens that could be drawn."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request for the rest of one sequence."""

    tokens: Sequence[int]
    """The prompt and the response so far."""
    generated: int
    """Number of tokens of the response so far, at the end of ``tokens``."""
    sampling: Sampling
    seed: int
    """Seed of the sequence."""
    greedy: bool
    """Take the most likely token."""
    version: int
    """Version of the weights. Requests share cached prefixes only within a version: after an update the server's cache
    still has keys and values of the old weights."""

    @property
    def with_supports(self) -> bool:
        """Whether the tokens that could be drawn are requested."""
        return self.sampling.truncation.is_active and self.sampling.records_supports and not self.greedy


@dataclass(frozen=True, slots=True)
class PartialResponse:
    """The tokens that the server generated for one request, with log-probabilities in nats."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[int, ...]
    """(version, tokens) pairs, flattened."""
    abort_reason: str
    """The server's reason for an incomplete sequence; empty if the sequence is complete."""
    at_limit: bool = False
    """Whether the server ended the sequence because of its length."""
    supports: tuple[tuple[int, ...], ...] | None = None
    """The tokens that could be drawn at each position, if they were requested."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of a running server."""

    release: str
    ranks: int = 1
    """Number of its processes that hold weights."""
    device: str = ""
    token_versions: bool = True
    """A response has the weight version of each token."""
    no_supports: str = ""
    """Why it does not return the tokens that could be drawn, with the fix; empty if it does."""
    longest_input: int | None = None
    """From this number of tokens on it refuses a request; None if it does not say so."""

    @property
    def devices(self) -> int:
        """Number of its accelerators."""
        return 0 if self.device == "cpu" else self.ranks


class Staged(Protocol):
    """A snapshot that is ready to be loaded."""

    async def load(self, client: ServerClient, *, flush: bool) -> None:
        """Load the snapshot into the server, verify it, and flush the server's cache if ``flush``.

        Raises EngineError if loading fails; the server may then have part of the weights.
        """
        ...

    def close(self) -> None:
        """Free the resources of the staged snapshot."""
        ...


class WeightTransfer(Protocol):
    """A transfer of weights to one server."""

    async def stage(self, client: ServerClient, snapshot: Snapshot) -> Staged:
        """Prepare the snapshot while the server generates. Raises EngineError if the preparation fails."""
        ...

    async def close(self, client: ServerClient) -> None:
        """Remove this worker's state, such as a group, from a server that continues to run."""
        ...


class Dialect(ABC):
    """One kind of server, with the options of a run, and what the server that `facts` has asked last can do."""

    name: str
    """As in messages: SGLang."""
    table: str
    """Table of its options: rollout.sglang."""
    weights: str
    """How weights are sent, as in messages: disk."""
    health_resume: Call | None = None
    """A request that makes a server healthy which an earlier worker left paused; None if a paused server is healthy."""

    @abstractmethod
    def given_key(self) -> str:
        """The API key of a server that this worker did not start; empty if it has none."""

    @abstractmethod
    async def facts(self, client: ServerClient) -> ServerFacts:
        """Ask a healthy server what it is.

        Raises EngineError for a server that cannot be used, ConfigError for options that it does not support.
        """

    @abstractmethod
    async def take_over(self, client: ServerClient, deadline_s: float) -> None:
        """End the requests of an earlier worker, and an update that it may have left open. Raises EngineError."""

    @abstractmethod
    async def is_generating(self, client: ServerClient, deadline_s: float) -> bool:
        """Whether a server that has requests gives a sign of life within ``deadline_s`` seconds."""

    @abstractmethod
    def generate(self, part: Continuation) -> Call:
        """Generate the rest of a response, with log-probabilities at the sampling temperature, over the support."""

    @abstractmethod
    def parse_generated(self, answer: Any, part: Continuation) -> PartialResponse:
        """Parse the answer to `generate`.

        Where answers have no versions, weights never change while a sequence runs: all tokens have that of ``part``.

        Raises EngineError if the answer does not have the expected form, or its parts contradict each other.
        """

    @abstractmethod
    def pause(self, mode: PauseMode) -> Call:
        """Pause generation: keep running sequences, requeue them (retract), or return them incomplete (abort)."""

    @abstractmethod
    def resume(self) -> Call:
        """Resume generation after `pause`."""

    @abstractmethod
    def transfer(self, layout: Layout, facts: ServerFacts) -> WeightTransfer:
        """The configured transfer of weights to this server."""
