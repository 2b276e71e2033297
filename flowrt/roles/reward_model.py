"""The reward function ``model:DIR``: the score that a sequence classifier of Hugging Face gives a conversation.

The conversation is the prompt and the response: in the chat template of the classifier, or, if it has none, the text of
the prompt followed by that of the response. Nothing is downloaded, and no code of a checkpoint is run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowrt.engines.hf import load_classifier
from flowrt.rewards.call_forms import CallForm, RewardSample
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.rows import decode_row
from flowrt.rewards.user_file import outcome_of
from flowrt.runtime.user_module import Unusable, cut

MOST_TOKENS = 1 << 24
"""Lengths of `model_max_length` above it stand for no limit."""


class RewardModel:
    """A loaded classifier. It scores the samples of a call in one forward pass."""

    form = CallForm("batch")

    def __init__(self, directory: str, device: str) -> None:
        """Load the classifier; ``device`` as torch names it. Raises Unusable if it cannot be used as a reward model."""
        name = f"the reward model {directory}"
        try:
            self._device = torch.device(device)
            dtype: Any = torch.float32 if self._device.type == "cpu" else "auto"
            model, missing, self._tokenizer = load_classifier(directory, dtype)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise Unusable(f"{name} cannot be loaded: {cut(str(error))}") from None
        if model.config.num_labels != 1:
            raise Unusable(f"{name} has {model.config.num_labels} labels; a reward model has one, the reward")
        if missing:
            raise Unusable(f"{name} lacks the weights {cut(', '.join(missing))}: it is no sequence classifier")
        try:
            self._model = model.eval().to(self._device)
        except (RuntimeError, AssertionError) as error:
            raise Unusable(f"{name} cannot be put on reward.model_device {device}: {cut(str(error))}") from None
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS
        most = self._tokenizer.model_max_length
        self._most = min(positions, most if most < MOST_TOKENS else positions)
        self([RewardSample("1", b'{"prompt": "1"}')])  # takes the memory of a first pass before it is limited

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """The score of each sample. Raises Unusable for messages without a chat template."""
        rows = [self._ids(sample.response, decode_row(sample.row)) for sample in samples]
        fitting = [place for place, ids in enumerate(rows) if 0 < len(ids) <= self._most]
        scores = dict(zip(fitting, self._scores([rows[place] for place in fitting]) if fitting else (), strict=True))
        return [
            outcome_of(scores[place], 0)
            if place in scores
            else RewardOutcome(
                Result.INVALID,
                detail=f"the conversation has {len(ids)} tokens, and the reward model takes {self._most}",
            )
            for place, ids in enumerate(rows)
        ]

    async def call_async(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        return self(samples)

    def _ids(self, response: str, row: Mapping[str, Any]) -> list[int]:
        """The token ids of a conversation. The response has a prefilled beginning of the turn, too."""
        prompt, tokenizer = row.get("prompt"), self._tokenizer
        if not tokenizer.chat_template:
            if isinstance(prompt, list):
                raise Unusable("the prompt is messages, and the reward model has no chat template")
            return list(tokenizer(f"{prompt}{response}")["input_ids"])
        messages = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        if messages and messages[-1]["role"] == "assistant":
            messages.pop()
        messages.append({"role": "assistant", "content": response})
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))

    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        longest, pad = max(map(len, rows)), self._pad(rows)
        ids_NT = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in rows], device=self._device)
        mask_NT = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows], device=self._device)
        # A decoder's score is that of its last token, which the model finds as the last one that is no padding.
        for config in (self._model.config, self._model.config.get_text_config()):
            config.pad_token_id = pad
        with torch.inference_mode():
            scores_N = self._model(input_ids=ids_NT, attention_mask=mask_NT).logits[:, 0]
        scores: list[float] = scores_N.float().tolist()
        return scores

    def _pad(self, rows: Sequence[list[int]]) -> int:
        """The padding token: the tokenizer's, unless it also ends texts; then one that ends no row."""
        own = self._tokenizer.pad_token_id
        if own is not None and own != self._tokenizer.eos_token_id:
            return int(own)
        last = {ids[-1] for ids in rows}
        return next(token for token in range(len(last) + 1) if token not in last)
