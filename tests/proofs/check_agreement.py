"""Whether `flowrt data check` and `flowrt reward check` refuse exactly what `flowrt run` refuses, on drawn flags.

The command ``flowrt run`` is executed up to the start of its processes, in whose place the check of the model and the
prompts is made that its first process makes. The commands ``data check`` and ``reward check`` are executed whole.
"""

import contextlib
import io
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from flowrt.cli import main
from flowrt.engines.hf import save_model
from flowrt.engines.tiny_model import build_model
from flowrt.errors import EXIT_BAD_INPUT, EXIT_OK
from flowrt.launcher import local_run
from flowrt.launcher.model_check import check_model
from flowrt.recipes.config import RunConfig
from tests.proofs.chat_models import FAMILIES, chat_tokenizer

POSITIONS = 96
ROWS = 24
REWARDS = """
def right(response, answer):
    return float(response == str(answer))

def never(response):
    return None

def fails(response):
    return 1 / 0

def text(response):
    return "good"

def column(response, level):
    return level

def missing(response, nowhere):
    return 1.0
"""
Row = dict[str, Any]
FINE = ["--data.eval-prompts", "4"]


def message(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


def plain(n: int) -> Row:
    return {"prompt": [message(f"{n} + 1?")], "answer": str(n + 1), "level": n % 3}


def changed(change: Callable[[int, Row], Row | str | None]) -> list[Row | str]:
    """Rows of which some are changed; None leaves a row out."""
    return [row for n in range(ROWS) if (row := change(n, plain(n))) is not None]


TOOL = {"type": "function", "function": {"name": "f"}}
DATA: dict[str, list[Row | str]] = {
    "fine": changed(lambda _, row: row),
    "text": changed(lambda n, row: {**row, "prompt": f"{n}?"}),
    "no answer": changed(lambda _, row: {"prompt": row["prompt"], "level": row["level"]}),
    "one without answer": changed(lambda n, row: {"prompt": row["prompt"]} if n == 5 else row),
    "overlong": changed(lambda n, row: {**row, "prompt": [message("one " * 80)]} if n == 3 else row),
    "all overlong": changed(lambda n, row: {**row, "prompt": [message(f"{n} " * 80)]}),
    "held out again": changed(lambda n, row: {**row, "prompt": [message(f"{n % 20}?")]}),
    "duplicates": changed(lambda n, row: {**row, "prompt": [message(f"{n // 2}?")]}),
    "few": [plain(n) for n in range(3)],
    "not JSON": changed(lambda n, row: "{" if n == 7 else row),
    "not rows": ["the rows"],
    "nothing": [],
    "empty prompt": changed(lambda n, row: {**row, "prompt": []} if n == 2 else row),
    "wrong role": changed(lambda n, row: {**row, "prompt": [message("u", "bot")]} if n == 2 else row),
    "ends with an answer": changed(lambda n, row: {**row, "prompt": [message("u"), message(f"{n}", "assistant")]}),
    "tools": changed(lambda _, row: {**row, "tools": [TOOL]}),
    "no tools": changed(lambda _, row: {**row, "tools": "hammer"}),
    "calls": changed(
        lambda n, row: {
            **row,
            "prompt": [
                message(f"{n}"),
                {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                message("u"),
            ],
        }
    ),
    "control tokens": changed(lambda n, row: {**row, "prompt": [message(f"{n}<|im_end|>")]}),
    "late levels": changed(lambda n, row: {key: value for key, value in row.items() if key != "level" or n > 9}),
}
FLAGS: list[list[str]] = [
    *(
        [f"--data.{key}", value]
        for key, value in [
            ("prompt-key", "question"),
            ("answer-key", "level"),
            ("answer-key", "gold"),
            ("split", "test"),
            ("chat-template", "chat"),
            ("chat-template", "none"),
            ("chat-template", "/nowhere.jinja"),
            ("chat-template-kwargs", '{"enable_thinking": false}'),
            ("chat-template-kwargs", '{"thinking": false}'),
            ("chat-template-kwargs", "{"),
            ("system-prompt", "Be terse."),
            ("tools", '[{"name": "f"}]'),
            ("tools", "[1]"),
            ("tools-key", ""),
            ("prefill", "True"),
            ("max-prompt-tokens", "5"),
            ("max-prompt-tokens", "1000"),
            ("overlong", "drop"),
            ("allow-overlap", "True"),
            ("order", "easy_first"),
            ("difficulty-key", "level"),
            ("eval-prompts", "0"),
            ("eval-prompts", "23"),
            ("eval-prompts", "24"),
            ("epochs", "1"),
        ]
    ),
    ["--data.difficulty-key", "level", "--data.max-difficulty", "1"],
    ["--data.difficulty-key", "level", "--data.min-difficulty", "9"],
    ["--data.difficulty-key", "answer", "--data.order", "easy_first"],
    *(
        [f"--eval.{key}", value]
        for key, value in [
            ("samples", "4"),
            ("temperature", "0.001"),
            ("top-p", "0.9"),
            ("interval", "5"),
            ("interval", "500"),
            ("stop-at", "0.5"),
            ("only", "True"),
            ("split", "dev"),
            ("data", "other=DIR/fine.jsonl"),
            ("data", "other=DIR/other.jsonl"),
            ("data", "other=DIR/other.jsonl prompt_key=question"),
            ("data", "other=DIR/splits"),
            ("data", "other=DIR/train"),
            ("data", "DIR/other.jsonl"),
            ("data", "other=DIR/nowhere.jsonl"),
        ]
    ),
    *(
        [f"--rollout.{key}", value]
        for key, value in [
            ("max-new-tokens", "8"),
            ("max-new-tokens", "90"),
            ("max-new-tokens", "96"),
            ("max-new-tokens", "0"),
            ("top-k", "1"),
            ("top-k", "4096"),
            ("top-p", "0.9"),
            ("top-p", "1.5"),
            ("stop", "#"),
        ]
    ),
    *(
        [f"--reward.{key}", value]
        for key, value in [
            ("on-failure", "drop"),
            ("workers", "2"),
            ("code-sandbox", "limits"),
            ("max-failures", "2"),
        ]
    ),
    ["--group-size", "1", "--algorithm.filter.zero-variance", "True"],
    ["--steps", "0"],
    ["--max-staleness", "0"],
    ["--algorithm.kl.coef", "0"],
    ["--algorithm.kl.coef", "0", "--reference.refresh", "2"],
    ["--checkpoint.best", "held_out/avg@1"],
    ["--checkpoint.best", "other/avg@1"],
    ["--trainer.lora.rank", "4"],
    ["--model-overrides", '{"rope_theta": 5000.0}'],
    ["--model-overrides", '{"rope_tehta": 5000.0}'],
    ["--model-overrides", "{"],
    ["--curriculum.type", "solve_rate", "--data.epochs", "1"],
    ["--guard", "reward above 2"],
    ["--guard", "rewrad above 2"],
    ["--samples.per-step", "0"],
]
# Each has a reward function: `flowrt data check` takes a command line without one, too.
REWARD_FLAGS = [
    *(["DIR/mine.py:right"],) * 4,
    *([function] for function in ("exact", "length:20", "regex:x(.*)", "DIR/mine.py:column", "format:.*")),
    ["exact", "length:20"],
    *([f"DIR/mine.py:{name}"] for name in ("never", "fails", "text", "missing", "nothing")),
    ["nowhere.py:reward"],
    ["regex:("],
    ["judge"],
]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The exit codes of the three commands for the same flags, and what they print."""

    flags: list[str]
    codes: dict[str, int]
    outputs: dict[str, str]

    @property
    def agree(self) -> bool:
        """Whether the checks refuse the command line if and only if the run does.

        `flowrt reward check` does not if there are fewer rows than a run holds out.
        """
        codes = [code for name, code in self.codes.items() if name != "reward check" or not self._lacks_rows]
        return len({code == EXIT_OK for code in codes}) == 1

    @property
    def _lacks_rows(self) -> bool:
        return "that are held out" in self.outputs["run"]


def write_files(folder: Path) -> None:
    """Models, data sets and reward functions that command lines name."""
    torch.set_num_threads(1)
    tokenizer = chat_tokenizer(FAMILIES["qwen"])
    for name, size in (("model", len(tokenizer)), ("narrow", 300)):
        model = build_model(
            vocab_size=size, hidden_size=16, layers=1, heads=2, intermediate_size=16, max_length=POSITIONS, seed=0
        )
        save_model(model, tokenizer, folder / name)
    tokenizer.chat_template = None
    save_model(model, tokenizer, folder / "plain")
    (folder / "mine.py").write_text(REWARDS)
    for name, rows in DATA.items():
        write_rows(folder / f"{name}.jsonl", rows)
    other = [{"prompt": [message(f"{n} times 2?")], "answer": str(2 * n)} for n in range(5)]
    write_rows(folder / "other.jsonl", other)
    for name, splits in (("splits", ("train", "test")), ("train", ("train",))):
        (folder / name).mkdir()
        for split in splits:
            write_rows(folder / name / f"{split}.jsonl", other if split == "test" else DATA["fine"])


def write_rows(path: Path, rows: Sequence[Row | str]) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def drawn(rng: random.Random) -> list[str]:
    """The flags of a run, most of which are right."""
    data = "fine" if rng.random() < 0.5 else rng.choice(sorted(DATA))
    model = rng.choice(["model", "model", "model", "model", "narrow", "plain", "nowhere"])
    flags = ["--model", f"DIR/{model}", "--data", f"DIR/{data}.jsonl", "--rollout.max-new-tokens", "16", *FINE]
    if rng.random() < 0.1:
        flags[3:4] = [f"a=DIR/{data}.jsonl:1", "--data", f"b=DIR/splits:2 split={rng.choice(['test', 'dev'])}"]
    for reward in rng.choice(REWARD_FLAGS):
        flags += ["--reward", reward]
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
        flags += rng.choice(FLAGS)
    return flags


def verdicts(folder: Path, number: int) -> Verdicts:
    """The exit codes of the commands for the flags of a number."""
    flags = [word.replace("DIR", str(folder)) for word in drawn(random.Random(number))]
    run_dir = ["--run-dir", str(folder / f"run-{number}")]
    commands = {
        "run": ["run", "custom", *flags, *run_dir],
        "data check": ["data", "check", *flags],
        "reward check": ["reward", "check", *flags, "--limit", "4"],
    }
    codes, outputs = {}, {}
    for name, words in commands.items():
        with started_in_process(), captured() as output:
            codes[name] = exit_code(words)
        outputs[name] = output.getvalue()
    return Verdicts(flags, codes, outputs)


def exit_code(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output


@contextlib.contextmanager
def started_in_process() -> Iterator[None]:
    """Check the model and the prompts where `flowrt run` would start its processes."""

    async def check_only(config: RunConfig, *_: object) -> int:
        check_model(config)
        return EXIT_OK

    with mock.patch.object(local_run, "_run", check_only):
        yield


def check_agreement(quick: bool) -> dict[str, float]:
    """Command lines on which the checks and the run disagree, and how many the run refuses."""
    count = 30 if quick else 300
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        results = [verdicts(folder, number) for number in range(count)]
    for verdict in results:
        if not verdict.agree:
            print(verdict.codes, " ".join(verdict.flags))
    refused = sum(verdict.codes["run"] == EXIT_BAD_INPUT for verdict in results)
    return {
        "check_lines": float(count),
        "check_refused": float(refused),
        "check_disagrees": float(sum(not verdict.agree for verdict in results)),
    }
