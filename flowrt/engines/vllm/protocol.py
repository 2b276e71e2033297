"""The HTTP protocol of vLLM servers: bodies of requests, and the content of responses.

- Routes for weights and pauses need VLLM_SERVER_DEV_MODE=1 in the server's environment, and from 0.30 on generation
  from tokens needs --enable-scale-out.
- Unknown fields of a request are ignored: a misspelt one would be silent.
- Until 0.31 the names of tokens have the form ``token_id:539``, and a response has one version for all its tokens.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrt.engines.options import PauseMode
from flowrt.engines.server.client import Call
from flowrt.engines.server.dialect import Continuation, PartialResponse
from flowrt.engines.vllm.descriptor import MAX_TOP_K
from flowrt.errors import EngineError

OLDEST = (0, 17, 0)
LABELS_SINCE = (0, 27, 0)
SCALE_OUT_SINCE = (0, 30, 0)
TOKEN_VERSIONS_SINCE = (0, 32, 0)
EXCLUDED = -9000.0
"""Log-probabilities below this one stand for tokens that cannot be drawn: vLLM writes -9999."""
SEED_BITS = 62
_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_ITERATIONS = re.compile(r"^vllm:iteration_tokens_total_count\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class VllmCapabilities:
    """Differences between releases of the server."""

    labels: bool
    """The server can be told the version of its weights."""
    scale_out: bool
    """It needs --enable-scale-out for generation from tokens."""
    token_versions: bool
    """A response has the weight version of each token."""


def capabilities(release: str) -> VllmCapabilities:
    """The capabilities of a release of the server. Raises EngineError if it is too old or not a release number."""
    oldest = ".".join(map(str, OLDEST))
    match = _NUMBERS.match(release)
    if match is None:
        raise EngineError(f"the vLLM server reports version {release!r}; {oldest} or newer is needed")
    numbers = tuple(int(number) for number in match.groups())
    if numbers < OLDEST:
        raise EngineError(f"the vLLM server has version {release}; {oldest} or newer is needed")
    return VllmCapabilities(
        labels=numbers >= LABELS_SINCE,
        scale_out=numbers >= SCALE_OUT_SINCE,
        token_versions=numbers >= TOKEN_VERSIONS_SINCE,
    )


def generate(part: Continuation, *, has_seed: bool, vocabulary: int) -> Call:
    """Generate the rest of a response, with log-probabilities over the tokens that can be drawn.

    Args:
        part: the sequence.
        has_seed: whether a seed is sent. It is a new one for each part of a sequence: a server may begin its random
            numbers anew with each request, and would draw the same tokens again.
        vocabulary: number of tokens of the model.
    """
    sampling, greedy = part.sampling, part.greedy
    truncation = sampling.truncation
    settings: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens - part.generated,
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": 1.0 if greedy else truncation.top_p,
        "top_k": 0 if greedy else truncation.top_k,
        "min_p": 0.0 if greedy else truncation.min_p,
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": support_limit(truncation.top_k, vocabulary) if part.with_supports else 0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # the stop tokens are those of the run
        "stop": list(sampling.stop_strings),
        "include_stop_str_in_output": True,
        "detokenize": bool(sampling.stop_strings),
    }
    if has_seed and not greedy:
        settings["seed"] = _seed_of_part(part)
    body = {"token_ids": list(part.tokens), "cache_salt": f"version {part.version}", "sampling_params": settings}
    return Call("/inference/v1/generate", body)


def support_limit(top_k: int, vocabulary: int) -> int:
    """Number of likeliest tokens that are requested: one more than may be in the support, so that its end is seen."""
    return min((top_k or MAX_TOP_K) + 1, MAX_TOP_K + 1, vocabulary)


def _seed_of_part(part: Continuation) -> int:
    digest = hashlib.blake2b(f"{part.seed} {part.generated}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % (1 << SEED_BITS)


def pause(mode: PauseMode) -> Call:
    """Pause generation: keep running sequences (also for retract, see `reset`), or return them incomplete (abort)."""
    return Call(f"/pause?mode={'abort' if mode == 'abort' else 'keep'}&clear_cache=false", {})


def resume() -> Call:
    """Resume generation after `pause`."""
    return Call("/resume", {})


def reset() -> Call:
    """Remove all keys and values from the server's cache; those of running sequences are computed again."""
    return Call("/reset_prefix_cache?reset_running_requests=true", {})


