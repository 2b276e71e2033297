"""The HTTP protocol of SGLang servers: bodies of requests, and the content of responses.

- Routes are the same in all supported versions, behaviour is not: from 0.5.19 on a response has the weight version of
  each token, from 0.5.21 on weights in parts need a session, and 0.5.23 refuses unknown sampling settings.
- Requests contain only fields that every supported version accepts, except for return_sampling_mask (`Capabilities`).
- Requests contain every sampling field of these versions: what they leave out could be set by the server's operator
  (--preferred-sampling-params).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrt.engines.options import PauseMode
from flowrt.engines.server.client import Call
from flowrt.engines.server.dialect import Continuation, PartialResponse, Sampling
from flowrt.engines.server.layout import Parameter
from flowrt.errors import EngineError
from flowrt.runtime.addresses import bracketed

OLDEST = (0, 5, 12)
SESSIONS_SINCE = (0, 5, 21)
TOKEN_VERSIONS_SINCE = (0, 5, 19)
SUPPORTS_SINCE = (0, 5, 16)
NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "logit_bias": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "n": 1,
    "stream_interval": None,
    "spaces_between_special_tokens": True,
}
"""Sampling fields that no run uses, with the values at which they change nothing."""
NAN_REASON = "NaN happened"
"""The server's reason for the end of a sequence whose probabilities were not numbers."""
_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Differences between versions of the server."""

    update_session: bool
    """Weights in parts have to be sent between begin_weight_update and end_weight_update."""
    token_versions: bool
    """A response has the weight version of each token."""
    supports: bool
    """A response can have the tokens that could be drawn at each position."""


def capabilities(version: str) -> Capabilities:
    """The capabilities of a version of the server. Raises EngineError if it is too old or not a release number."""
    match = _NUMBERS.match(version)
    if match is None:
        raise EngineError(f"the SGLang server reports version {version!r}; {release(OLDEST)} or newer is needed")
    numbers = tuple(int(number) for number in match.groups())
    if numbers < OLDEST:
        raise EngineError(f"the SGLang server has version {version}; {release(OLDEST)} or newer is needed")
    return Capabilities(
        update_session=numbers >= SESSIONS_SINCE,
        token_versions=numbers >= TOKEN_VERSIONS_SINCE,
        supports=numbers >= SUPPORTS_SINCE,
    )


def release(numbers: tuple[int, ...]) -> str:
    """A release as text, such as 0.5.12."""
    return ".".join(map(str, numbers))


def generate(part: Continuation) -> Call:
    """Generate the rest of a response, with log-probabilities at the sampling temperature.

    With an active truncation the support of each token is requested, and log-probabilities over it.
    """
    sampling, greedy = part.sampling, part.greedy
    settings: dict[str, Any] = {
        **NEUTRAL,
        "max_new_tokens": sampling.max_new_tokens - part.generated,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.truncation.top_p,
        "top_k": 1 if greedy else sampling.truncation.top_k or -1,
        "min_p": 0.0 if greedy else sampling.truncation.min_p,
        "stop": list(sampling.stop_strings),
        "stop_token_ids": list(sampling.stop_token_ids),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": part.seed,
    }
    body: dict[str, Any] = {
        "input_ids": list(part.tokens),
        "sampling_params": settings,
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": f"version {part.version}",
    }
    if part.with_supports:
        body["return_sampling_mask"] = True
    return Call("/generate", body)


def unknown_preferences(about: Mapping[str, Any]) -> list[str]:
    """The sampling fields of --preferred-sampling-params that no request overrules.

    ``about``: the server's description of itself.
    """
    preferred = about.get("preferred_sampling_params") or {}
    if isinstance(preferred, str):
        preferred = json.loads(preferred)
    call = generate(Continuation([], 0, Sampling(1.0, 1, ()), seed=0, greedy=False, version=0))
    return sorted(set(preferred) - set(call.body["sampling_params"]))


def pause(mode: PauseMode) -> Call:
    """Pause generation: keep running sequences (in_place), requeue them (retract) or return them incomplete (abort)."""
    return Call("/pause_generation", {"mode": mode})


def resume() -> Call:
    """Resume generation after `pause`."""
    return Call("/continue_generation", {})


def load_from_disk(directory: str, version: int, *, flush: bool) -> list[Call]:
    """Load a checkpoint from a directory, for which no version of the server needs a session.

    ``flush``, here and below: remove keys and values of the old weights from the server's cache.
    """
    body = {"model_path": directory, "weight_version": str(version), "flush_cache": flush}
    return [Call("/update_weights_from_disk", body)]


def load_from_tensors(
    can: Capabilities, buckets: Sequence[str], ranks: int, version: int, *, flush: bool
) -> list[Call]:
    """Load tensors that are serialized in the requests, one request per bucket, with a copy for each rank."""
    bodies = [{"serialized_named_tensors": [bucket] * ranks} for bucket in buckets]
    return _parts(can, "/update_weights_from_tensor", bodies, version, flush)


def load_from_broadcast(
    can: Capabilities, buckets: Sequence[Sequence[Parameter]], group: str, version: int, *, flush: bool
) -> list[Call]:
    """Receive buckets by broadcast from rank 0 of a group; the tensors of a bucket are contiguous bytes."""
    bodies = [
        {
            "names": [parameter.name for parameter in bucket],
            "dtypes": [parameter.dtype for parameter in bucket],
            "shapes": [list(parameter.shape) for parameter in bucket],
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        for bucket in buckets
    ]
    return _parts(can, "/update_weights_from_distributed", bodies, version, flush)


def join_group(group: str, host: str, port: int, ranks: int) -> Call:
    """Have the server's processes join a group of ``ranks`` ranks as ranks 1 and up.

    The backend is gloo, which also supports tensors on a GPU.
    """
    return Call(
        "/init_weights_update_group",
        {
            "master_address": bracketed(host),  # it goes into a URL
            "master_port": port,
            "rank_offset": 1,
            "world_size": ranks,
            "group_name": group,
            "backend": "gloo",
        },
    )


def leave_group(group: str) -> Call:
    """Have the server's processes leave a group."""
    return Call("/destroy_weights_update_group", {"group_name": group})


