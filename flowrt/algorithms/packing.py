"""Padding of ragged samples to rows, flattening of their response tokens, and splitting into micro-batches.

Flat order is sample-major: all response tokens of sample 0, then of sample 1, and so on. Concatenation brings values
that are stored per sample into this order.

Shapes: B = rows (one per sample), L = padded length, M = L - 1 predictions, T = response tokens, flattened.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Prompts and responses as right-padded rows."""

    tokens_BL: Tensor
    """int64"""
    attention_mask_BL: Tensor
    """bool, True on the tokens of the sample"""
    response_mask_BL: Tensor
    """bool, True on the tokens to train on"""

    def to(self, device: torch.device) -> "Padded":
        """These rows on ``device``."""
        return Padded(self.tokens_BL.to(device), self.attention_mask_BL.to(device), self.response_mask_BL.to(device))

    @property
    def sample_T(self) -> Tensor:
        """int64, the row of each response token."""
        return self.response_mask_BL.nonzero()[:, 0]

    def response_T(self, predictions_BM: Tensor) -> Tensor:
        """Values of the response tokens, flattened, from values per prediction, with gradient.

        `predictions_BM` is the output of `selected_logprobs` or `prediction_entropy`; [b, m] belongs to the token at
        m + 1. Raises ValueError if its shape is not [B, L - 1].
        """
        rows, length = self.tokens_BL.shape
        if predictions_BM.shape != (rows, length - 1):
            raise ValueError(
                f"predictions have shape {list(predictions_BM.shape)}, but these {rows} rows of {length} "
                f"tokens have [{rows}, {length - 1}]; leave out the prediction after the last token"
            )
        return predictions_BM[self.response_mask_BL[:, 1:]]


def pad_samples(prompts: Sequence[Tensor], responses: Sequence[Tensor], pad_id: int) -> Padded:
    """One right-padded row per sample: its prompt, its response, then `pad_id`.

    Args:
        prompts: 1-D token ids each, not empty: the last token predicts the first of the response.
        responses: 1-D token ids each, possibly empty.
        pad_id: any token id, also one that samples contain, such as end of sequence.

    Raises:
        ValueError: for an empty prompt, no samples, or different numbers of prompts and responses.
    """
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(f"got {len(prompts)} prompts and {len(responses)} responses; give one or more of each")
    for index, prompt in enumerate(prompts):
        if prompt.numel() == 0:
            raise ValueError(
                f"the prompt of sample {index} is empty, so nothing predicts its first response token; "
                "begin it with a BOS token"
            )
    rows = [torch.cat([prompt, response]).long() for prompt, response in zip(prompts, responses, strict=True)]
    tokens_BL = pad_sequence(rows, batch_first=True, padding_value=pad_id)
    column_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    ends_B1 = torch.tensor([[len(row)] for row in rows], device=tokens_BL.device)
    starts_B1 = torch.tensor([[len(prompt)] for prompt in prompts], device=tokens_BL.device)
    attention_mask_BL = column_L < ends_B1
    return Padded(tokens_BL, attention_mask_BL, attention_mask_BL & (column_L >= starts_B1))


def cut_by_tokens(lengths: Sequence[int], budget_tokens: int, *, padded: bool = True) -> list[list[int]]:
    """Split samples into consecutive micro-batches of at most `budget_tokens` tokens.

    The order is kept; sorting by length would bias which samples are trained first. A sample longer than the budget
    gets its own micro-batch.

    Args:
        lengths: tokens of each sample, prompt and response.
        budget_tokens: largest size of a micro-batch.
        padded: whether its size is rows x longest, or the sum of its lengths.

    Returns:
        Sample indices of each micro-batch.

    Raises:
        ValueError: if the budget is below 1 or a length is negative.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens is {budget_tokens}; it must be at least 1")
    micro_batches: list[list[int]] = []
    cost = longest = 0
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"the length of sample {index} is {length}; count its tokens, prompt and response")
        rows = len(micro_batches[-1]) + 1 if micro_batches else 1
        cost = rows * max(longest, length) if padded else cost + length
        if micro_batches and cost <= budget_tokens:
            micro_batches[-1].append(index)
            longest = max(longest, length)
        else:
            micro_batches.append([index])
            cost = longest = length
    return micro_batches