def load(directory: str) -> Call:
    """Load the checkpoint in a directory with `flowrt_vllm_worker`, or without it by vLLM's own method."""
    return Call("/collective_rpc", {"method": "flowrt_load", "args": [directory]})


def label(version: int) -> Call:
    """Label the tokens that are generated from now on with this version."""
    return Call("/update_weight_version", {"new_version": str(version)})


def iterations(metrics: str) -> str:
    """The number of passes that the server's engines have computed, of the text of /metrics."""
    return " ".join(_ITERATIONS.findall(metrics))


def parse_generated(answer: Any, part: Continuation, *, token_versions: bool, vocabulary: int) -> PartialResponse:
    """Parse the answer to `generate`.

    Args:
        answer: the decoded JSON.
        part: the request. If answers have no versions, weights never change while a sequence runs.
        token_versions: whether answers have the version of each token.
        vocabulary: number of tokens of the model.

    Raises EngineError if the answer does not have the expected form, its parts contradict each other, or a support is
    incomplete.
    """
    try:
        choice = answer["choices"][0]
        tokens = tuple(map(int, choice["token_ids"]))
        entries = choice["logprobs"]["content"] if tokens else []
        logprobs = tuple(float(entry["logprob"]) for entry in entries)
        supports = tuple(_support(entry) for entry in entries) if part.with_supports else None
        finish = choice["finish_reason"]
        spans: list[int] = []
        if not token_versions:
            spans = [part.version, len(tokens)] if tokens else []
        else:
            for span in choice["weight_versions"] if tokens else ():
                count = int(span["end"]) - int(span["start"])
                if count:
                    spans += [int(span["version"]), count]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(f"the response of the vLLM server does not have the expected form: {error!r}") from error
    if len(logprobs) != len(tokens) or sum(spans[1::2]) != len(tokens):
        raise EngineError(
            f"the vLLM server returned {len(tokens)} tokens with {len(logprobs)} log-probabilities and versions of "
            f"{sum(spans[1::2])}"
        )
    if any(logprob < EXCLUDED or logprob != logprob for logprob in logprobs):
        raise EngineError(
            "the vLLM server drew a token whose probability is 0 or not a number: the model has diverged, or its dtype "
            "(rollout.vllm.dtype) cannot represent its activations"
        )
    if supports is not None:
        _check_supports(supports, support_limit(part.sampling.truncation.top_k, vocabulary), vocabulary)
    kept = None if supports is None else tuple(support.tokens for support in supports)
    return PartialResponse(
        tokens,
        logprobs,
        tuple(spans),
        "aborted" if finish == "abort" else "",
        at_limit=finish == "length",
        supports=kept,
    )


@dataclass(frozen=True, slots=True)
class _ReturnedSupport:
    """The tokens that could be drawn at a position, and whether one that could not be is in the answer too."""

    tokens: tuple[int, ...]
    has_end: bool


def _support(entry: Mapping[str, Any]) -> _ReturnedSupport:
    """The support of a token. A tie at its end has more tokens than were asked for."""
    logprob_of = {_token(top): float(top["logprob"]) for top in [*entry["top_logprobs"], entry]}
    tokens = tuple(token for token, logprob in logprob_of.items() if logprob > EXCLUDED)
    return _ReturnedSupport(tokens, len(tokens) < len(logprob_of))


def _token(entry: Mapping[str, Any]) -> int:
    number = entry.get("token_id")
    return int(str(entry["token"]).removeprefix("token_id:")) if number is None else int(number)


def _check_supports(supports: tuple[_ReturnedSupport, ...], limit: int, vocabulary: int) -> None:
    """Raise EngineError if a support may have more tokens than the server returned."""
    for support in supports:
        if not support.has_end and len(support.tokens) < vocabulary:
            raise EngineError(
                f"a token was drawn from {limit} tokens or more, which is as many as the vLLM server returns; "
                f"set rollout.top_k to {MAX_TOP_K} or less, with top_p and min_p if you like"
            )
