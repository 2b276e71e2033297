"""Fuzzing of the ``flowrt`` command: random arguments, configurations, data, rewards and models, a process for each.

python scripts/fuzz_cli.py --draws 2000 --seed 1 --json RESULT.json     every failing command line is printed
python scripts/fuzz_cli.py --draws 2000 --seed 1 --only 17              that one of them again; its directory stays

Hypothesis draws values from the types and intervals of the configuration's keys, and words from the arguments of the
commands. A draw fails if it prints or logs a traceback; is idle at its deadline without a step or an end; exits with a
code other than 0, 1, 2, 3 and 130; or leaves a process, a temporary file, or (with exit code 2) any file. The
configuration of every draw is first passed to ``flowrt config``. Of those that are accepted, only a share (``--runs``)
is started as a run, which is interrupted after its first step.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

# Loaded once, before any draw is forked.
from flowrt import cli
from flowrt.recipes.config import RunConfig
from flowrt.recipes.config_io import defaults, to_toml
from flowrt.recipes.tables import leaves
from flowrt.runtime.bounds import ends, interval_of

RIGHT_CODES = (0, 1, 2, 3, 130)
TOKEN = "FUZZ_CLI_DRAW"  # noqa: S105
REFUSED_S, STEP_S, END_S, LEAVE_S = 45.0, 150.0, 60.0, 10.0
"""Time limits: of a command that starts no run; of a run, until its first step or its end; of an interrupted run, until
its end; of processes after the end of the command."""
CPU_WINDOW_S, COMPUTING = 6.0, 0.15
"""Share of a core, in a window, above which processes without a step are slow, not hung."""
MAX_MEMORY, MAX_FILE = 12 << 30, 256 << 20
FAULTS = ("tracebacks", "hangs", "wrong_codes", "files_left", "temporary_files_left", "processes_left", "valid_refused")
BAD_WORDS = ("Traceback (most recent", "Exception ignored in", "Fatal Python error", "Task exception was never")
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
OWN = {"data.path": "rows.jsonl", "reward": "reward.py:reward", "rollout.max-new-tokens": "8"}
STARTING = ("run", "resume", "eval", "watch")
"""Commands that start a run or do not end by themselves."""
LIMITS = {"worker": ["--connect-timeout-s", "1"], "status": ["--deadline-s", "1"], "doctor": ["--deadline-s", "1"]}
"""Arguments without which a command waits for long."""


# ---- what is drawn

PATHS = st.sampled_from(
    [
        *("there", "there/", "file", "file/below", "fifo", "missing", "missing/below", "locked", "loop", "broken-link"),
        *("/dev/null", "/dev/full", "/dev/zero", "/proc/self/mem", "n" * 300, "/".join(["d" * 200] * 30), "~"),
        *("reward.py", "reward.py:reward", "rows.jsonl", "done", ""),
    ]
)
ADDRESSES = st.builds(
    "{}{}:{}{}".format,
    st.sampled_from(["tcp://", "ipc://", "inproc://", "udp://", "://", ""]),
    st.sampled_from(["127.0.0.1", "[::1", "host[red]", "é", "*", "", "a" * 3000]),
    st.sampled_from(["1", "0", "99999", "-1", ""]),
    st.sampled_from(["", ";tcp://127.0.0.1:2"]),
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30),
    st.sampled_from(["\x1b[31mred", "[/]", "%s%n", "-", "--", "--steps", "=", "None", "\udcff\udcfe", "a" * 5000]),
)
WORDS = st.one_of(TEXTS, PATHS, ADDRESSES, st.integers().map(str), st.floats().map(str))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.just("x" * 100_000))
JSON = st.recursive(SCALARS, lambda below: st.lists(below) | st.dictionaries(TEXTS, below), max_leaves=5)
RAW = st.binary(max_size=100) | st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b"\xff\xfe", b"\0"])
MISBEHAVING = (
    *("1/0", "return None", "return float('nan')", "return 1e308 * 10", "return 'x'", "return [1]", "yield 1.0"),
    *(
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise KeyboardInterrupt",
        "raise BaseException('[/x]\\x1b')",
    ),
    *(
        "raise ValueError('\\ud800')",
        "while True: pass",
        "import time; time.sleep(1000)",
        "import nothing_of_that_name",
    ),
    *("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "import os; os.close(0); os.close(1); os.close(2)"),
    *("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "print('x' * 1000000)", "return 1.0"),
    *("import subprocess; subprocess.Popen(['sleep', '600'])", "import os; os.fork() or __import__('time').sleep(600)"),
)
DEFINITIONS = ("def {}(response, answer):", "def {}(response):", "def {}(completions, **columns):", "class {}:")


KEYS = dict(leaves(RunConfig))


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def values(hint: Any) -> st.SearchStrategy[str]:
    """Texts of values for a key: mostly of its type, often at the ends of its interval."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(st.just("None"), *(values(arg) for arg in get_args(kind) if arg is not type(None)))
    if kind is str or get_origin(kind) is tuple:
        return WORDS
    strategies = [st.from_type(kind).map(str), WORDS]
    if (interval := interval_of(hint)) is not None:
        low, high = ends(interval)
        strategies = [st.sampled_from([kind(low), kind(high), kind(low) - 1, kind(high) + 1]).map(str), *strategies]
    return st.one_of(strategies)


