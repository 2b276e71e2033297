"""A pretrained model learns to name the larger of two numbers: flowrt run examples/larger_number.py --model DIR.

The model continues a text that has one solved line, and a response ends with its line. Made for Gemma 3 270M, which
starts with four in ten right (scripts/install_gemma writes it where no hub can be reached): 14 minutes on two cores.
"""

from random import Random

from flowrt.tasks import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    Example,
    KlConfig,
    Recipe,
    RolloutConfig,
    RunConfig,
    Task,
    TrainerConfig,
)

EXAMPLE = "The larger of 355 and 274 is 355\n"


class LargerNumber(Task):
    def __init__(self, config: RunConfig) -> None:
        draw = Random(config.seed)
        pairs = [draw.sample(range(100, 1000), 2) for _ in range(config.data.eval_prompts + 2000)]
        unique = {f"{EXAMPLE}The larger of {a} and {b} is": str(max(a, b)) for a, b in pairs}
        examples = [Example(prompt, answer, answer) for prompt, answer in unique.items()]
        self._held_out, self._training = examples[: config.data.eval_prompts], examples[config.data.eval_prompts :]

    def training_problems(self) -> list[Example]:
        return self._training

    def held_out_problems(self) -> list[Example]:
        return self._held_out

    def reward(self, response: str, answer: str) -> float:
        return float(response.strip() == answer)


RECIPE = Recipe(
    "the larger of two numbers, by a pretrained model: --model DIR",
    RunConfig(
        steps=40,
        prompts_per_step=8,
        group_size=8,
        data=DataConfig(chat_template="none", eval_prompts=64),
        eval=EvalConfig(at_start=True, at_end=True),
        rollout=RolloutConfig(workers=1, max_running_requests=64, max_new_tokens=6, stop=("\n",)),
        algorithm=AlgorithmConfig(kl=KlConfig(coef=0.0)),
        trainer=TrainerConfig(lr=2e-6, warmup_steps=3, micro_batch_tokens=1024),
    ),
    LargerNumber,
)
