"""Losses and gradients by TRL's own GRPO loss; runs with the Python that has TRL, needs nothing of flowrt.

python bench/objectives_rows/trl_values.py ORDERS.json VALUES.json

An order of tokens has log-probabilities: the loss of TRL is called on them as they are, without its forward pass. An
order of a model has prompts and responses, and goes through TRL's trainer as a user makes it.
"""

import json
import logging
import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_DISABLED="true", TQDM_DISABLE="1")

import torch
from torch import Tensor

PAD, END = 0, 1
DEFAULTS: dict[str, Any] = {"loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "importance_sampling_level": "token"}


def padded(rows: list[list[Any]], dtype: torch.dtype, *, left: bool = False, fill: float = 0) -> Tensor:
    """Rows of different lengths as one tensor."""
    longest = max(map(len, rows))
    blanks = [[fill] * (longest - len(row)) for row in rows]
    return torch.tensor([b + r if left else r + b for b, r in zip(blanks, rows, strict=True)], dtype=dtype)


def mask_of(rows: list[list[Any]], *, left: bool = False) -> Tensor:
    return padded([[1] * len(row) for row in rows], torch.long, left=left)


def columns(order: dict[str, Any], rows: list[list[Any]]) -> dict[str, Any]:
    """What TRL's loss reads besides the present log-probabilities, by its names."""
    inputs: dict[str, Any] = {
        "completion_mask": mask_of(rows),
        "advantages": torch.tensor(order["advantages"], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(sum(map(len, rows))),
        "old_per_token_logps": padded(order["anchor"], torch.float64),
        "sampling_per_token_logps": padded(order["rollout"], torch.float64),
        "ref_per_token_logps": padded(order["reference"], torch.float64),
    }
    if order.get("importance"):
        inputs["importance_sampling_ratio"] = padded(order["importance"], torch.float64)
    return inputs


def flat(gradient: Tensor | None, like: list[list[float]]) -> list[float]:
    """The gradient by each token of the rows, without their padding."""
    if gradient is None:
        return [0.0 for row in like for _ in row]
    return [float(value) for row, values in zip(gradient, like, strict=True) for value in row[: len(values)]]


def of_tokens(order: dict[str, Any], trainer_class: Any) -> dict[str, Any]:
    """TRL's loss of given log-probabilities, with an object in place of its trainer."""
    settings = {**DEFAULTS, **order["settings"]}
    logprobs = padded(order["logprobs"], torch.float64).requires_grad_()
    entropies = padded(order["entropy"], torch.float64).requires_grad_()
    one = SimpleNamespace(
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, **_: tensor,
        pad_across_processes=lambda tensor, **_: tensor,
        num_processes=1,
        sync_gradients=True,
    )
    this = SimpleNamespace(
        loss_type=settings["loss_type"],
        beta=settings["beta"],
        epsilon_low=settings["epsilon"],
        epsilon_high=settings.get("epsilon_high", settings["epsilon"]),
        importance_sampling_level=settings["importance_sampling_level"],
        max_completion_length=settings.get("max_completion_length", 1),
        top_entropy_quantile=settings.get("top_entropy_quantile", 1.0),
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        entropy_coef=settings.get("entropy_coef", 0.0),
        _entropy_bonus_enabled=bool(settings.get("entropy_coef")),
        use_adaptive_entropy=False,
        use_vllm=bool(order.get("importance")),
        vllm_importance_sampling_correction=bool(order.get("importance")),
        args=SimpleNamespace(
            delta=settings.get("delta"),
            use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
        accelerator=one,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
    )
    this.get_high_entropy_mask = lambda *arguments: trainer_class.get_high_entropy_mask(this, *arguments)
    ids = mask_of(order["logprobs"])
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids}
    loss = trainer_class._compute_loss(this, None, inputs | columns(order, order["logprobs"]))
    slopes = torch.autograd.grad(loss, [logprobs, entropies], allow_unused=True)
    return {
        "loss": float(loss.detach()),
        "gradient": flat(slopes[0], order["logprobs"]),
        "entropy_gradient": flat(slopes[1], order["entropy"]),
    }


def tokenizer(vocabulary: int) -> Any:
    """One that TRL accepts; it is never used."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(vocabulary)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")), pad_token="w0", eos_token="w1"
    )


def of_model(order: dict[str, Any], trainer_class: Any) -> dict[str, Any]:
    """TRL's loss of a model in float64, through its trainer, and the gradient of all parameters in their order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig

    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float64)
    rows = len(order["responses"])
    with tempfile.TemporaryDirectory(prefix="trl-") as out:
        trainer = trainer_class(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=out,
                per_device_train_batch_size=rows,
                num_generations=rows,
                temperature=order["temperature"],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_dropout=True,
                report_to=[],
                disable_tqdm=True,
                **{**DEFAULTS, **order["settings"]},
            ),
            train_dataset=Dataset.from_dict({"prompt": ["w3"] * rows}),
            processing_class=tokenizer(model.config.vocab_size),
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        inputs = {
            "prompt_ids": padded(order["prompts"], torch.long, left=True, fill=PAD),
            "prompt_mask": mask_of(order["prompts"], left=True),
            "completion_ids": padded(order["responses"], torch.long, fill=PAD),
        }
        loss = trainer._compute_loss(trainer.model, inputs | columns(order, order["responses"]))
    loss.backward()
    slopes = [torch.zeros_like(one) if one.grad is None else one.grad for one in trainer.model.parameters()]
    return {"loss": float(loss.detach()), "gradient": torch.cat([slope.flatten() for slope in slopes]).tolist()}


def main(orders: Path, values: Path) -> None:
    from trl import GRPOTrainer

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    wanted: dict[str, dict[str, Any]] = json.loads(orders.read_text())
    found = {
        name: of_model(order, GRPOTrainer) if "model" in order else of_tokens(order, GRPOTrainer)
        for name, order in wanted.items()
    }
    values.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
