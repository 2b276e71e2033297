"""Build the embedded model of a run, before its workers start: tokenizer, random weights, warm start, checkpoint."""

import argparse
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from flowrt.engines.build import BARE_LOOK_EVERY, LOOK_EVERY, Lesson, Phase, build_model, warm_start
from flowrt.engines.build import wrap_tokenizer as wrap
from flowrt.engines.checkpoint import save_model
from flowrt.engines.protocols import Prompt, Response
from flowrt.engines.seeds import sample_seed
from flowrt.errors import EXIT_BAD_INPUT, FlowError
from flowrt.lock import RunLock
from flowrt.recipes.config import RunConfig
from flowrt.recipes.load import from_toml
from flowrt.recipes.paths import model_dir
from flowrt.recipes.problems import Problem, Subject
from flowrt.recipes.subjects import subject

log = logging.getLogger("flowrt")


def prepare(config: RunConfig) -> None:
    """Write the checkpoint that the run starts from into its directory."""
    RunLock(Path(config.run_dir))  # until this process ends
    torch.set_num_threads(config.threads)
    start_s = time.monotonic()
    subject_ = subject(config)
    tokenizer = wrap(subject_.tokenizer())
    build = config.build
    model = build_model(
        vocab_size=len(tokenizer),
        hidden_size=build.hidden_size,
        layers=build.layers,
        heads=build.heads,
        intermediate_size=build.intermediate_size,
        max_length=build.max_length,
        seed=config.seed,
    )
    school = School(config, subject_, tokenizer)
    warm = config.warm_start
    looks = warm_start(
        model,
        school.phases(),
        school.mean_reward,
        school.probes(),
        batch=warm.batch,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=config.seed,
    )
    for step, reward in looks:
        log.info("warm start, step %d: mean reward %.3f", step, reward)
    save_model(model, tokenizer, model_dir(config))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info("%d parameters ready after %.1f s", parameters, time.monotonic() - start_s)


class School:
    """Lessons and probes of the warm start, as tokens."""

    def __init__(self, config: RunConfig, subject_: Subject, tokenizer: Any) -> None:
        self._config = config
        self._subject = subject_
        self._tokenizer = tokenizer
        rng = random.Random(f"probes {config.seed}")
        problems = list(subject_.training_problems())
        self._probes = rng.sample(problems, min(config.warm_start.probes, len(problems)))

    def phases(self) -> list[Phase]:
        warm = self._config.warm_start
        worked = Phase(
            warm.steps,
            first_look=max(warm.steps // 3, 1),
            look_every=LOOK_EVERY,
            lr=warm.lr,
            lesson=lambda rng: self._lesson(self._subject.lesson(rng, bare=False)),
            done=lambda reward: reward >= warm.until,
        )
        bare = Phase(
            warm.bare_steps,
            first_look=BARE_LOOK_EVERY,
            look_every=BARE_LOOK_EVERY,
            lr=warm.bare_lr,
            lesson=lambda rng: self._lesson(self._subject.lesson(rng, bare=True)),
            done=lambda reward: reward <= warm.bare_until,
        )
        return [worked, bare]

    def probes(self) -> list[Prompt]:
        return [
            Prompt(index, self._ids(problem.prompt), sample_seed(self._config.seed, index, 0, 0, 0))
            for index, problem in enumerate(self._probes)
        ]

    def mean_reward(self, responses: list[Response]) -> float:
        total = 0.0
        for response in responses:
            ids = response.tokens.tolist()
            text = self._tokenizer.decode(ids, skip_special_tokens=True) if ids[-1] == 1 else ""
            total += self._subject.reward(text, self._probes[response.key].answer)
        return total / len(responses)

    def _lesson(self, problem: Problem) -> Lesson:
        end = torch.tensor([self._tokenizer.eos_token_id], dtype=torch.int32)
        limit = self._config.rollout.max_new_tokens
        response = torch.cat([self._ids(problem.solution), end])
        return Lesson(self._ids(problem.prompt), response[:limit])

    def _ids(self, text: str) -> torch.Tensor:
        return torch.tensor(self._tokenizer(text)["input_ids"], dtype=torch.int32)


def main() -> int:
    parser = argparse.ArgumentParser(description="build the embedded model of a run")
    parser.add_argument("--config", required=True, help="the run's config.toml")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        prepare(from_toml(Path(arguments.config).read_text()))
    except FlowError as error:
        log.error("%s", error)
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
