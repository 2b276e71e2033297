"""The commands of a user of the installed wheel, and what each must do."""

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from common.first_run import write_model
from installed.environment import ROOT, Environment

SMALL = (
    *("--prompts-per-step", "4", "--group-size", "4", "--data.eval-prompts", "4"),
    *("--sft.steps", "20", "--sft.answer-only-steps", "5"),
)
OWN = (
    *("--model", "model", "--data", "rows.jsonl", "--data.eval-prompts", "4", "--rollout.max-new-tokens", "8"),
    *("--prompts-per-step", "4", "--group-size", "4", "--rollout.workers", "1"),
)
ROLES = ("source", "rollout", "reward", "reference")
ROWS = 40
WAIT_S = 300.0
POLL_S = 0.2
Found = TypeVar("Found")


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        words: the program and its arguments.
        code: its exit code.
        shows: a pattern in its output.
        writes: a path that exists afterwards.
    """

    words: tuple[str, ...]
    code: int = 0
    shows: str = ""
    writes: str = ""

    def fault(self, environment: Environment) -> str:
        """What is wrong; empty: nothing."""
        try:
            ended = environment.run(self.words)
        except subprocess.TimeoutExpired as error:
            return f"did not end within {error.timeout:.0f} s"
        lines = ended.stdout.strip().splitlines()
        if "Traceback (most recent call last)" in ended.stdout or ended.returncode != self.code:
            return f"exit code {ended.returncode}: {' | '.join(lines[-3:])}"
        if re.search(self.shows, ended.stdout, re.DOTALL) is None:
            return f"does not show {self.shows!r}: {' | '.join(lines[-3:])}"
        if not (environment.work / self.writes).exists():
            return f"wrote no {self.writes}"
        return ""


def case(line: str, *more: str, code: int = 0, shows: str = "", writes: str = "") -> Case:
    return Case((*line.split(), *more), code, shows, writes)


def extra(name: str, line: str, *more: str) -> Case:
    """A command that needs an extra, and names it."""
    return case(line, *more, code=2, shows=rf"pip install 'flowrt\[{name}\]'")


CASES = (
    case("flowrt run --steps 3 --checkpoint.every 2 --run-dir job", *SMALL, writes="job/run.html"),
    case("python -m flowrt resume job --steps 4", writes="job/checkpoints/step-000004"),
    case("flowrt samples job --worst 2 --tokens", shows="reward"),
    case("flowrt export job --html page.html", writes="page.html"),
    case("flowrt export job --perfetto trace.json", writes="trace.json"),
    case("flowrt export job --prometheus -", shows="flowrt_reward"),
    case("flowrt time job", shows="trainer"),
    case("flowrt ledger job", shows="trained"),
    case("flowrt replay job --at 1", shows="ends in"),
    case("flowrt status job", code=1, shows="has ended with exit code 0"),
    case("flowrt eval job --limit 2", shows="avg@"),
    case("flowrt doctor", shows="torch"),
    case("flowrt slurm site --partition gpu", writes="site/one_node.sbatch"),
    case("flowrt config gsm8k --data rows.jsonl", shows="rows.jsonl"),
    case("flowrt keys keys", writes="keys/controller.pub"),
    case("flowrt data check --model model --data rows.jsonl --data.eval-prompts 4", shows="stop tokens"),
    case("flowrt reward check --data rows.jsonl --data.eval-prompts 4 --reward exact", shows="exact"),
    case("flowrt run custom --reward exact --steps 2 --run-dir own", *OWN, writes="own/final/tokenizer_config.json"),
    case("python custom_loop.py", shows="paying arm"),
    case("python asyncflow_service.py", shows="paying arm"),
    case("python two_models.py", shows="paying arm"),
    case("python stream_dataset.py", shows="urgent first: True"),
    case("python custom_trainer.py --steps 2", *SMALL, shows="2 steps, mean reward"),
    case("python custom_rollout.py --steps 2 --model job/model --data.eval-prompts 4", shows="2 steps, mean reward"),
    case("flowrt run own_task.py --steps 2 --run-dir words --data.eval-prompts 4", writes="words/final"),
    case("flowrt run --algorithm own_algorithm.py:ShortReinforce --steps 2 --run-dir short", *SMALL),
    case("flowrt export job --exporter own_exporter.py:StepsCsv", writes="steps.csv"),
    extra("data", "flowrt run custom --model model --data rows.parquet --reward exact --run-dir refused"),
    extra("data", "flowrt samples job --parquet samples.parquet"),
    extra("math", "flowrt run custom --reward math --run-dir refused", *OWN),
    extra("lora", "flowrt run --trainer.engine fsdp --trainer.lora.rank 4 --run-dir refused"),
    extra("tensorboard", "flowrt export job --tensorboard board"),
    extra("tensorboard", "flowrt run --exporters tensorboard --run-dir refused"),
    extra("wandb", "flowrt export job --wandb"),
    extra("npu", "flowrt run --device npu --run-dir refused"),
    extra("tokenizers", "flowrt run custom --reward exact --run-dir refused2", *OWN, "--model", "sentences"),
    extra("tokenizers", "flowrt data check --model sentences --data rows.jsonl --data.eval-prompts 4"),
)


def prepare(work: Path) -> None:
    """Write a model, rows and copies of the examples, as a user has them."""
    write_model(work / "model")
    shutil.copytree(work / "model", work / "sentences", ignore=shutil.ignore_patterns("tokenizer*"))
    (work / "sentences" / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    wanted = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
    (work / "sentences" / "tokenizer_config.json").write_text(json.dumps(wanted))
    with (work / "rows.jsonl").open("w") as file:
        for n in range(ROWS):
            prompt = [{"role": "user", "content": f"What is {n} plus one?"}]
            file.write(json.dumps({"prompt": prompt, "answer": str(n + 1)}) + "\n")
    (work / "rows.parquet").write_bytes(b"PAR1")
    for example in (ROOT / "examples").glob("*.py"):
        shutil.copy(example, work)


def page(environment: Environment) -> str:
    """The fault of the page of a live run, of its status, and of its end by a signal."""
    words = ["flowrt", "run", "--steps", "100000", "--watch", "0", "--run-dir", "live", *SMALL]
    output = environment.work / "live.txt"
    with environment.start(words, output) as run:
        try:
            url = _within(lambda: _url(output), run)
            _within(lambda: (environment.work / "live" / "metrics.jsonl").is_file() or None, run)
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())  # the token becomes a cookie
            with browser.open(url, timeout=WAIT_S) as answer:
                html = answer.read().decode()
            faults = [Case(("flowrt", "status", "live"), shows="rollout").fault(environment)]
            faults.append("" if "<script" in html else "the page has no script")
            run.send_signal(signal.SIGINT)
            code = run.wait(WAIT_S)
            faults.append("" if code == 130 else f"exit code {code} after SIGINT")
        except (OSError, TimeoutError, subprocess.TimeoutExpired) as error:
            faults = [f"{error}: {output.read_text()[-500:]}"]
        finally:
            run.kill()
    return "; ".join(filter(None, faults))


def by_hand(environment: Environment) -> str:
    """The fault of a run whose processes a user starts: controller, workers, a trainer under torchrun."""
    flags = (*OWN, "--trainer.ranks", "2", "--steps", "2", "--reward", "exact")
    ended = environment.run(["flowrt", "config", "custom", *flags])
    if ended.returncode:
        return ended.stdout[-500:]
    (environment.work / "hand").mkdir()
    (environment.work / "hand" / "config.toml").write_text(ended.stdout)
    commands = {
        "controller": ["python", "-m", "flowrt.launcher.controller_main", "--config", "hand/config.toml"],
        "trainer": ["torchrun", "--nproc-per-node", "2", "-m", "flowrt.roles.trainer", "--controller", "hand"],
        **{role: ["flowrt", "worker", role, "--controller", "hand"] for role in ROLES},
    }
    outputs = {name: environment.work / f"hand-{name}.txt" for name in commands}
    started = {name: environment.start(words, outputs[name]) for name, words in commands.items()}
    try:
        codes = {name: process.wait(WAIT_S) for name, process in started.items()}
    except subprocess.TimeoutExpired as error:
        return f"{error}: {outputs['controller'].read_text()[-500:]}"
    finally:
        for process in started.values():
            process.terminate()
            process.wait()
    wrong = [name for name, code in codes.items() if code]
    return "".join(f"{name}: exit code {codes[name]}: {outputs[name].read_text()[-300:]} " for name in wrong)


def _url(output: Path) -> str | None:
    match = re.search(r"http://127\.0\.0\.1:\d+/\S+", output.read_text())
    return match[0] if match else None


def _within(value: Callable[[], Found | None], run: "subprocess.Popen[bytes]") -> Found:
    """Wait for a value. Raises TimeoutError if there is none in time, or the run has ended."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s and run.poll() is None:
        if (result := value()) is not None:
            return result
        time.sleep(POLL_S)
    raise TimeoutError("the run ended early, or showed no progress")


PROCESSES = {"flowrt run --watch, status": page, "controller, workers, torchrun": by_hand}
"""What takes several processes."""
