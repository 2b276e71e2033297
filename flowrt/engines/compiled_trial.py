"""A model is told to decode compiled: the step is compiled for it, and compared with the plain one."""

from itertools import count
from typing import Any

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from flowrt.engines.compiled_decoding import exchange_attention, refusal, step_compiled
from flowrt.engines.folded_attention import allowed_nats
from flowrt.engines.refilling import CachedModel, Step
from flowrt.engines.row_cache import GROWTH
from flowrt.errors import EngineError

STEPS = 3
UNFIT = (TypeError, ValueError, LookupError, RuntimeError, AttributeError, AssertionError, FailOnRecompileLimitHit)
"""What a model raises that does not take such a step, and torch.compile; the last is no RuntimeError of its own."""


@torch.inference_mode()
def compiled_for(model: Any, *, alone: bool) -> Step:
    """A decode step, compiled in 10 s to a minute. Raises EngineError when it differs from the plain one.

    One compilation serves all numbers of sequences and of places (of sequences ``alone``, all numbers of places): it is
    tried with such as are no other dimension of the model, or PyTorch would take the two for the same. The thread that
    decodes must have as many intra-op threads as this one, or it is compiled again.
    """
    exchange_attention(model)
    try:
        sequences, capacity = _trial(model, alone=alone)
        plain_SRV, compiled_SRV = (_decoded(model, sequences, capacity, step) for step in (None, step_compiled))
    except UNFIT as error:
        why = str(error).strip() or type(error).__name__
        raise EngineError(refusal(model, why.splitlines()[0])) from error
    whole = [model(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0, -STEPS:] for sequence in sequences]
    noise = float((torch.stack(whole, 1).log_softmax(-1) - plain_SRV.log_softmax(-1)).abs().max())
    apart = float((compiled_SRV.log_softmax(-1) - plain_SRV.log_softmax(-1)).abs().max())
    if not apart <= (allowed := allowed_nats(plain_SRV.dtype, noise)):
        raise EngineError(refusal(model, f"log-probabilities are {apart:.2g} nats off, more than {allowed:.2g}"))
    return step_compiled


def _trial(model: Any, *, alone: bool) -> tuple[list[torch.Tensor], int]:
    """Random sequences, and how many places a row has room for: all in numbers that are no other dimension's."""
    sizes = _sizes(model)
    rows = 1 if alone else next(number for number in count(3) if number not in sizes)
    places = next(number for number in count(GROWTH // 2) if sizes.isdisjoint(range(number - STEPS, number + 1)))
    capacity = next(number for number in count(GROWTH, GROWTH) if number not in sizes and number > places)
    dice = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    return [torch.randint(vocabulary, (places - row,), generator=dice) for row in range(rows)], capacity


def _sizes(model: Any) -> set[int]:
    """Of keys and values, and the numbers of heads."""
    cached = CachedModel(model, 1)
    cached.fill([torch.zeros(2, dtype=torch.long)], [0])
    kept = {size for layer in cached.cache.layers for slab in (layer.keys, layer.values) for size in slab.shape[1::2]}
    heads = int(model.config.get_text_config().num_attention_heads)
    return kept | {heads} | {heads // size for size in kept}


def _decoded(model: Any, sequences: list[torch.Tensor], capacity: int, step: Step | None) -> torch.Tensor:
    """Logits [S, R, V] after each of the last tokens, which are decoded after the others were filled in."""
    cached = CachedModel(model, len(sequences), step)
    cached.cache.reserve(capacity)
    cached.fill([sequence[:-STEPS] for sequence in sequences], range(len(sequences)))
    lengths_R = torch.tensor([len(sequence) for sequence in sequences])
    tokens_SR = torch.stack([sequence[-STEPS:] for sequence in sequences], 1)
    return torch.stack([cached.decode(tokens_R, lengths_R - STEPS + step) for step, tokens_R in enumerate(tokens_SR)])
