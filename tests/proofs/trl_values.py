"""Losses and gradients by TRL's own GRPO loss; runs in the environment that has TRL and imports nothing of flowrt.

python tests/proofs/trl_values.py REQUESTS.json VALUES.json

REQUESTS.json maps names to requests, VALUES.json the same names to losses and gradients. A request without a model has
log-probabilities, on which the loss of TRL is called directly, without a forward pass. A request with a model has
prompts and responses, and the loss is computed through TRL's trainer, with its public options.
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
    """Rows of different lengths as one tensor [rows, longest], with ``fill`` on the right, or on the left."""
    longest = max(map(len, rows))
    blanks = [[fill] * (longest - len(row)) for row in rows]
    return torch.tensor([b + r if left else r + b for b, r in zip(blanks, rows, strict=True)], dtype=dtype)


def mask_of(rows: list[list[Any]], *, left: bool = False) -> Tensor:
    """1 for the tokens of the rows and 0 for padding [rows, longest], as `padded`."""
    return padded([[1] * len(row) for row in rows], torch.long, left=left)


def columns(request: dict[str, Any], rows: list[list[Any]]) -> dict[str, Any]:
    """The inputs of TRL's loss besides the trained policy's log-probabilities, by TRL's names."""
    inputs: dict[str, Any] = {
        "completion_mask": mask_of(rows),
        "advantages": torch.tensor(request["advantages"], dtype=torch.float64),
        "num_items_in_batch": torch.tensor(sum(map(len, rows))),
        "old_per_token_logps": padded(request["anchor"], torch.float64),
        "sampling_per_token_logps": padded(request["rollout"], torch.float64),
        "ref_per_token_logps": padded(request["reference"], torch.float64),
    }
    if request.get("importance"):
        inputs["importance_sampling_ratio"] = padded(request["importance"], torch.float64)
    return inputs


def flat(gradient: Tensor | None, like: list[list[float]]) -> list[float]:
    """The elements of a padded gradient at the tokens of the rows ``like``, in order; zeros for None."""
    if gradient is None:
        return [0.0 for row in like for _ in row]
    return [float(value) for row, values in zip(gradient, like, strict=True) for value in row[: len(values)]]


def loss_of_tokens(request: dict[str, Any], trainer_class: Any) -> dict[str, Any]:
    """TRL's loss of given log-probabilities, and its gradients by them and by the entropies.

    A plain object with the attributes that the loss reads takes the place of TRL's trainer.
    """
    settings = {**DEFAULTS, **request["settings"]}
    logprobs = padded(request["logprobs"], torch.float64).requires_grad_()
    entropies = padded(request["entropy"], torch.float64).requires_grad_()
    accelerator = SimpleNamespace(
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, **_: tensor,
        pad_across_processes=lambda tensor, **_: tensor,
        num_processes=1,
        sync_gradients=True,
    )
    trainer_stub = SimpleNamespace(
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
        use_vllm=bool(request.get("importance")),
        vllm_importance_sampling_correction=bool(request.get("importance")),
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
        accelerator=accelerator,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropies, None),
    )
    trainer_stub.get_high_entropy_mask = lambda *arguments: trainer_class.get_high_entropy_mask(
        trainer_stub, *arguments
    )
    ids = mask_of(request["logprobs"])
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids}
    loss = trainer_class._compute_loss(trainer_stub, None, inputs | columns(request, request["logprobs"]))
    slopes = torch.autograd.grad(loss, [logprobs, entropies], allow_unused=True)
    return {
        "loss": float(loss.detach()),
        "gradient": flat(slopes[0], request["logprobs"]),
        "entropy_gradient": flat(slopes[1], request["entropy"]),
    }


def tokenizer(vocabulary: int) -> Any:
    """A tokenizer with this number of tokens, which TRL's trainer requires; no text is tokenized with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(vocabulary)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")), pad_token="w0", eos_token="w1"
    )


def loss_of_model(request: dict[str, Any], trainer_class: Any) -> dict[str, Any]:
    """TRL's loss of a model in float64, through its trainer, and the flat gradient of all parameters in their order."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig

    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float64)
    rows = len(request["responses"])
    with tempfile.TemporaryDirectory(prefix="trl-") as out:
        trainer = trainer_class(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=out,
                per_device_train_batch_size=rows,
                num_generations=rows,
                temperature=request["temperature"],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_dropout=True,
                report_to=[],
                disable_tqdm=True,
                **{**DEFAULTS, **request["settings"]},
            ),
            train_dataset=Dataset.from_dict({"prompt": ["w3"] * rows}),
            processing_class=tokenizer(model.config.vocab_size),
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        inputs = {
            "prompt_ids": padded(request["prompts"], torch.long, left=True, fill=PAD),
            "prompt_mask": mask_of(request["prompts"], left=True),
            "completion_ids": padded(request["responses"], torch.long, fill=PAD),
        }
        loss = trainer._compute_loss(trainer.model, inputs | columns(request, request["responses"]))
    loss.backward()
    slopes = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in trainer.model.parameters()
    ]
    return {"loss": float(loss.detach()), "gradient": torch.cat([slope.flatten() for slope in slopes]).tolist()}


def main(requests: Path, values: Path) -> None:
    """Compute all requests of a file and write the values to another."""
    from trl import GRPOTrainer

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    wanted: dict[str, dict[str, Any]] = json.loads(requests.read_text())
    content = {
        name: loss_of_model(request, GRPOTrainer) if "model" in request else loss_of_tokens(request, GRPOTrainer)
        for name, request in wanted.items()
    }
    values.write_text(json.dumps(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