@dataclass
class Draw:
    """One command with its arguments."""

    kind: str
    words: list[str]
    is_run: bool = False

    def line(self) -> str:
        return shlex.join(word.encode("utf-8", "backslashreplace").decode() for word in self.words)


Data = st.DataObject


def run_words(data: Data, place: "Place", changes: Mapping[str, str], recipe: str = "") -> list[str]:
    """``flowrt run`` of a small run with these flags."""
    words = ["run", *([recipe] if recipe else [])]
    own = OWN if recipe == "custom" else {}
    for name, value in {**SMALL, "model": str(place.model), **own, **changes}.items():
        words += [f"--{name}={value}"] if data.draw(st.booleans()) else [f"--{name}", value]
    return words


def draw_flags(data: Data, place: "Place") -> Draw:
    """Keys with values of their types, those of a table with types with one of these, on the command line."""
    keys = data.draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3, unique=True))
    keys += [name for key in keys if (name := f"{key.rpartition('.')[0]}.type") in KEYS and name not in keys]
    changes = {key.replace("_", "-"): data.draw(values(KEYS[key])) for key in keys}
    words = run_words(data, place, changes, data.draw(st.sampled_from(["", "", "", "custom"])))
    if data.draw(st.integers(0, 6)) == 0:  # a flag twice, a value missing, a word too many
        at = data.draw(st.integers(1, len(words)))
        words[at:at] = data.draw(
            st.sampled_from([["--steps", "3"], ["--steps"], ["--unknown", "1"], ["--help"], ["x"]])
        )
    return Draw("flags", words, is_run=True)


