"""Fuzzing of the ``flowrt`` command: random arguments, configurations, data, rewards and models, a process for each.

python scripts/fuzz_cli.py --draws 2000 --seed 1 --json RESULT.json     every failing command line is printed
python scripts/fuzz_cli.py --seed 1 --only 17 --keep                    one of them again; its directory stays

A draw fails if it prints or logs a traceback; is idle at its deadline without a step or an end; exits with a code other
than 0, 1, 2, 3 and 130; or leaves a process, a temporary file, or (with exit code 2) any file. The configuration of
every draw is first passed to ``flowrt config``. Of those that are accepted, only a share (``--runs``) is started as a
run, which is interrupted after its first step.
"""

import argparse
import atexit
import contextlib
import dataclasses
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

# Loaded once, before any draw is forked.
from flowrt import cli
from flowrt.recipes.algorithms import PRESETS
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import defaults, to_toml

RIGHT_CODES = (0, 1, 2, 3, 130)
TOKEN = "FUZZ_CLI_DRAW"  # noqa: S105
REFUSED_S = 45.0
"""Time limit of a command that starts no run."""
STEP_S = 150.0
"""Time limit of a run, until its first step or its end."""
END_S = 60.0
"""Time limit of an interrupted run, until its end."""
GONE_S = 10.0
"""Time limit of processes after the end of the command."""
CPU_WINDOW_S = 6.0
COMPUTING = 0.15
"""Share of a core above which processes without a step are slow, not hung."""
MOST_MEMORY = 12 << 30
MOST_FILE = 256 << 20
BAD_WORDS = (
    "Traceback (most recent call last)",
    "Exception ignored in",
    "Fatal Python error",
    "Task exception was never",
)
SMALL = {
    "steps": "2",
    "prompts-per-step": "2",
    "group-size": "2",
    "threads": "1",
    "rollout.workers": "1",
    "data.eval-prompts": "0",
    "checkpoint.every": "0",
    "run-dir": "run",
}

INTEGERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "1000000",
    str(2**31),
    str(2**63),
    str(2**64),
    str(-(2**63)),
    "1_000",
    "+1",
    "0x10",
)
NUMBERS = ("nan", "inf", "-inf", "1e308", "-1e308", "1e-308", "0.0", "-0.0", "1.5", "1e9", "1e400")
WORDS = (
    "",
    " ",
    "x",
    "None",
    "true",
    "False",
    "[]",
    "{}",
    "é",
    "日本語",
    "\U0001f4a5",
    "a\nb",
    "\x1b[31mred",
    "\x07\x08",
    "[red]x[/x]",
    "[/]",
    ":smile:",
    "%s%n",
    "$HOME",
    "'",
    '"',
    "\\",
    "-",
    "--",
    "--steps",
    "=",
    "a" * 5000,
    "../..",
    "\u202eabc",
    b"\xff\xfe",
    b"caf\xe9",
)
PATHS = (
    "there",
    "there/",
    "file",
    "file/below",
    "fifo",
    "missing",
    "missing/below",
    "locked",
    "loop",
    "broken-link",
    "/dev/null",
    "/dev/full",
    "/dev/zero",
    "/proc/self/mem",
    "/proc/1/root/x",
    "[red]x[/x]",
    "a\nb",
    "é",
    "n" * 300,
    "/".join(["d" * 200] * 30),
    "~",
    "file:reward",
    "reward.py",
    "reward.py:reward",
    "rows.jsonl",
    b"\xff",
    " ",
    "",
)
ADDRESSES = (
    "tcp://127.0.0.1:1",
    "tcp://127.0.0.1:0",
    "tcp://127.0.0.1:99999",
    "tcp://127.0.0.1:-1",
    "tcp://",
    "tcp://[::1",
    "tcp://host[red]:1",
    "ipc://x",
    "inproc://x",
    "127.0.0.1:1",
    ":",
    "://",
    "tcp://é:1",
    "tcp://*:0",
    "udp://127.0.0.1:1",
    "tcp://127.0.0.1:1;tcp://127.0.0.1:2",
    "tcp://" + "a" * 3000 + ":1",
)
PATH_KEYS = {
    "data.path",
    "reward",
    "model",
    "run_dir",
    "trainer.final_dir",
    "controller.keys",
    "rollout.sglang.python",
    "rollout.sglang.stage",
}
ADDRESS_KEYS = {"controller.bind", "controller.host", "rollout.sglang.url"}
Word = str | bytes