def checksum() -> Call:
    """Request a checksum of each tensor of the server."""
    return Call("/weights_checker", {"action": "checksum"})


def end_session() -> Call:
    """End the session of a weight update."""
    return Call("/end_weight_update", {})


def _parts(can: Capabilities, route: str, bodies: Sequence[dict[str, Any]], version: int, flush: bool) -> list[Call]:
    """Calls for the parts of an update, of which only the last sets the version and flushes the cache.

    So no token is labelled with a version that is loaded in part.
    """
    last = len(bodies) - 1
    calls = []
    for index, body in enumerate(bodies):
        end: dict[str, Any] = {"flush_cache": flush and index == last}
        if index == last:
            end["weight_version"] = str(version)
        calls.append(Call(route, {**body, **end}))
    return [Call("/begin_weight_update", {}), *calls, end_session()] if can.update_session else calls


def parse_generated(answer: Any, can: Capabilities, version: int, *, with_supports: bool = False) -> PartialResponse:
    """Parse a response of /generate.

    Args:
        answer: the decoded JSON.
        can: capabilities of the server.
        version: version of the weights when the request was sent. If responses have no versions, weights never change
            while a sequence runs, so all its tokens have this version.
        with_supports: whether supports were requested.

    Raises EngineError if the response does not have the expected form, or its parts contradict each other.
    """
    try:
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        tokens = tuple(int(entry[1]) for entry in entries)
        logprobs = tuple(float(entry[0]) for entry in entries)
        supports = None
        if with_supports:
            # The field output_token_logprobs has log-probabilities over the whole distribution.
            logprobs = tuple(float(logprob) for logprob in meta.get("output_token_sampling_logprobs") or [])
            supports = tuple(tuple(map(int, support)) for support in meta.get("output_token_sampling_mask") or [])
        finish = meta["finish_reason"]
        spans: list[int] = []
        if not can.token_versions:
            spans = [version, len(tokens)] if tokens else []
        else:
            for span in meta["weight_versions"] if tokens else ():
                count = span["end"] - span["start"]
                if count:
                    spans += [int(span["version"]), count]
        abort_reason = str(finish.get("message") or "aborted") if finish["type"] == "abort" else ""
        is_nan = finish.get("matched") == NAN_REASON
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(f"the response of the SGLang server does not have the expected form: {error!r}") from error
    if is_nan:
        raise EngineError(
            "the SGLang server drew a token from probabilities that are not numbers (NaN): the model has diverged, or "
            "its dtype (rollout.sglang.dtype) cannot represent its activations"
        )
    if sum(spans[1::2]) != len(tokens):
        raise EngineError(f"the SGLang server returned {len(tokens)} tokens with versions of {sum(spans[1::2])}")
    if supports is not None and not (
        len(supports) == len(logprobs) == len(tokens)
        and all(token in support for token, support in zip(tokens, supports, strict=True))
    ):
        raise EngineError(
            f"the SGLang server returned {len(tokens)} tokens with {len(logprobs)} log-probabilities and "
            f"{len(supports)} supports, or a token outside of its support; set rollout.top_k to 0 (and top_p to 1)"
        )
    return PartialResponse(tokens, logprobs, tuple(spans), abort_reason, finish["type"] == "length", supports)