def draw_toml(data: Data, place: "Place") -> Draw:
    """A file of configuration with changed, doubled, cut and foreign lines."""
    recipe = data.draw(st.sampled_from(["arithmetic", "custom", "gsm8k"]))
    lines = to_toml(dataclasses.replace(defaults(recipe), steps=2, model=str(place.model), run_dir="run")).splitlines()
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(lines) - 1))
        name = lines[at].partition(" = ")[0]
        value = data.draw(JSON.map(lambda content: json.dumps(content, allow_nan=True).replace(": ", " = ")) | TEXTS)
        changed = [f"{name} = {value}", f"{lines[at]}\n{lines[at]}", f"{lines[at]}\nunknown = 1", "trainer = 7"]
        changed += [f"deep = {'[' * 100_000}", f"{'a.' * 3000}b = 1", lines[at][: len(lines[at]) // 2], "[data]", "\0"]
        lines[at] = data.draw(st.just(changed[0]) | st.sampled_from(changed))
    text = data.draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines).encode("utf-8", "surrogatepass")
    (place.cwd / "run.toml").write_bytes(data.draw(st.just(text) | st.sampled_from([text[:99], b"\xff" + text, b""])))
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    return Draw("toml", ["run", "--config", "run.toml", *flags], is_run=True)


def draw_data(data: Data, place: "Place") -> Draw:
    """A file of rows, of which one has a field of another type or is no row."""
    good = {"prompt": "1+1=", "answer": "2", "question": "1+1=", "x": 1}
    wrong = st.one_of(JSON, st.builds(lambda key, value: {**good, key: value}, st.sampled_from([*good, ""]), JSON))
    rows = [json.dumps(good).encode()] * 6
    rows[data.draw(st.integers(0, 5))] = data.draw(wrong.map(lambda row: json.dumps(row).encode()) | RAW)
    name = data.draw(st.sampled_from(["rows.jsonl", "rows.jsonl", "rows.parquet", "[red].jsonl"]))
    (place.cwd / name).write_bytes(b"\n".join(rows))
    changes = {"data.path": name, "data.eval-prompts": data.draw(st.integers(0, 6).map(str))}
    if data.draw(st.integers(0, 4)) == 0:
        changes[data.draw(st.sampled_from(["data.prompt-key", "data.answer-key"]))] = data.draw(TEXTS)
    return Draw("data", run_words(data, place, changes, "custom"), is_run=True)


def draw_own_code(data: Data, place: "Place") -> Draw:
    """A reward function or an objective that misbehaves when it is loaded or called."""
    kind, name = data.draw(st.sampled_from([("reward", "reward"), ("algorithm", "Mine")]))
    loaded = [statement for statement in MISBEHAVING if not statement.startswith(("return", "yield"))]
    body = f"{data.draw(st.sampled_from(DEFINITIONS)).format(name)}\n    {data.draw(st.sampled_from(MISBEHAVING))}\n"
    text = data.draw(st.just(body) | st.sampled_from(loaded).map(lambda statement: f"{statement}\n{body}") | st.text())
    (place.cwd / "mine.py").write_text(text, errors="surrogatepass")
    changes = {kind: data.draw(st.sampled_from([f"mine.py:{name}"] * 3 + ["mine.py", "mine.py:", "mine.py:no", ":"]))}
    changes |= {"reward.timeout-s": "3", "reward.load-timeout-s": "3"}
    return Draw(kind, run_words(data, place, changes, "custom"), is_run=True)


def damage(data: Data, path: Path) -> None:
    """Delete a file, cut it, fill it with other contents, or put a directory in its place."""
    was = path.read_bytes() if path.is_file() else b""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    json_texts = JSON.map(lambda value: json.dumps(value).encode())
    kept = st.sampled_from([None, "a directory", was[: len(was) // 2], was + was])
    new = data.draw(kept | RAW | json_texts)
    if isinstance(new, bytes):
        path.write_bytes(new)
    elif new:
        path.mkdir()


def draw_model(data: Data, place: "Place") -> Draw:
    """A model of which a file is damaged, or a field of its configuration changed."""
    model = place.cwd / "model"
    shutil.copytree(place.model, model)
    if data.draw(st.booleans()):
        table = json.loads((model / "config.json").read_text())
        table[data.draw(st.sampled_from(sorted(table)))] = data.draw(JSON)
        (model / "config.json").write_text(json.dumps(table))
    else:
        damage(data, data.draw(st.sampled_from(sorted(path for path in model.iterdir() if path.is_file()))))
    return Draw("model", run_words(data, place, {"model": str(model)}), is_run=True)


def draw_command(data: Data, place: "Place") -> Draw:
    """A command that starts no run, with arguments of its own parser."""
    if data.draw(st.booleans()):
        shutil.copytree(place.finished, place.cwd / "done", symlinks=True)
        if data.draw(st.booleans()):
            damage(data, data.draw(st.sampled_from(sorted((place.cwd / "done").iterdir()))))
    name = data.draw(st.sampled_from(sorted(set(cli.COMMANDS) - set(STARTING))))
    words, add_arguments = [name], cli.COMMANDS[name].add_arguments
    if add_arguments is None:  # it parses its words itself
        known = st.sampled_from(["check", "reward", "rollout", "--controller", "--partition", *map(flag, KEYS)])
        return Draw(name, [name, *data.draw(st.lists(known | WORDS, max_size=4)), *LIMITS.get(name, [])])
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        word = WORDS | st.just("done")
        if action.choices:
            word = st.sampled_from([*map(str, action.choices)]) | WORDS
        if not action.option_strings:
            words.append(data.draw(word))
        elif data.draw(st.integers(0, 2)) == 0:
            words += [action.option_strings[0], *([] if action.nargs == 0 else [data.draw(word)])]
    return Draw(name, [*words, *LIMITS.get(name, [])])


def draw_resumed(data: Data, place: "Place") -> Draw:
    """A finished run, sometimes with a damaged file, that is resumed with a changed key."""
    shutil.copytree(place.finished, place.cwd / "done", symlinks=True)
    if data.draw(st.booleans()):
        damage(data, data.draw(st.sampled_from(sorted((place.cwd / "done").iterdir()))))
    key = data.draw(st.sampled_from(sorted(KEYS)))
    return Draw("resume", ["resume", "done", flag(key), data.draw(values(KEYS[key]))])


def draw_valid(data: Data, place: "Place") -> Draw:
    """Choices of a valid configuration, which must train a step."""
    choices = {
        "max-staleness": ["0", "1", "2"],
        "group-size": ["2", "3"],
        "rollout.weight_update": ["between_sequences", "in_flight"],
        "controller.lanes": ["auto", "gloo", "shm"],
        "on-lost-sample": ["regenerate", "drop_group", "train_remaining"],
        "data.eval-prompts": ["0", "2"],
        "checkpoint.every": ["0", "1"],
        "trainer.engine": ["torch", "torch", "fsdp"],
        "launch.use_fork_server": ["True", "False"],
        "run-dir": ["run", "[red]r[/x]", "é", "a b"],
    }
    names = data.draw(st.sets(st.sampled_from(sorted(choices)), max_size=4))
    changes = {name: data.draw(st.sampled_from(choices[name])) for name in sorted(names)}
    return Draw("valid", run_words(data, place, changes, data.draw(st.sampled_from(["", "custom"]))), is_run=True)


DRAWERS: tuple[Callable[[Data, "Place"], Draw], ...] = (
    *(draw_flags,) * 8,
    *(draw_toml, draw_toml, draw_toml, draw_command, draw_command, draw_command),
    *(draw_data, draw_data, draw_own_code, draw_model, draw_resumed, draw_valid),
)


# ---- how it is run


@dataclass
class Place:
    """The directory of one draw, and the model and run that all draws share."""

    root: Path
    model: Path
    finished: Path

    def __post_init__(self) -> None:
        self.cwd, self.tmp = self.root / "cwd", self.root / "tmp"

    def make(self) -> None:
        """Make the directory, with files that are often named."""
        for folder in (self.cwd / "there", self.tmp):
            folder.mkdir(parents=True)
        (self.cwd / "file").write_text("x")
        (self.cwd / "locked").touch(mode=0)
        os.mkfifo(self.cwd / "fifo")
        (self.cwd / "loop").symlink_to("loop")
        (self.cwd / "broken-link").symlink_to("nothing")
        rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(8)]
        (self.cwd / "rows.jsonl").write_text("\n".join(rows) + "\n")
        (self.cwd / "reward.py").write_text("def reward(response, answer):\n    return float(len(response) % 3)\n")

    def tree(self) -> set[str]:
        return {str(path.relative_to(self.cwd)) for path in self.cwd.rglob("*")}

    def logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.cwd.rglob("*.log") if path.is_file())


@dataclass
class Outcome:
    """How one command ended; ``code`` is None if it was killed at its deadline."""

    code: int | None = None
    seconds: float = 0.0
    stepped: bool = False
    slow: bool = False
    left: list[str] = field(default_factory=list)
    output: str = ""


class Command:
    """A ``flowrt`` command in a session of its own."""

    def __init__(self, words: Sequence[str], place: Place, token: str) -> None:
        self.place = place
        self.began_s = time.monotonic()
        self._token = token
        self._output = place.root / "output"
        with self._output.open("wb") as output:
            sys.stdout.flush()
            self.pid = os.fork()
            if not self.pid:
                _run_forked(words, place, output.fileno(), token)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        """The exit code once the command has ended, else None; must not be called again after a code."""
        pid, status = os.waitpid(self.pid, flags)
        return os.waitstatus_to_exitcode(status) if pid else None

    def stepped(self) -> bool:
        lines = (path.stat().st_size for path in self.place.cwd.glob("*/metrics.jsonl") if path.is_file())
        return any(lines) or "step 1/" in self.output

    def processes(self) -> dict[int, tuple[str, float]]:
        """Living processes of the command, each with its command line and the seconds that it has computed."""
        processes = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                named = f"{TOKEN}={self._token}".encode() in (path / "environ").read_bytes().split(b"\0")
                if fields[0] != "Z" and (named or int(fields[3]) == self.pid):
                    line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    processes[int(path.name)] = (
                        line[:120],
                        (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
                    )
        return processes

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _run_forked(words: Sequence[str], place: Place, output: int, token: str) -> NoReturn:
    """Run a command as a new process would, except for the imports, which are inherited."""
    code: Any = 1
    try:
        os.setsid()
        os.chdir(place.cwd)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.closerange(3, 256)
        for kind, most in (
            (resource.RLIMIT_DATA, MAX_MEMORY),
            (resource.RLIMIT_FSIZE, MAX_FILE),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (most, most))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FLOWRT")}
        environ |= {"TMPDIR": str(place.tmp), "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor")}
        environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", TOKEN: token}
        os.environ.clear()
        os.environ.update(environ)
        tempfile.tempdir = None
        sys.stdin, sys.stdout, sys.stderr = (
            open(fd, mode, closefd=False, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        sys.argv = ["flowrt", *words]
        sys.excepthook = sys.__excepthook__
        try:
            code = cli.main()
        except SystemExit as left:
            code = left.code
            if isinstance(code, str):
                sys.stderr.write(code + "\n")
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 -- as the interpreter does at its end
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit((code if isinstance(code, int) else int(code is not None)) & 0xFF)


def execute(command: Command, deadline_s: float, is_run: bool) -> Outcome:
    """Wait until the command has ended; a run gets SIGINT after its first step.

    A command that has not ended after ``deadline_s`` seconds (END_S after SIGINT) is killed, as slow or hung.
    """
    outcome, end_s = Outcome(), command.began_s + deadline_s
    while outcome.code is None and time.monotonic() < end_s:
        if is_run and not outcome.stepped and command.stepped():
            outcome.stepped, end_s = True, time.monotonic() + END_S
            os.kill(command.pid, signal.SIGINT)
        time.sleep(0.02 if time.monotonic() - command.began_s < 2 else 0.1)
        outcome.code = command.poll()
    if outcome.code is None:
        outcome.slow = _computes(command)
        command.kill()
        command.poll(0)
    else:
        end_s = time.monotonic() + LEAVE_S
        while (left := command.processes()) and time.monotonic() < end_s:
            time.sleep(0.1)
        outcome.left = [line for line, _ in left.values()]
        command.kill()
    outcome.seconds, outcome.output = time.monotonic() - command.began_s, command.output
    return outcome


def _computes(command: Command) -> bool:
    """Whether the processes of a command compute."""
    before = command.processes()
    time.sleep(CPU_WINDOW_S)
    used_s = sum(cpu_s - before.get(pid, ("", 0.0))[1] for pid, (_, cpu_s) in command.processes().items())
    return used_s / CPU_WINDOW_S > COMPUTING


def judge(draw: Draw, outcome: Outcome, place: Place, before: set[str]) -> list[str]:
    """The names of the faults of a draw; empty if it passes. Adds files that were left to ``outcome.left``."""
    text = outcome.output + ("" if draw.kind == "reward" else place.logs())
    faults = {
        "tracebacks": any(word in text for word in BAD_WORDS),
        "hangs": outcome.code is None and not outcome.slow,
        "processes_left": bool(outcome.left),
    }
    if outcome.code is not None:
        new, temporary = sorted(place.tree() - before), sorted(path.name for path in place.tmp.iterdir())
        faults |= {
            "wrong_codes": outcome.code not in RIGHT_CODES,
            "files_left": outcome.code == 2 and bool(new),
            "temporary_files_left": bool(temporary),
            "valid_refused": draw.kind == "valid" and not outcome.stepped and outcome.code != 0,
        }
        outcome.left += [f"in TMPDIR: {name}" for name in temporary]
        outcome.left += [f"file {name}" for name in new[:5] if outcome.code == 2]
    return [name for name, is_there in faults.items() if is_there]


def run_draw(draw: Draw, place: Place, token: str, starts: bool) -> tuple[Outcome, list[str]]:
    """Run a draw; a run first as a configuration alone: nothing is started, nothing may be written."""
    before = place.tree()
    if draw.is_run:
        outcome = execute(Command(["config", *draw.words[1:]], place, token), REFUSED_S, is_run=False)
        faults = judge(draw, outcome, place, before)
        if not faults and place.tree() != before:
            faults = ["files_left"]
        if faults or outcome.code != 0 or not starts:
            return outcome, faults
    deadline_s = STEP_S if draw.is_run or draw.kind == "resume" else REFUSED_S
    outcome = execute(Command(draw.words, place, token), deadline_s, draw.is_run)
    return outcome, judge(draw, outcome, place, before)


def prepare(work: Path) -> tuple[Path, Path]:
    """Build a small model and a complete run in ``work``, or use those of an earlier call; returns their paths."""
    model, finished = work / "model", work / "finished"
    if not finished.is_dir():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        flags = {**SMALL, "checkpoint.every": "1", "run-dir": str(work / "run"), "sft.steps": "0"}
        flags |= {"sft.answer-only-steps": "0", "build.hidden-size": "32", "build.layers": "1", "build.heads": "2"}
        words = [part for name, value in flags.items() for part in (f"--{name}", value)]
        command = [sys.executable, "-m", "flowrt.cli", "run", *words, "--build.intermediate-size", "64"]
        subprocess.run(command, check=True, timeout=400, stdin=subprocess.DEVNULL, cwd=work)
        shutil.copytree(work / "run" / "model", model)
        (work / "run").rename(finished)
    shutil.rmtree(work / "draws", ignore_errors=True)
    return model, finished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this draw alone, and keep its directory")
    parser.add_argument("--runs", type=float, default=0.05, help="share of accepted configurations that are started")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / f"fuzz-cli-{os.getuid()}")
    parser.add_argument("--json", type=Path, help="where the counts are written")
    options = parser.parse_args()
    work = options.work.absolute()
    model, finished = prepare(work)
    counts: Counter[str] = Counter(dict.fromkeys(("draws", *FAULTS, "slow", "stepped"), 0))
    failing: list[dict[str, Any]] = []
    began_s, numbers = time.monotonic(), iter(range(options.draws))

    @seed(options.seed)
    @settings(
        max_examples=options.draws,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def draws(data: Data) -> None:
        number = next(numbers)
        place = Place(work / "draws" / str(number), model, finished)
        place.make()
        draw = data.draw(st.sampled_from(DRAWERS))(data, place)
        if options.only in (None, number):
            share = 1.0 if options.only is not None or draw.kind == "valid" else options.runs
            starts = random.Random(f"{options.seed} {number}").random() < share
            outcome, faults = run_draw(draw, place, f"{os.getpid()}-{number}", starts)
            counts.update(
                ["draws", *faults, *(["slow"] if outcome.slow else []), *(["stepped"] if outcome.stepped else [])]
            )
            if faults or outcome.slow or options.only is not None:
                verdict = ", ".join(faults) or ("slow" if outcome.slow else "passed")
                tail = "\n    ".join(outcome.output.splitlines()[-6:])[-700:]
                sys.stdout.write(f"{verdict}: draw {number} ({draw.kind}, exit code {outcome.code}, ")
                sys.stdout.write(f"{outcome.seconds:.0f} s) {outcome.left}\n  flowrt {draw.line()[:600]}\n    {tail}\n")
                sys.stdout.flush()
            if faults:
                failing.append(
                    {"number": number, "faults": faults, "command": draw.line()[:2000], "code": outcome.code}
                )
                return
        if number != options.only:
            shutil.rmtree(place.root, ignore_errors=True)

    with contextlib.suppress(StopIteration):
        draws()
    result = {"seed": options.seed, **counts, "seconds": round(time.monotonic() - began_s, 1), "failing": failing}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps({name: value for name, value in result.items() if name != "failing"}) + "\n")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
