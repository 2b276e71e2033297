"""Whether a model can be trained as a policy: its predictions are a function of the tokens of one sample before them.

Checked with a few random tokens when a model is loaded. Models that fail: encoders, in which a token sees later ones;
models with random hashes; states into which padding or other samples leak.

Shapes: N samples, L tokens, V vocabulary.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from flowrt.engines.hf import first_sentence, model_name
from flowrt.errors import ConfigError, EngineError

LENGTHS = (7, 18, 11)
"""Lengths (tokens) of the sequences of a check."""
MIN_POSITIONS = 8
"""Models with fewer positions are not checked."""
WIDE_NATS = 1e-4
NARROW_NATS = 0.05
"""Allowed differences of log-probabilities, in float32 and float64, and in narrower dtypes; or more by rounding."""
NOISE_FACTOR = 20.0
MAX_NARROW_NATS = 0.5
"""Allowed differences over those between two equal computations in other shapes, and their limit in narrow dtypes."""
COPIES = 3
FAILURES = (TypeError, ValueError, LookupError, RuntimeError, AttributeError, AssertionError, EngineError)
"""Exceptions of a model for inputs, a kind of cache or of mask that it does not support."""


def sample_sequences(model: Any) -> list[torch.Tensor]:
    """Random token ids [L] of unequal lengths, on the CPU; none for a model without room for them."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    positions = positions if positions > 0 else sys.maxsize  # XLNet has -1
    if positions < MIN_POSITIONS:
        return []
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(config.vocab_size)
    return [torch.randint(vocabulary, (min(length, positions),), generator=generator) for length in LENGTHS]


def is_scaled_by_place(model: Any) -> bool:
    """Whether attention is scaled by the place of a token in the call or in the cache, and not by its position id.

    That of layers without rotary positions of Llama 4 is, from ``floor_scale`` tokens on. So it is right for one
    sequence without padding at the left, and in no other layout; sequences of a check may be too short to show it.
    """
    config = model.config.get_text_config()
    rotary = getattr(config, "no_rope_layers", None) or [0]
    return bool(getattr(config, "attn_temperature_tuning", False)) and not all(rotary)


@torch.no_grad()
def plain_logprobs(model: Any, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probabilities [L, V] (nats) after each token of each sequence, from a forward pass over it alone."""
    device = next(model.parameters()).device
    return [
        model(input_ids=sequence.unsqueeze(0).to(device), use_cache=False).logits[0].float().log_softmax(-1)
        for sequence in sequences
    ]


@torch.no_grad()
def allowed_difference(model: Any, sequence: torch.Tensor, plain_LV: torch.Tensor) -> float:
    """Allowed `expected_difference` (nats) of another computation of ``plain_LV``, from the rounding of this model.

    Rounding is measured with copies of the sequence in a batch, without padding.
    """
    tokens_NL = sequence.expand(COPIES, -1).to(plain_LV.device)
    noise = expected_difference(
        model(input_ids=tokens_NL, use_cache=False).logits[-1].float().log_softmax(-1), plain_LV
    )
    if model.dtype in (torch.float32, torch.float64):
        return max(WIDE_NATS, NOISE_FACTOR * noise)
    return min(max(NARROW_NATS, NOISE_FACTOR * noise), MAX_NARROW_NATS)


@torch.no_grad()
def padding_noise(model: Any, sequences: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> float:
    """Difference (nats) between sequences that are computed alone and together, padded at the right."""
    tokens_NL = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    logits_NLV = model(input_ids=tokens_NL.to(plain[0].device), use_cache=False).logits
    together = [
        one_LV[: len(single_LV)].float().log_softmax(-1) for one_LV, single_LV in zip(logits_NLV, plain, strict=True)
    ]
    return max(expected_difference(padded, other) for padded, other in zip(together, plain, strict=True))


def expected_difference(logprobs_LV: torch.Tensor, plain_LV: torch.Tensor) -> float:
    """Mean absolute difference (nats) of the log-probabilities of tokens drawn from ``plain``, at the worst position.

    Infinite if the two are not finite in the same places.
    """
    if logprobs_LV.isnan().any() or plain_LV.isnan().any():
        return math.inf
    off_LV = (logprobs_LV - plain_LV).abs().nan_to_num(0.0, math.inf)  # NaN: both are infinite
    weighted_LV = (off_LV * plain_LV.exp()).nan_to_num(0.0, math.inf)
    return float(weighted_LV.sum(-1).max())


def check_training(model: Any) -> None:
    """Raise ConfigError for a model that cannot be trained as a policy. Collective for a sharded model.

    Args:
        model: a causal LM without dropout (`flowrt.engines.hf.set_training_mode`).
    """
    if not hasattr(getattr(model, "config", None), "get_text_config") or not (sequences := sample_sequences(model)):
        return
    what = f"model {model_name(model)}"
    try:
        plain = plain_logprobs(model, sequences)
        prefixes = [sequence[: len(sequence) // 2] for sequence in sequences]
        starts = plain_logprobs(model, prefixes)
        again = plain_logprobs(model, prefixes)
        limit = allowed_difference(model, sequences[1], plain[1])
        noise = padding_noise(model, sequences, plain)
    except FAILURES as error:
        raise ConfigError(
            f"{what} cannot be trained on text alone: {first_sentence(error)}; use another model"
        ) from error
    if not max(map(expected_difference, again, starts)) <= WIDE_NATS:
        raise ConfigError(f"{what} predicts other probabilities each time (it draws random numbers); use another model")
    if (
        not max(expected_difference(start, whole[: len(start)]) for start, whole in zip(starts, plain, strict=True))
        <= limit
    ):
        raise ConfigError(
            f"{what} is not causal: its prediction of a token depends on later tokens (an encoder, or is_decoder is "
            "false in config.json), so it cannot generate; use another model"
        )
    if not noise <= limit:
        raise ConfigError(
            f"{what}: padding changes the predictions of a sample by {noise:.2g} nats a token, so samples cannot be "
            "trained together; use another model"
        )
