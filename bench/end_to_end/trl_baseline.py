"""TRL's GRPO trainer with the settings of `compare_trl.py`; runs with a Python that has TRL, without flowrt.

python bench/end_to_end/trl_baseline.py ORDERS.json      its last line is JSON with rewards and ends of steps

Generation is by transformers, as TRL does it without a server; the loss is GRPO with the same clips, no reference.
"""

import json
import logging
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_DISABLED="true")


def settings(orders: dict[str, Any]) -> Any:
    """The settings as a GRPOConfig; a batch has whole groups, with one optimiser step for each generation."""
    from trl import GRPOConfig

    samples = orders["prompts_per_step"] * orders["group_size"]
    return GRPOConfig(
        output_dir=orders["out"],
        max_steps=orders["steps"],
        per_device_train_batch_size=samples,
        num_generations=orders["group_size"],
        max_completion_length=orders["max_new_tokens"],
        learning_rate=orders["lr"],
        adam_beta2=orders["beta2"],
        warmup_steps=orders["warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        epsilon=orders["clip_low"],
        epsilon_high=orders["clip_high"],
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        seed=orders["seed"],
        use_cpu=True,
        torch_compile=orders["compile"],
        bf16=orders["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    logging.disable(logging.WARNING)
    torch.set_num_threads(orders["threads"])
    tokenizer = AutoTokenizer.from_pretrained(orders["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(orders["model"], dtype=torch.float32)
    ends_s: list[float] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends_s.append(time.monotonic())

    score = runpy.run_path(orders["reward"])["reward"]

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scored = [float(score(text, wanted)) for text, wanted in zip(completions, answer, strict=True)]
        rewards.append(sum(scored) / len(scored))
        return scored

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(orders),
        train_dataset=Dataset.from_list(orders["problems"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    print(json.dumps({"rewards": rewards, "ends_s": ends_s}), flush=True)


if __name__ == "__main__":
    main()
