"""The way in which the rollout engine generates with a model: rows of keys and values, or a cache for each sequence.

Decided by the model's own kind of cache, and by a check: a few tokens are generated in each way, with sequences of
unequal lengths, and compared with a plain forward pass over each whole sequence. A model for which neither way gives
the same log-probabilities is refused.

Shapes: N samples, L tokens, T tokens of a response, V vocabulary.
"""

import logging
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from flowrt.engines.descriptor import PACKED_LAYERS
from flowrt.engines.hf import first_sentence, head_on, model_name
from flowrt.engines.model_config import position_limit
from flowrt.engines.torch.cached_model import CachedModel
from flowrt.engines.torch.generating import GeneratingModel
from flowrt.engines.torch.sequence_model import SequenceModel
from flowrt.engines.training.architecture import (
    FAILURES,
    LENGTHS,
    allowed_difference,
    expected_difference,
    is_scaled_by_place,
    plain_logprobs,
    sample_sequences,
)
from flowrt.errors import ConfigError

log = logging.getLogger("flowrt")
STEPS = 4
"""Tokens after each prompt of the check; the last two are computed by `GeneratingModel.extend`."""
WINDOW = re.compile("window|local_attention")
"""Names of fields of a configuration with a number of tokens that a token sees."""
MAX_WINDOW = 4096
"""Windows (tokens) up to which a check goes beyond them."""


def has_rows(model: Any) -> bool:
    """Whether the state of a sequence is a row of keys and values in every layer, by transformers' cache for it."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or PACKED_LAYERS)
    if getattr(model, "_is_stateful", False) or not kinds <= PACKED_LAYERS or is_scaled_by_place(model):
        return False
    try:
        layers = DynamicCache(config=model.config).layers
    except FAILURES:
        return False
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class Way(Enum):
    """A way in which the torch rollout engine generates, the fastest first."""

    ROWS = "rows"
    """Rows of keys and values; all running sequences share a decode step."""
    SEQUENCES = "sequences"
    """A cache for each sequence, of the model's own class."""
    ANEW = "anew"
    """No cache: each token is computed with the whole sequence before it."""

    def of(self, model: Any, rows: int) -> GeneratingModel:
        """The model with empty rows."""
        return (
            CachedModel(model, rows) if self is Way.ROWS else SequenceModel(model, rows, is_cached=self is not Way.ANEW)
        )


MEANING = {
    Way.ROWS: "rows of keys and values",
    Way.SEQUENCES: "a cache for each sequence",
    Way.ANEW: "each token computed with the whole sequence before it",
}


def right_way(model: Any, *, compiled: bool = False) -> Way:
    """The fastest way that gives the log-probabilities of a plain forward pass. If it is not rows, the log says why.

    Args:
        model: a causal LM in evaluation mode, on the device of the engine.
        compiled: whether the decode step is to be compiled, which needs rows of keys and values.

    Raises:
        ConfigError: if no way does, or only one that cannot be compiled.
    """
    if not (sequences := sample_sequences(model)):
        return Way.ROWS
    name = model_name(model)
    try:
        plain = plain_logprobs(model, sequences)
        limit = allowed_difference(model, sequences[1], plain[1])
        samples: list[Sample] = [(sequences, plain), *_beyond_windows(model)]
    except FAILURES as error:
        raise ConfigError(
            f"model {name} cannot generate on text alone: {first_sentence(error)}; use another"
        ) from error
    wrong = [] if has_rows(model) else [f"{MEANING[Way.ROWS]} are not its state"]
    for way in list(Way)[len(wrong) :]:
        off, how = _tried(model, way, samples, limit)
        if off <= limit:
            break
        wrong.append(f"{MEANING[way]}: {how}")
    else:
        raise ConfigError(
            f"model {name} cannot generate with the torch rollout engine ({'; '.join(wrong)}); use --rollout.engine "
            "sglang"
        )
    if wrong and compiled:
        raise ConfigError(f"rollout.compile needs a model with {MEANING[Way.ROWS]}; {name}: {wrong[0]}; leave it out")
    if wrong:
        log.warning(
            "model %s generates slowly, with %s (%s); use --rollout.engine sglang if it has this model",
            name,
            MEANING[way],
            "; ".join(wrong),
        )
    return way


Sample = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Sequences [L] of unequal lengths, and the plain log-probabilities of their last `STEPS` + 1 positions at least."""


def _tried(model: Any, way: Way, samples: Sequence[Sample], limit: float) -> tuple[float, str]:
    """The `disagreement` (nats) of a way to generate, infinite if it fails; and what is wrong with it, as text.

    Ends at the first sample of which it is above ``limit``.
    """
    off = 0.0
    for sequences, plain in samples:
        try:
            off = disagreement(partial(way.of, model, len(sequences)), sequences, plain)
        except FAILURES as error:
            return math.inf, f"it fails ({first_sentence(error)})"
        if not off <= limit:
            break
    return off, f"off by {off:.2g} nats a token from a plain forward pass"


@torch.no_grad()
def _beyond_windows(model: Any) -> list[Sample]:
    """A short sequence with one that is longer than a window, for each window whose layers transformers does not list.

    Layers that are listed (``layer_types``) have transformers' own masks.
    """
    config = model.config.get_text_config()
    positions = position_limit(config.to_dict()) or sys.maxsize
    if getattr(config, "layer_types", None):
        return []
    windows = {value for name, value in vars(config).items() if WINDOW.search(name) and type(value) is int}
    samples: list[Sample] = []
    for window in sorted(windows):
        length = window + 2 * STEPS
        if not max(LENGTHS) < length <= min(positions, MAX_WINDOW + 2 * STEPS):
            continue
        generator = torch.Generator().manual_seed(0)
        sequences = [
            torch.randint(int(config.vocab_size), (size,), generator=generator) for size in (LENGTHS[0], length)
        ]
        has_head = model.get_output_embeddings() is not None
        with head_on(model, lambda hidden_BLD: hidden_BLD[:, -STEPS - 1 :]) if has_head else nullcontext():
            samples.append((sequences, plain_logprobs(model, sequences)))
    return samples


@torch.inference_mode()
def disagreement(
    build: Callable[[], GeneratingModel], sequences: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]
) -> float:
    """Largest `expected_difference` (nats) of generation in batches from ``plain``.

    Prompts are prefilled together, decoded together, and caught up with, as after an update of the weights. Raises what
    the model raises.
    """
    generating = build()
    prompts = [sequence[:-STEPS] for sequence in sequences]
    rows = range(len(sequences))
    count = generating.chunk([len(prompt) for prompt in prompts])
    chunks = [rows[first : first + count] for first in range(0, len(rows), count)]
    outputs = [torch.cat([generating.prefill([prompts[row] for row in chunk], chunk) for chunk in chunks])]
    lengths_N = torch.tensor([len(prompt) for prompt in prompts], device=generating.device)
    for step in range(STEPS - 2):
        tokens_N = torch.stack([sequence[step - STEPS] for sequence in sequences]).to(generating.device)
        outputs.append(generating.decode(tokens_N, lengths_N + step, int(lengths_N.max()) + step + 1))
    outputs.append(generating.extend([sequence[:-1] for sequence in sequences], 1))
    generating.fill([sequence[:-2] for sequence in sequences], rows)
    outputs.append(generating.extend(list(sequences), 2))
    wanted = [torch.stack([logits_LV[place - STEPS - 1] for logits_LV in plain]) for place in range(STEPS + 1)]
    return max(
        expected_difference(logits.float().log_softmax(-1), plain_NV)
        for logits, plain_NV in zip(outputs, wanted, strict=True)
    )
