"""The reward function model:DIR: its scores are those of the classifier, in batches of any sizes."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from flowrt.errors import ConfigError
from flowrt.rewards.check import check_rewards
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.reward_names import parse_function, with_paths
from flowrt.rewards.scoring import RewardScorer
from tests.proofs.chat_models import FAMILIES, chat_tokenizer

PROMPT = [{"role": "user", "content": "What is 1 + 1?"}]
RESPONSES = ["2", "It is two, of course.", "", "1 + 1 = 2", "no"]


def classifier(folder: Path, labels: int = 1) -> Path:
    """A small classifier with the tokenizer of a chat model."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=labels,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def outcomes(folder: Path, responses: list[str], prompt: object, batch_size: int) -> list[RewardOutcome]:
    async def score() -> list[RewardOutcome]:
        options = RewardOptions(functions=(f"model:{folder}",), batch_size=batch_size)
        scorer = RewardScorer(options, output=subprocess.DEVNULL)
        row = json.dumps({"prompt": prompt}).encode()
        try:
            async with asyncio.timeout(120):
                answers = await asyncio.gather(*(scorer.outcomes(response, row) for response in responses))
            return [answer[0] for answer in answers]
        finally:
            await scorer.close()

    return asyncio.run(score())


@pytest.mark.slow
def test_the_reward_is_the_score_of_the_classifier_in_any_batch(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "model")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), chat_tokenizer(FAMILIES["qwen"])
    expected = []
    for response in RESPONSES:
        messages = [*PROMPT, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        model.config.pad_token_id = next(token for token in (0, 1) if token != ids[-1])
        with torch.inference_mode():
            expected.append(float(model(torch.tensor([ids])).logits[0, 0]))
    for batch_size in (1, 8):
        results = outcomes(folder, RESPONSES, PROMPT, batch_size)
        assert [outcome.detail for outcome in results] == [""] * len(RESPONSES)
        assert [outcome.value for outcome in results] == pytest.approx(expected, abs=1e-5)
    long = outcomes(folder, ["2", "2 " * 200], PROMPT, 8)
    assert [outcome.result for outcome in long] == [Result.OK, Result.INVALID]
    assert "and the reward model takes 64" in long[1].detail


@pytest.mark.slow
@pytest.mark.parametrize("labels", [1, 3])
def test_a_model_that_gives_no_reward_is_refused(tmp_path: Path, labels: int) -> None:
    folder = classifier(tmp_path / "model", labels)
    message = "has 3 labels; a reward model has one"
    if labels == 1:  # a language model has no weights of a classifier
        config = json.loads((folder / "config.json").read_text())
        from safetensors.torch import load_file, save_file

        tensors = {
            name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name != "score.weight"
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        message = "lacks the weights score.weight: it is no sequence classifier"
    with pytest.raises(ConfigError, match=message):
        check_rewards(RewardOptions(functions=(f"model:{folder}",)), [json.dumps({"prompt": PROMPT}).encode()], print)


def test_a_reward_model_is_named_by_its_directory() -> None:
    function = parse_function("quality=model:some/dir:0.5")
    assert (function.name, function.kind, function.argument, function.weight) == ("quality", "model", "some/dir", 0.5)
    assert with_paths("quality=model:some/dir:0.5", lambda path: f"/root/{path}") == "quality=model:/root/some/dir:0.5"
    assert with_paths("2*model:dir", lambda path: f"/root/{path}") == "2*model:/root/dir"
    with pytest.raises(ConfigError, match="write model:DIR"):
        parse_function("model")
    with pytest.raises(ConfigError, match=r"there is no none/config\.json"):
        check_rewards(RewardOptions(functions=("model:none",)), [], print)
