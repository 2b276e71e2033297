"""A model is told to decode compiled: the step is compiled for it, and compared with the plain one."""

from itertools import count
from typing import Any

import torch

from flowrt.engines.compiled_decoding import BLOCK, exchange_attention, refusal
from flowrt.engines.folded_attention import allowed_nats
from flowrt.engines.refilling import CachedModel
from flowrt.errors import EngineError

STEPS = 3


@torch.inference_mode()
def prepare_compiled(model: Any, *, alone: bool) -> None:
    """Compile a decode step, which takes some 10 s to a minute. Raises EngineError when it differs from the plain one.

    One compilation serves all numbers of sequences and of places (of sequences ``alone``, all numbers of places): it is
    tried with such as are no other dimension of the model, or PyTorch would take the two for the same.
    """
    exchange_attention(model)
    sizes = _sizes(model)
    rows = 1 if alone else next(number for number in count(3) if number not in sizes)
    places = next(number for number in count(2 * BLOCK, BLOCK) if number not in sizes and number % (4 * BLOCK))
    dice = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    lengths = [places - STEPS - row for row in range(rows)]
    sequences = [torch.randint(vocabulary, (length + STEPS,), generator=dice) for length in lengths]
    try:
        plain_SRV, compiled_SRV = (_decoded(model, sequences, compiled=compiled) for compiled in (False, True))
    except (TypeError, ValueError, LookupError, RuntimeError, AttributeError, AssertionError) as error:
        raise EngineError(refusal(model, str(error).strip().splitlines()[0])) from error
    whole = [model(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0, -STEPS:] for sequence in sequences]
    noise = float((torch.stack(whole, 1).log_softmax(-1) - plain_SRV.log_softmax(-1)).abs().max())
    apart = float((compiled_SRV.log_softmax(-1) - plain_SRV.log_softmax(-1)).abs().max())
    if not apart <= (allowed := allowed_nats(plain_SRV.dtype, noise)):
        raise EngineError(refusal(model, f"log-probabilities are {apart:.2g} nats off, more than {allowed:.2g}"))


def _sizes(model: Any) -> set[int]:
    """Of keys and values, and the numbers of heads."""
    cached = CachedModel(model, 1)
    cached.fill([torch.zeros(2, dtype=torch.long)], [0])
    kept = {size for layer in cached.cache.layers for slab in (layer.keys, layer.values) for size in slab.shape[1::2]}
    heads = int(model.config.get_text_config().num_attention_heads)
    return kept | {heads} | {heads // size for size in kept}


def _decoded(model: Any, sequences: list[torch.Tensor], *, compiled: bool) -> torch.Tensor:
    """Logits [S, R, V] after each of the last tokens, which are decoded after the others were filled in."""
    cached = CachedModel(model, len(sequences), compiled=compiled)
    cached.fill([sequence[:-STEPS] for sequence in sequences], range(len(sequences)))
    lengths_R = torch.tensor([len(sequence) for sequence in sequences])
    tokens_SR = torch.stack([sequence[-STEPS:] for sequence in sequences], 1)
    return torch.stack([cached.decode(tokens_R, lengths_R - STEPS + step) for step, tokens_R in enumerate(tokens_SR)])