@dataclass
class Draw:
    """One command with its arguments."""

    words: list[Word]
    kind: str
    is_run: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        return " ".join(shlex.quote(os.fsencode(word).decode("utf-8", "backslashreplace")) for word in self.words)


@dataclass
class Outcome:
    """How one command ended."""

    code: int | None
    seconds: float
    stepped: bool
    slow: bool
    hung: bool
    left: list[str]
    output: str


# ---- what is drawn


def leaves(kind: type[Any] = RunConfig, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of the configuration with its type."""
    for name, hint in get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{path}{name}.")  # type: ignore[arg-type]
        else:
            yield f"{path}{name}", hint


KEYS = dict(leaves())


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def hostile(rng: random.Random, key: str) -> Word:
    """A value for a key, mostly of the key's type."""
    if rng.random() < 0.12:
        return rng.choice(WORDS)
    if key in PATH_KEYS:
        return rng.choice(PATHS)
    if key in ADDRESS_KEYS:
        return rng.choice(ADDRESSES)
    hint = KEYS[key]
    if get_origin(hint) is Literal:
        return rng.choice([*map(str, get_args(hint)), "", "x"])
    if hint is bool:
        return rng.choice(["True", "False", "true", "0", "maybe", ""])
    if hint is int:
        return rng.choice(INTEGERS if rng.random() < 0.8 else NUMBERS)
    if hint is float:
        return rng.choice(NUMBERS if rng.random() < 0.7 else INTEGERS)
    return rng.choice(WORDS)


def run_words(rng: random.Random, model: Path, changes: Mapping[str, Word], recipe: str = "") -> list[Word]:
    """``flowrt run`` of a small run with these flags changed."""
    flags: dict[str, Word] = {**SMALL, "model": str(model), **changes}
    words: list[Word] = ["run", *([recipe] if recipe else [])]
    for name, value in flags.items():
        if rng.random() < 0.2 and isinstance(value, str):
            words.append(f"--{name}={value}")
        else:
            words += [f"--{name}", value]
    return words


def own(rng: random.Random, model: Path, changes: Mapping[str, Word]) -> list[Word]:
    given: dict[str, Word] = {
        "data.path": "rows.jsonl",
        "reward": "reward.py:reward",
        "rollout.max-new-tokens": "8",
    }
    if "data" in changes:  # data sets, in place of the path
        del given["data.path"]
    return run_words(rng, model, {**given, **changes}, "custom")


def draw_flags(rng: random.Random, place: "Place") -> Draw:
    keys = rng.sample(sorted(KEYS), rng.choice([1, 1, 1, 2, 3]))
    changes = {key.replace("_", "-"): hostile(rng, key) for key in keys}
    make = own if rng.random() < 0.25 else run_words
    words = make(rng, place.model, changes)
    for _ in range(rng.random() < 0.15):  # a flag twice, a value missing, a word too many
        at = rng.randrange(1, len(words) + 1)
        words[at:at] = rng.choice([["--steps", "3"], ["--steps"], [rng.choice(WORDS)], ["--unknown", "1"], ["--help"]])
    if rng.random() < 0.05:
        words.pop()
    return Draw(words, "flags", is_run=True)


def toml_value(rng: random.Random) -> str:
    return rng.choice(
        [
            "0",
            "-1",
            "1",
            "2.5",
            "nan",
            "inf",
            "-inf",
            "1e308",
            str(2**63),
            str(2**64),
            "9" * 5000,
            "true",
            '""',
            '"x"',
            '"\\u0000"',
            '"[red]"',
            '"\\u001b[31m"',
            "'''\n'''",
            "[]",
            "[1, 'x']",
            "{}",
            "{a = 1}",
            "1979-05-27T07:32:00Z",
            "1979-05-27",
            "07:32:00",
            f'"{"a" * 100000}"',
            "0x7fffffffffffffff",
            "1e400",
            '"é"',
            "",
            "=",
            '"',
        ]
    )


def draw_toml(rng: random.Random, place: "Place") -> Draw:
    base = dataclasses.replace(defaults(rng.choice(["arithmetic", "custom", "gsm8k"])), steps=2, model=str(place.model))
    text = to_toml(dataclasses.replace(base, run_dir="run"))
    lines = text.splitlines()
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(lines))
        name = lines[at].partition(" = ")[0]
        lines[at] = rng.choice(
            [
                f"{name} = {toml_value(rng)}",
                f"{name} = {toml_value(rng)}",
                f"{name} = {toml_value(rng)}",
                f"{lines[at]}\n{lines[at]}",
                f"{lines[at]}\nunknown = 1",
                f"[{rng.choice(['data', 'trainer.fsdp', 'x.y.z', ''])}]",
                f"deep = {'[' * 100_000}",
                f"deep = {'[' * 50}{']' * 50}",
                f"{'a.' * 3000}b = 1",
                lines[at][: len(lines[at]) // 2],
                "\x00",
                "\ufeff",
                "recipe = 7",
                "trainer = 7",
                "data = [1]",
            ]
        )
    data: bytes = rng.choice(["\n", "\n", "\n", "\r\n", "\r"]).join(lines).encode()
    data = rng.choice(
        [data, data, data, data, data[: len(data) // 2], b"", b"\xff\xfe" + data, os.urandom(0) + b"\x80"]
    )
    Path(place.cwd, "run.toml").write_bytes(data)
    words: list[Word] = ["run", "--config", "run.toml"]
    for name, value in SMALL.items():
        words += [f"--{name}", value] if rng.random() < 0.8 else []
    return Draw(words, "toml", is_run=True)


def draw_data(rng: random.Random, place: "Place") -> Draw:
    good = {"prompt": "1+1=", "answer": "2", "question": "1+1=", "x": 1}
    rows: list[Any] = [dict(good) for _ in range(6)]
    bad: list[Any] = [
        {},
        [],
        None,
        7,
        "text",
        {**good, "prompt": ""},
        {**good, "prompt": " " * 3},
        {**good, "prompt": "x" * 100_000},
        {**good, "prompt": "\ud800"},
        {**good, "answer": "\udfff"},
        {**good, "prompt": "\u0000"},
        {**good, "prompt": 1},
        {**good, "prompt": None},
        {**good, "answer": ["2"]},
        {**good, "prompt": [{"role": "user", "content": "1"}]},
        {**good, "answer": ""},
        {**good, "answer": "2" * 200_000},
        {"a" * 10000: 1},
        {"\x1b[31m": 1},
        {"[/x]": 1},
    ]
    lines = [json.dumps(row).encode() for row in rows]
    raw = [
        b"",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b"{",
        b'{"prompt": NaN}',
        b"\xff\xfe",
        b"\x00",
        b"\x1f\x8b",
    ]
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(rng.choice(bad)).encode() if rng.random() < 0.7 else rng.choice(raw)
    data = b"\n".join(lines) if rng.random() < 0.9 else rng.choice([b"", b"\n\n", b"\xef\xbb\xbf" + b"\n".join(lines)])
    name = rng.choice(["rows.jsonl", "rows.jsonl", "rows.jsonl", "rows.parquet", "[red].jsonl"])
    Path(place.cwd, name).write_bytes(data)
    changes: dict[str, Word] = {"data.path": name, "data.eval-prompts": rng.choice(["0", "2", "5", "6", "1000"])}
    if rng.random() < 0.2:
        changes[rng.choice(["data.prompt-key", "data.answer-key"])] = rng.choice(["", "x", "nope", "[red]", "\x1b"])
    if rng.random() < 0.2:
        weight = rng.choice([":1", "", f":{rng.choice(NUMBERS)!s}"])
        del changes["data.path"]
        changes["data"] = f"{rng.choice(['a', 'a', 'a', '', 'a b', '[red]', chr(27), 'é'])}={name}{weight}"
        return Draw(own(rng, place.model, changes), "data", is_run=True)
    if rng.random() < 0.2:
        changes.pop("reward", None)
        return Draw(run_words(rng, place.model, changes, "gsm8k"), "data", is_run=True)
    return Draw(own(rng, place.model, changes), "data", is_run=True)


REWARDS = (
    "",
    "reward = 7",
    "def reward(response, answer): return 1/0",
    "def reward(response, answer): return None",
    "def reward(response, answer): return float('nan')",
    "def reward(response, answer): return 1e308 * 10",
    "def reward(response, answer): return 'x'",
    "def reward(response, answer): return [1]",
    "def reward(response): return 1.0",
    "def reward(*, response, answer): return 1.0",
    "def reward(completions, **kwargs): return [1.0 for _ in completions]",
    "async def reward(response, answer): return 1.0",
    "def reward(response, answer): yield 1.0",
    "class reward:\n    def __init__(self, response, answer): pass",
    "import sys\nsys.exit(0)",
    "import sys\nsys.exit(3)",
    "import os\nos._exit(0)",
    "raise KeyboardInterrupt",
    "raise SystemExit('bye')",
    "raise BaseException('[/x]\\x1b[31m')",
    "raise ValueError('\\ud800')",
    "def f(): f()\nf()",
    "while True: pass",
    "import time\ntime.sleep(1000)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "import os\nos.close(0); os.close(1); os.close(2)\ndef reward(response, answer): return 1.0",
    "print('x' * 1000000)\ndef reward(response, answer): return 1.0",
    "def reward(response, answer): print('[/x]'); return 1.0",
    "import nothing_of_that_name",
    "def reward(response, answer) return 1",
    "\x00",
    "# -*- coding: nothing -*-",
    "x = '\xff'",
    "(" * 10_000,
    "import subprocess\nsubprocess.Popen(['sleep', '600'])\ndef reward(response, answer): return 1.0",
    "import os\nif os.fork() == 0:\n    import time; time.sleep(600)\ndef reward(response, answer): return 1.0",
)


def draw_reward(rng: random.Random, place: "Place") -> Draw:
    Path(place.cwd, "reward.py").write_bytes(rng.choice(REWARDS).encode("latin-1", "replace"))
    name = rng.choice(
        ["reward.py:reward", "reward.py", "reward.py:nope", "reward.py:", "reward.py:reward:x", "reward.py:__x"]
    )
    name = "reward.py:reward" if rng.random() < 0.7 else name
    return Draw(
        own(rng, place.model, {"reward": name, "reward.timeout-s": "3", "reward.load-timeout-s": "3"}),
        "reward",
        is_run=True,
    )


OBJECTIVES = (
    "Mine = 7",
    "class Mine: pass",
    "class Mine:\n    def __init__(self, more): pass",
    "class Mine:\n    def __init__(self): raise ValueError('[/x]\\x1b[31m')",
    "class Mine:\n    def __init__(self): import sys; sys.exit(0)",
    "class Mine:\n    def __init__(self):\n        while True: pass",
    "from flowrt.algorithms.algorithm import *\nclass Mine:\n    needs = 'everything'\n    plan = 3",
    "class Mine:\n    needs = property(lambda self: 1 / 0)",
    "class Mine:\n    def __getattr__(self, name): return self",
)


def draw_algorithm(rng: random.Random, place: "Place") -> Draw:
    """An objective of the user's own that is broken in some way, or a file that is no objective at all."""
    Path(place.cwd, "mine.py").write_bytes(rng.choice(OBJECTIVES + REWARDS).encode("latin-1", "replace"))
    name = "mine.py:Mine" if rng.random() < 0.8 else rng.choice(["mine.py", "mine.py:", "mine.py:no", "x.py:Mine", ":"])
    return Draw(run_words(rng, place.model, {"algorithm": name}), "algorithm", is_run=True)


def draw_model(rng: random.Random, place: "Place") -> Draw:
    model = place.cwd / "model"
    shutil.copytree(place.model, model)
    for _ in range(rng.choice([1, 1, 2])):
        paths = sorted(path for path in model.iterdir() if path.is_file())
        path = rng.choice(paths)
        damage = rng.randrange(7)
        data = path.read_bytes()
        if damage == 0:
            path.unlink()
        elif damage == 1:
            path.write_bytes(data[: len(data) // rng.choice([2, 10, 1000])])
        elif damage == 2:
            path.write_bytes(b"")
        elif damage == 3:
            path.write_bytes(rng.choice([b"{}", b"[]", b"null", b"7", b"[" * 100_000, b"\xff\xfe\x00"]))
        elif damage == 4:
            path.unlink()
            path.mkdir()
        elif damage == 5:
            at = rng.randrange(max(len(data) - 20, 1))
            path.write_bytes(data[:at] + rng.randbytes(20) + data[at + 20 :])
        elif (model / "config.json").is_file():
            _damage_json(rng, model / "config.json")
    return Draw(run_words(rng, model, {}), "model", is_run=True)


def _damage_json(rng: random.Random, path: Path) -> None:
    try:
        table = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return
    if isinstance(table, dict) and table:
        values: list[Any] = [None, 0, -1, 3, 7, "x", [], {}, 1.5, True, 10**6, 2**64, float("nan")]
        table[rng.choice(sorted(table))] = rng.choice(values)
        path.write_text(json.dumps(table))


def draw_command(rng: random.Random, place: "Place") -> Draw:
    """A command that starts no run."""
    anything: Callable[[], Word] = lambda: rng.choice(rng.choice([WORDS, PATHS, ADDRESSES, INTEGERS, NUMBERS]))  # noqa: E731
    command = rng.choice(
        ["status", "ledger", "worker", "drain", "keys", "doctor", "slurm", "config", "resume", "other"]
    )
    words: list[Word]
    if command == "worker":
        role = rng.choice(["reward", "rollout", "source", "trainer", "reference", anything()])
        words = [
            "worker",
            role,
            "--controller",
            anything(),
            "--connect-timeout-s",
            rng.choice([*NUMBERS, "1", "0", "-1", "x"]),
        ]
        words += ["--name", anything()] if rng.random() < 0.3 else []
        words += ["--keys", rng.choice(PATHS)] if rng.random() < 0.3 else []
    elif command == "status":
        options: list[list[Word]] = [[], ["--json"], ["--keys", rng.choice(PATHS)], ["--run", "x"]]
        words = ["status", anything(), *rng.choice(options)]
        words += ["--deadline-s", rng.choice(["1", "0", "-1", "nan", "x"])]
    elif command == "ledger":
        words = ["ledger", anything()]
        words += rng.choice([[], ["--prompt", anything()], ["--prompt", "0", "--epoch", anything()], ["--epoch", "1"]])
    elif command == "drain":
        words = ["drain", anything(), rng.choice(["--run", "--controller"]), anything()]
        words += ["--within-s", rng.choice([*NUMBERS, "1", "-1", "x"])] if rng.random() < 0.5 else []
    elif command == "keys":
        words = ["keys", rng.choice([rng.choice(PATHS), anything()]), *(anything() for _ in range(rng.randrange(3)))]
    elif command == "doctor":
        more = [["--config", rng.choice(PATHS)], ["--merge", rng.choice(PATHS)], ["--model", rng.choice(PATHS)]]
        more += [["--on", anything(), "--nodes", anything()], ["--peers", anything()], ["--controller", anything()]]
        words = ["doctor", *rng.choice(more), "--deadline-s", rng.choice(["1", "0", "-1", "nan", "x"])]
        words += ["--json"] if rng.random() < 0.3 else []
    elif command == "slurm":
        names = [
            "partition",
            "account",
            "nodes",
            "train-nodes",
            "gpus",
            "cpus",
            "time",
            "extra",
            "runs",
            "recipe",
            "cann",
        ]
        words = ["slurm", rng.choice(PATHS), "--partition", "p"]
        for name in rng.sample(names, 2):
            words += [f"--{name}", anything()]
    elif command == "config":
        key = rng.choice(sorted(KEYS))
        recipes: list[list[Word]] = [[], ["custom"], [anything()]]
        words = ["config", *rng.choice(recipes), flag(key), hostile(rng, key)]
    elif command == "resume":
        shutil.copytree(place.finished, place.cwd / "done", symlinks=True)
        key = rng.choice(sorted(KEYS))
        words = ["resume", rng.choice(["done", "done", anything()]), flag(key), hostile(rng, key)]
        words = words if rng.random() < 0.8 else words[:-1]
    else:
        words = [anything() for _ in range(rng.randrange(4))]
        if words[:1] == ["--steps"]:
            words = []
    return Draw(words, command)


def draw_run_directory(rng: random.Random, place: "Place") -> Draw:
    """Commands that read a run directory in which one file is damaged."""
    run_dir = place.cwd / "done"
    shutil.copytree(place.finished, run_dir, symlinks=True)
    names = [
        "config.toml",
        "summary.json",
        "metrics.jsonl",
        "attribution.jsonl",
        "timeline",
        "ledger.sqlite",
        "address",
        "checkpoints",
    ]
    path = run_dir / rng.choice(names)
    damage = rng.randrange(6)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    data = path.read_bytes() if path.is_file() else b""
    path.unlink(missing_ok=True)
    if damage == 1:
        path.write_bytes(data[: len(data) // 2])
    elif damage == 2:
        path.write_bytes(rng.choice([b"", b"{}", b"[]", b"null", b"[1,2]\n", b"{half", b"tcp://x", b"\n\n"]))
    elif damage == 3:
        path.write_bytes(rng.randbytes(300))
    elif damage == 4:
        path.mkdir()
    elif damage == 5:
        path.write_bytes(data + data)
    words: list[list[Word]] = [
        ["resume", "done"],
        ["status", "done"],
        ["ledger", "done"],
        ["ledger", "done", "--prompt", "1"],
    ]
    return Draw(rng.choice(words), "run directory")


def _algorithm(rng: random.Random) -> dict[str, Word]:
    """A preset, or the default one with a coefficient."""
    if rng.random() < 0.5:
        return {"algorithm": rng.choice(sorted(PRESETS))}
    return {"algorithm.kl.coef": rng.choice(["0.0", "0.01"])}


def draw_valid(rng: random.Random, place: "Place") -> Draw:
    """A valid configuration, which must train a step."""
    changes: dict[str, Word] = {
        "max-staleness": rng.choice(["0", "1", "2"]),
        "group-size": rng.choice(["2", "3"]),
        "rollout.weight_update": rng.choice(["between_sequences", "in_flight"]),
        "rollout.workers": rng.choice(["1", "1", "2"]),
        "controller.lanes": rng.choice(["auto", "gloo", "shm"]),
        "deterministic": rng.choice(["True", "False"]),
        **_algorithm(rng),
        "on-lost-sample": rng.choice(["regenerate", "drop_group", "train_remaining"]),
        "data.eval-prompts": rng.choice(["0", "2"]),
        "checkpoint.every": rng.choice(["0", "1"]),
        "trainer.engine": rng.choice(["torch", "torch", "fsdp"]),
        "launch.use_fork_server": rng.choice(["True", "False"]),
        "rollout.weight_sync.policy": rng.choice(["immediate", "rolling", "every_n", "divergence"]),
        "run-dir": rng.choice(["run", "[red]r[/x]", "é", "a b"]),
    }
    if changes["deterministic"] == "True":
        changes |= {
            "rollout.workers": "1",
            "rollout.weight_update": "between_sequences",
            "rollout.weight_sync.policy": "immediate",
        }
    for name in rng.sample(sorted(changes), rng.randrange(3, len(changes))):
        del changes[name]
    words = (own if rng.random() < 0.3 else run_words)(rng, place.model, changes)
    return Draw(words, "valid", is_run=True)


DRAWERS: Sequence[tuple[float, Callable[[random.Random, "Place"], Draw]]] = (
    (0.47, draw_flags),
    (0.14, draw_toml),
    (0.08, draw_data),
    (0.04, draw_reward),
    (0.03, draw_algorithm),
    (0.05, draw_model),
    (0.13, draw_command),
    (0.04, draw_run_directory),
    (0.02, draw_valid),
)


# ---- how it is run


@dataclass
class Place:
    """The directory of one draw, and the model and run that all draws share."""

    root: Path
    model: Path
    finished: Path

    @property
    def cwd(self) -> Path:
        return self.root / "cwd"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    def make(self, rng: random.Random) -> Draw:
        """Make the directory and draw a command."""
        self.cwd.mkdir(parents=True)
        self.tmp.mkdir()
        Path(self.cwd, "there").mkdir()
        Path(self.cwd, "file").write_text("x")
        Path(self.cwd, "locked").touch(mode=0)
        os.mkfifo(self.cwd / "fifo")
        Path(self.cwd, "loop").symlink_to("loop")
        Path(self.cwd, "broken-link").symlink_to("nothing")
        rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
        Path(self.cwd, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        Path(self.cwd, "reward.py").write_text("def reward(response, answer):\n    return float(len(response) % 3)\n")
        [drawer] = rng.choices([one for _, one in DRAWERS], [share for share, _ in DRAWERS])
        return drawer(rng, self)

    def tree(self) -> set[str]:
        return {str(path.relative_to(self.cwd)) for path in self.cwd.rglob("*")}

    def logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.cwd.rglob("*.log") if path.is_file())


class Command:
    """A ``flowrt`` command in a session of its own."""

    def __init__(self, words: Sequence[Word], place: Place, token: str, environment: Mapping[str, str]) -> None:
        self.place = place
        self.began_s = time.monotonic()
        self._token = token
        self._output = place.root / "output"
        with self._output.open("wb") as output:
            sys.stdout.flush()
            self.pid = os.fork()
            if not self.pid:
                _run_forked(words, place, output.fileno(), {TOKEN: token, **environment})

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def poll(self) -> int | None:
        """The exit code once the command has ended, else None; must not be called again after a code."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def stepped(self) -> bool:
        return any(path.stat().st_size for path in self.place.cwd.glob("*/metrics.jsonl") if path.is_file()) or (
            "step 1/" in self.output
        )

    def processes(self) -> dict[int, tuple[str, float]]:
        """Living processes of the command, each with its command line and the seconds that it has computed."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                named = f"{TOKEN}={self._token}".encode() in (path / "environ").read_bytes().split(b"\0")
                if fields[0] != "Z" and (named or int(fields[3]) == self.pid):
                    line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(path.name)] = (line[:120], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
            except OSError:
                continue
        return found

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _run_forked(words: Sequence[Word], place: Place, output: int, environment: Mapping[str, str]) -> None:
    """Run a command as a new process would, except for the imports, which are inherited."""
    code = 1
    try:
        os.setsid()
        os.chdir(place.cwd)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE, MOST_FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FLOWRT")}
        environ |= {
            "TMPDIR": str(place.tmp),
            "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "200",
            **environment,
        }
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, mode, closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        sys.argv = ["flowrt", *map(os.fsdecode, words)]
        sys.excepthook = sys.__excepthook__
        try:
            code = cli.main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
            if isinstance(left.code, str):
                sys.stderr.write(left.code + "\n")
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 -- as the interpreter does at its end
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code & 0xFF)


def execute(command: Command, deadline_s: float, is_run: bool) -> Outcome:
    """Wait until the command has ended; a run gets SIGINT after its first step.

    A command that has not ended after ``deadline_s`` seconds (END_S after SIGINT) is killed, as slow or hung.
    """
    stepped = slow = hung = False
    signalled_s = 0.0
    code = None
    while code is None:
        code = command.poll()
        now_s = time.monotonic()
        if code is None and is_run and not signalled_s and command.stepped():
            stepped, signalled_s = True, now_s
            os.kill(command.pid, signal.SIGINT)
        late_s = signalled_s + END_S if signalled_s else command.began_s + deadline_s
        if code is None and now_s > late_s:
            slow = _computes(command)
            hung = not slow
            command.kill()
            code = command_code(command)
            break
        if code is None:
            time.sleep(0.02 if now_s - command.began_s < 2 else 0.1)
    left = [] if slow or hung else _left(command)
    command.kill()
    return Outcome(
        code=None if slow or hung else code,
        seconds=time.monotonic() - command.began_s,
        stepped=stepped,
        slow=slow,
        hung=hung,
        left=left,
        output=command.output,
    )


def command_code(command: Command) -> int:
    """The exit code of a killed command."""
    _, status = os.waitpid(command.pid, 0)
    return os.waitstatus_to_exitcode(status)


def _computes(command: Command) -> bool:
    before = command.processes()
    own = _cpu(command.pid)
    time.sleep(CPU_WINDOW_S)
    after = command.processes()
    used_s = sum(cpu_s - before.get(pid, ("", 0.0))[1] for pid, (_, cpu_s) in after.items()) + _cpu(command.pid) - own
    return used_s / CPU_WINDOW_S > COMPUTING


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _left(command: Command) -> list[str]:
    end_s = time.monotonic() + GONE_S
    while left := command.processes():
        if time.monotonic() > end_s:
            return [line for line, _ in left.values()]
        time.sleep(0.1)
    return []


def judge(draw: Draw, outcome: Outcome, place: Place, before: set[str]) -> list[str]:
    """The names of the faults of a draw; empty if it passes. Adds files that were left to ``outcome.left``."""
    faults = []
    text = outcome.output if draw.kind == "reward" else outcome.output + place.logs()
    faults += ["tracebacks"] if any(word in text for word in BAD_WORDS) else []
    faults += ["hangs"] if outcome.hung else []
    if outcome.code is not None:
        faults += ["wrong_codes"] if outcome.code not in RIGHT_CODES else []
        new = sorted(place.tree() - before)
        if outcome.code == 2 and new:
            faults.append("files_left")
            outcome.left += [f"file {name}" for name in new[:5]]
        if any(place.tmp.iterdir()):
            faults.append("temporary_files_left")
            outcome.left += [f"in TMPDIR: {path.name}" for path in place.tmp.iterdir()]
        if draw.kind == "valid" and not outcome.stepped and outcome.code != 0:
            faults.append("valid_refused")
    if any(not left.startswith(("file ", "in TMPDIR")) for left in outcome.left):
        faults.append("processes_left")
    return faults


def one(number: int, seed: int, shared: "Shared", runs: float) -> tuple[Draw, Outcome, list[str], Place]:
    rng = random.Random(f"{seed}/{number}")
    place = Place(shared.root / f"draw-{number}", shared.model, shared.finished)
    draw = place.make(rng)
    starts = draw.kind == "valid" or rng.random() < runs
    before = place.tree()
    token = f"{os.getpid()}-{seed}-{number}"
    if draw.is_run:  # first as a configuration alone: nothing is started, nothing may be written
        outcome = execute(Command(["config", *draw.words[1:]], place, token, draw.environment), REFUSED_S, False)
        faults = judge(draw, outcome, place, before)
        if faults or place.tree() != before:
            return draw, outcome, faults or ["files_left"], place
        if outcome.code == 0 and not starts and draw.kind not in ("data", "reward", "model"):
            return draw, outcome, [], place
        if outcome.code == 0 and not starts and rng.random() < 0.6:
            return draw, outcome, [], place
    outcome = execute(
        Command(draw.words, place, token, draw.environment),
        STEP_S if draw.is_run or draw.words[:1] == ["resume"] else REFUSED_S,
        draw.is_run,
    )
    return draw, outcome, judge(draw, outcome, place, before), place


@dataclass
class Shared:
    """A small model, and a complete run."""

    root: Path
    model: Path
    finished: Path


def prepare(work: Path) -> Shared:
    """Build a small model and a complete run in ``work``, or use those of an earlier call."""
    model, finished = work / "model", work / "finished"
    flowrt_command = str(Path(sys.executable).with_name("flowrt"))
    if not finished.is_dir():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        base = [
            "--sft.steps",
            "0",
            "--sft.answer-only-steps",
            "0",
            "--build.hidden-size",
            "32",
            "--build.layers",
            "1",
        ]
        base += ["--build.heads", "2", "--build.intermediate-size", "64", "--run-dir", str(work / "run")]
        small = [part for name, value in SMALL.items() if name != "run-dir" for part in (f"--{name}", value)]
        base += [*small, "--checkpoint.every", "1"]
        subprocess.run([flowrt_command, "run", *base], check=True, timeout=400, stdin=subprocess.DEVNULL, cwd=work)
        shutil.copytree(work / "run" / "model", model)
        (work / "run").rename(finished)
    root = work / "draws"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    return Shared(root, model, finished)


def report(number: int, seed: int, draw: Draw, outcome: Outcome, faults: Sequence[str]) -> str:
    """The report on a draw: how to repeat it, its command, and the last lines of its output."""
    tail = "\n    ".join(outcome.output.splitlines()[-6:])[-700:]
    verdict = ", ".join(faults) or ("slow" if outcome.slow else "passed")
    what = f"{verdict}: --seed {seed} --only {number} ({draw.kind}, exit code {outcome.code}"
    left = " ".join(outcome.left)[:300]
    return f"{what}, {outcome.seconds:.0f} s) {left}\n  flowrt {draw.line()[:600]}\n    {tail}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this draw alone")
    parser.add_argument("--runs", type=float, default=0.05, help="share of accepted configurations that are started")
    parser.add_argument(
        "--keep", action="store_true", help="keep the directories of draws, not only of those that fail"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / f"fuzz-cli-{os.getuid()}")
    parser.add_argument("--json", type=Path, help="where the counts are written")
    arguments = parser.parse_args()
    shared = prepare(arguments.work.absolute())
    numbers = range(arguments.first, arguments.first + arguments.draws) if arguments.only is None else [arguments.only]
    counts: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    failing = []
    began_s = time.monotonic()
    for number in numbers:
        draw, outcome, faults, place = one(
            number, arguments.seed, shared, 1.0 if arguments.only is not None else arguments.runs
        )
        counts["draws"] += 1
        counts["stepped"] += outcome.stepped
        counts["slow"] += outcome.slow
        codes[f"{draw.kind}: {outcome.code}"] += 1
        counts.update(set(faults))
        if faults or outcome.slow or arguments.only is not None:
            sys.stdout.write(report(number, arguments.seed, draw, outcome, faults))
            sys.stdout.flush()
        if faults:
            failing.append({"number": number, "faults": faults, "command": draw.line()[:2000], "code": outcome.code})
        if not (faults or arguments.keep):
            shutil.rmtree(place.root, ignore_errors=True)
    result = {
        "seed": arguments.seed,
        **{
            name: counts[name]
            for name in ("draws", "tracebacks", "hangs", "files_left", "wrong_codes", "processes_left")
        },
        **{name: counts[name] for name in ("temporary_files_left", "valid_refused", "slow", "stepped")},
        "seconds": round(time.monotonic() - began_s, 1),
        "codes": dict(sorted(codes.items())),
        "failing": failing,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps({name: value for name, value in result.items() if name != "failing"}) + "\n")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
