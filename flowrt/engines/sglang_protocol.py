"""What is said to an SGLang server: pure functions from its version to the bodies of requests.

The protocol has changed under the same routes: weights sent in parts need a session from 0.5.21 on, the versions of
each token are told from 0.5.19 on, and 0.5.23 refuses sampling settings that it does not know. Only fields that every
supported version has are used, so one shape of each request is enough.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrt.engines.options import PauseMode
from flowrt.errors import EngineError

OLDEST = (0, 5, 12)
SESSIONS_SINCE = (0, 5, 21)
TOKEN_VERSIONS_SINCE = (0, 5, 19)
_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server of some version can do, or insists on."""

    update_session: bool
    """Weights that come in parts must come between begin_weight_update and end_weight_update."""
    token_versions: bool
    """A response says which of its tokens were made by which weights."""


def capabilities(version: str) -> Capabilities:
    """Of a server that gives this version. Raises EngineError for one that is too old, or that no release has."""
    found = _NUMBERS.match(version)
    if found is None:
        raise EngineError(f"the SGLang server says that its version is {version!r}; {_oldest()} or newer is needed")
    numbers = tuple(int(number) for number in found.groups())
    if numbers < OLDEST:
        raise EngineError(f"the SGLang server has version {version}; {_oldest()} or newer is needed")
    return Capabilities(update_session=numbers >= SESSIONS_SINCE, token_versions=numbers >= TOKEN_VERSIONS_SINCE)


def _oldest() -> str:
    return ".".join(map(str, OLDEST))


@dataclass(frozen=True, slots=True)
class Call:
    """One POST request."""

    route: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How sequences are sampled; the same for all but their seeds."""

    temperature: float
    max_new_tokens: int
    eos_id: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the checkpoint: dtype as torch calls it, without its prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def generate(tokens: Sequence[int], sampling: Sampling, *, made: int, seed: int, greedy: bool, version: int) -> Call:
    """Continue ``tokens``, of which the last ``made`` are an answer's beginning.

    Log-probabilities come at the sampling temperature. Prefixes are shared among requests of one version only: after
    weights have changed, keys and values in the server's cache are those of the old ones.
    """
    settings: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens - made,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 1 if greedy else -1,
        "stop_token_ids": [sampling.eos_id],
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": seed,
    }
    body = {
        "input_ids": list(tokens),
        "sampling_params": settings,
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": f"version {version}",
    }
    return Call("/generate", body)


def pause(mode: PauseMode) -> Call:
    """Stop generating: with what runs kept as it is, put back to be computed again, or returned as far as it is."""
    return Call("/pause_generation", {"mode": mode})


def resume() -> Call:
    return Call("/continue_generation", {})


def load_from_disk(directory: str, version: int, *, flush: bool) -> list[Call]:
    """Take a checkpoint's weights; no version wants a session for that."""
    body = {"model_path": directory, "weight_version": str(version), "flush_cache": flush}
    return [Call("/update_weights_from_disk", body)]


def load_from_tensors(
    can: Capabilities, buckets: Sequence[str], ranks: int, version: int, *, flush: bool
) -> list[Call]:
    """Take tensors that are in the requests themselves, serialized, bucket by bucket and for each of the ranks."""
    bodies = [{"serialized_named_tensors": [bucket] * ranks} for bucket in buckets]
    return _parts(can, "/update_weights_from_tensor", bodies, version, flush)


def load_from_broadcast(
    can: Capabilities, buckets: Sequence[Sequence[Parameter]], group: str, version: int, *, flush: bool
) -> list[Call]:
    """Receive buckets from rank 0 of a group: of each, all tensors end to end, as bytes."""
    bodies = [
        {
            "names": [one.name for one in bucket],
            "dtypes": [one.dtype for one in bucket],
            "shapes": [list(one.shape) for one in bucket],
            "group_name": group,
            "load_format": "flattened_bucket",
        }
        for bucket in buckets
    ]
    return _parts(can, "/update_weights_from_distributed", bodies, version, flush)


def join_group(group: str, host: str, port: int, ranks: int) -> Call:
    """Let the server's processes join a group as ranks 1 and up; gloo also takes tensors that are on a GPU."""
    return Call(
        "/init_weights_update_group",
        {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": ranks,
            "group_name": group,
            "backend": "gloo",
        },
    )


def leave_group(group: str) -> Call:
    return Call("/destroy_weights_update_group", {"group_name": group})


def checksum() -> Call:
    """A checksum of each tensor that the server holds."""
    return Call("/weights_checker", {"action": "checksum"})


def end_session() -> Call:
    return Call("/end_weight_update", {})


def _parts(can: Capabilities, route: str, bodies: Sequence[dict[str, Any]], version: int, flush: bool) -> list[Call]:
    """Only the last part names the version and empties the cache: no token may be told to come from half of it."""
    last = len(bodies) - 1
    calls = []
    for index, body in enumerate(bodies):
        end: dict[str, Any] = {"flush_cache": flush and index == last}
        if index == last:
            end["weight_version"] = str(version)
        calls.append(Call(route, {**body, **end}))
    return [Call("/begin_weight_update", {}), *calls, end_session()] if can.update_session else calls


@dataclass(frozen=True, slots=True)
class Piece:
    """What a server has made of a sequence before it stopped, or was cut."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[int, ...]
    """(version, tokens) pairs, flattened."""
    cut: str
    """Why it was cut short of its end; empty when it was not."""


def piece(answer: Any, can: Capabilities, asked: int) -> Piece:
    """Read an answer of /generate. Raises EngineError when it is not what was asked for.

    ``asked`` is the version that was in use when the request was made; where the server does not tell versions, its
    weights are never changed under a sequence, so that all of it is of that version.
    """
    try:
        meta = answer["meta_info"]
        made = meta.get("output_token_logprobs") or []
        tokens = tuple(int(one[1]) for one in made)
        logprobs = tuple(float(one[0]) for one in made)
        finish = meta["finish_reason"]
        spans: list[int] = []
        if not can.token_versions:
            spans = [asked, len(tokens)] if tokens else []
        else:
            for span in meta["weight_versions"] if tokens else ():
                count = span["end"] - span["start"]
                if count:
                    spans += [int(span["version"]), count]
        cut = str(finish.get("message") or "aborted") if finish["type"] == "abort" else ""
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(f"the SGLang server's answer is not of a form that flowrt knows: {error!r}") from error
    if sum(spans[1::2]) != len(tokens):
        raise EngineError(f"the SGLang server made {len(tokens)} tokens and told the versions of {sum(spans[1::2])}")
    return Piece(tokens, logprobs, tuple(spans), cut)
