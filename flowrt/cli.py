"""The ``flowrt`` command.

- argparse splits a command line into a command and its arguments; `flowrt.recipes.flags` parses the flags of a
  configuration (run, config, resume) and of a site (slurm) into a dataclass, `flowrt.recipes.flag_help` prints their
  help.
- Bad input prints one sentence to stderr, starts nothing, and ends with exit code 2.
- A command imports what it needs when it is called: ``flowrt --help`` is fast.
"""

import argparse
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ConfigError, FlowError
from flowrt.launcher.terminal import console
from flowrt.net.curve_keys import KEYS_VARIABLE
from flowrt.recipes.flag_help import HELP_FLAGS, topic_of
from flowrt.recipes.flags import WATCH_FLAG
from flowrt.runtime.bounds import seconds
from flowrt.runtime.command_line import Parser
from flowrt.runtime.files import os_error_text
from flowrt.runtime.resource_limits import check_address_space, check_descriptor_limit, raise_descriptor_limit
from flowrt.runtime.standard_streams import has_lost_output, prepare_streams
from flowrt.runtime.termination import ignore_termination

DESCRIPTION = "Asynchronous streaming RL post-training of language models."
RUN_HELP = "the directory of a run, or the address of its controller, tcp://HOST:PORT"
KEYS_HELP = f"directory of keys (default: those of the run, or ${KEYS_VARIABLE})"
COMPARE_HELP = "directories of other runs, whose curves are drawn too"
STATUS_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 600.0
DOCTOR_TIMEOUT_S = 60.0
PAGE_PORT = 8265
WATCH_HELP = f"{WATCH_FLAG} [PORT] serves the page of the run while it goes on, at port {PAGE_PORT} or PORT."
LARGEST_PORT = 65535
EVAL_KEYS = (
    "eval.split",
    "data.prompt_key",
    "data.answer_key",
    "data.chat_template",
    "data.chat_template_kwargs",
    "data.system_prompt",
    "data.prefill",
    "data.max_prompt_tokens",
    "data.overlong",
)
"""Keys of how rows become prompts, which ``flowrt eval`` takes as flags for data of another form than the run's."""


class MainParser(Parser):
    """The parser of ``flowrt COMMAND``, whose help also lists the recipes."""

    def format_help(self) -> str:
        from flowrt.recipes.tasks.registry import RECIPES

        recipes = "".join(f"    {name:<12}{recipe.summary}\n" for name, recipe in RECIPES.items())
        recipes += f"    {'FILE.py':<12}a task of your own, in one file\n"
        return (
            f"{super().format_help()}\nrecipes:\n{recipes}\nflowrt COMMAND --help lists the arguments of a command, "
            "flowrt run --help all every key of a run.\n"
        )


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A subcommand: its line in ``flowrt --help``, its implementation and its arguments."""

    summary: str
    run: Callable[[argparse.Namespace], int]
    """Takes the parsed arguments; returns the exit code."""
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds the arguments to the parser; None: `run` gets all words after the command's name as ``words``."""


def _run(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.local_run import run
    from flowrt.recipes.config_io import parse

    page_port, words = _split_page_port(arguments.words)
    return run(parse(words, help_notes=WATCH_HELP), console(), page_port)


def _split_page_port(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """The port of ``--watch [PORT]``, None without the flag, and the other words. Raises ConfigError."""
    for at, word in enumerate(words):
        flag, equals, port = word.partition("=")
        if flag != WATCH_FLAG:
            continue
        following = words[at + 1 : at + 2]
        has_port = not equals and bool(following) and following[0].isdecimal()
        port = port if equals else following[0] if has_port else str(PAGE_PORT)
        try:
            return _port(port), [*words[:at], *words[at + 1 + has_port :]]
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{WATCH_FLAG}: {error}") from None
    return None, list(words)


def _config(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.absolute_paths import with_absolute_paths
    from flowrt.recipes.config_io import parse, to_toml

    sys.stdout.write(to_toml(with_absolute_paths(parse(arguments.words, "flowrt config"))))
    return EXIT_OK


def _resume(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.resume import resume
    from flowrt.recipes.config_io import RECIPE_NAMES, defaults
    from flowrt.recipes.resume_overrides import apply_overrides

    page_port, words = _split_page_port(arguments.words)
    run_dirs, flags = _split_run_dir(words)
    if not run_dirs and topic_of(flags) is not None:
        apply_overrides(defaults(RECIPE_NAMES[0]), flags, WATCH_HELP)
    if len(run_dirs) != 1:
        raise ConfigError("flowrt resume takes a run directory [--steps N] [--KEY VALUE ...] [--watch [PORT]]")
    return resume(Path(run_dirs[0]), flags, console(), page_port)


def _split_run_dir(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The positional words, and the flags with their values."""
    places: list[str] = []
    flags: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("-"):
            places.append(word)
            continue
        flags.append(word)
        if rest and "=" not in word and (word not in HELP_FLAGS or not rest[0].startswith("-")):
            flags.append(rest.popleft())
    return places, flags


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--run", dest="named_run", default="", metavar="RUN", help="the same")
    parser.add_argument("--controller", default="", metavar="RUN", help="the same")
    parser.add_argument("--keys", default="", metavar="DIR", help=KEYS_HELP)
    parser.add_argument("--json", action="store_true", help="print the controller's answer as JSON")
    parser.add_argument(
        "--deadline-s", type=seconds, default=STATUS_TIMEOUT_S, metavar="S", help="time limit (default: %(default)s s)"
    )


def _status(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.views.status import show

    runs = [run for run in (arguments.run, arguments.named_run, arguments.controller) if run]
    if len(runs) != 1:
        raise ConfigError("flowrt status takes one RUN: the directory of a run, or tcp://HOST:PORT")
    return show(runs[0], arguments.keys, arguments.deadline_s, console(), as_json=arguments.json)


def _ledger_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of a run")
    parser.add_argument(
        "--prompt",
        type=_prompt,
        metavar="N",
        help="print the history of this prompt: its number, or NAME:ROW",
    )
    parser.add_argument("--epoch", type=_whole_number, metavar="E", help="only of this epoch")


def _ledger(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.views.ledger import show

    show(arguments.run_dir, arguments.prompt or "", arguments.epoch, console())
    return EXIT_OK


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of a run, live or ended")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--at", type=_run_clock, metavar="S", help="the state S seconds after the start of the run")
    when.add_argument(
        "--until", default="", metavar="CONDITION", help="the state when this first holds, as 'wait > 60' (seconds)"
    )
    when.add_argument("--to", default="", metavar="TERM:EVENT", help="the state after this event of a controller")
    parser.add_argument("--why", default="", metavar="PROMPT", help="each decision about PROMPT, or EPOCH:PROMPT")
    parser.add_argument("--check", action="store_true", help="assert all invariants of the state after each event")
    parser.add_argument("--force", action="store_true", help="replay also with other sources than those of the run")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _replay(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.views.replay import ReplayOptions, show

    options = ReplayOptions(
        at_s=arguments.at,
        until=arguments.until,
        to=arguments.to,
        as_json=arguments.json,
        why=arguments.why,
        check=arguments.check,
        force=arguments.force,
    )
    return show(arguments.run_dir, options, console())


def _samples_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of a run, going on or not")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--step", type=_whole_number, metavar="N", help="of this step (with --eval: version)")
    steps.add_argument("--steps", type=_range, metavar="A:B", help="of steps A to B")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--worst", type=_count, metavar="K", help="the K samples with the lowest rewards")
    which.add_argument("--best", type=_count, metavar="K", help="the K samples with the highest rewards")
    which.add_argument("--random", type=_count, metavar="K", help="K samples at random, the same ones each time")
    which.add_argument("--newest", type=_count, metavar="K", help="the K samples of the last steps (default: 8)")
    parser.add_argument("--prompt", type=_prompt, metavar="N", help="of this prompt, or NAME:ROW")
    parser.add_argument("--length", type=_range, metavar="A:B", help="whose responses have A to B tokens")
    parser.add_argument(
        "--reason",
        default="",
        metavar="WORD",
        help="whose reward failed so, or that were dropped so: timeout, filtered",
    )
    parser.add_argument("--grep", default="", metavar="REGEX", help="whose prompt or completion contains this")
    parser.add_argument("--eval", default="", metavar="NAME", help="answers of evaluations on this data set")
    parser.add_argument(
        "--by",
        choices=("group", "reward", "length", "data_set", "solve_rate"),
        help="a line for each group, with its mean and spread; or the number of samples by reward, length, data set or "
        "the share of right ones of their prompt",
    )
    parser.add_argument(
        "--right-from", type=_finite, metavar="R", help="with --by: reward from which one is right (eval.solved_reward)"
    )
    parser.add_argument(
        "--with-dropped", action="store_true", help="with --by: count the samples of dropped groups, too"
    )
    parser.add_argument("--tokens", action="store_true", help="each token with its log-probabilities and version")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--jsonl", type=Path, metavar="FILE", help="write JSON Lines instead; -: to standard output")
    files.add_argument("--parquet", type=Path, metavar="FILE", help="write Parquet instead")


def _samples(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.views.samples import SampleOptions, show
    from flowrt.observability.stored_samples import Order

    counts: dict[Order, int | None] = {
        "worst": arguments.worst,
        "best": arguments.best,
        "random": arguments.random,
        "newest": arguments.newest,
    }
    order: Order = next((name for name, count in counts.items() if count is not None), "newest")
    options = SampleOptions(
        steps=arguments.steps if arguments.step is None else (arguments.step, arguments.step),
        order=order,
        limit=counts[order],
        prompt=arguments.prompt or "",
        length=arguments.length,
        reason=arguments.reason,
        grep=arguments.grep,
        eval_name=arguments.eval,
        tokens=arguments.tokens,
        by=arguments.by,
        right_from=arguments.right_from,
        with_dropped=arguments.with_dropped,
        jsonl=arguments.jsonl,
        parquet=arguments.parquet,
    )
    return show(arguments.run_dir, options, console())


def _run_clock(text: str) -> float:
    """Seconds since the start of a run."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")
    return value


def _finite(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return value


def _range(text: str) -> tuple[int, int]:
    """A and B of A:B, with A at most B."""
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, two whole numbers of which A is not the larger one")
    return _whole_number(first), _whole_number(last)


def _count(text: str) -> int:
    if not _whole_number(text):
        raise argparse.ArgumentTypeError(f"{text} is too few; give at least 1")
    return int(text)


def _time_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of a run")
    parser.add_argument("--steps", "--step", default="", metavar="A:B", help="only of steps A to B, or of one step")
    parser.add_argument("--worker", default="", metavar="W", help="of this worker alone, from the timeline")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def _time(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.views.time import show

    show(arguments.run_dir, arguments.steps, arguments.worker, console(), as_json=arguments.json)
    return EXIT_OK


def _worker(arguments: argparse.Namespace) -> int:
    from importlib import import_module

    from flowrt.ids import ROLES

    role = arguments.words[0] if arguments.words else ""
    if role in HELP_FLAGS:
        sys.stdout.write(
            f"usage: flowrt worker ROLE --controller RUN [...]\n\nROLE is one of {', '.join(ROLES)}; "
            "flowrt worker ROLE --help lists the arguments.\n"
        )
        return EXIT_OK
    if role not in ROLES:
        raise ConfigError(f"flowrt worker takes a role, not {role!r}; there is: {', '.join(ROLES)}")
    sys.argv = [f"flowrt worker {role}", *arguments.words[1:]]
    import_module(f"flowrt.roles.{role}").start()
    return EXIT_OK


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="the directory of a run, going on or not, or a folder that holds runs"
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=PAGE_PORT,
        metavar="PORT",
        help="port of the page; 0: any (default: %(default)s)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen at (default: %(default)s, this host alone)",
    )
    parser.add_argument("--keys", default="", metavar="DIR", help=KEYS_HELP)
    parser.add_argument("--compare", nargs="+", type=Path, default=[], metavar="OTHER", help=COMPARE_HELP)
    parser.add_argument("--with-parent", action="store_true", help="end when the process that started this one ends")


def _watch(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.watch import WatchOptions, watch

    options = WatchOptions(
        run_dir=arguments.run_dir,
        host=arguments.host,
        port=arguments.port,
        keys=arguments.keys,
        compare=tuple(arguments.compare),
        with_parent=arguments.with_parent,
    )
    return watch(options, console())


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of a run, going on or not")
    parser.add_argument(
        "--hf", type=Path, metavar="DIR", help="write the model to this new directory, for transformers"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=_whole_number, metavar="N", help="with --hf: of the checkpoint after N steps; default: newest"
    )
    which.add_argument("--best", action="store_true", help="with --hf: the best weights (checkpoint.best)")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev (.json, .json.gz)"
    )
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write TensorBoard files to this directory")
    parser.add_argument("--wandb", action="store_true", help="log to W&B; offline unless a key is set")
    parser.add_argument("--wandb-dir", type=Path, metavar="DIR", help="directory of its files (default: RUN/wandb)")
    parser.add_argument("--prometheus", metavar="FILE", help="write Prometheus text to this file; -: to the terminal")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page of the run as one file")
    parser.add_argument(
        "--compare", nargs="+", type=Path, default=[], metavar="OTHER", help=f"with --html: {COMPARE_HELP}"
    )
    parser.add_argument("--exporter", default="", metavar="FILE.py:CLASS", help="an exporter of your own")
    parser.add_argument("--steps", default="", metavar="A:B", help="only these steps")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends (tensorboard, wandb, exporter)")


def _export(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.export import ExportOptions, export
    from flowrt.launcher.export_model import ModelExport

    model = None
    if arguments.hf is not None:
        model = ModelExport(arguments.run_dir, arguments.hf, arguments.step, arguments.best)
    elif arguments.best or arguments.step is not None:
        raise ConfigError("--step and --best change nothing without --hf DIR; leave them out")
    options = ExportOptions(
        run_dir=arguments.run_dir,
        perfetto=arguments.perfetto,
        tensorboard=arguments.tensorboard,
        wandb=arguments.wandb,
        wandb_dir=arguments.wandb_dir,
        prometheus=arguments.prometheus,
        html=arguments.html,
        model=model,
        compare=tuple(arguments.compare),
        exporter=arguments.exporter,
        steps=arguments.steps,
        follow=arguments.follow,
    )
    return export(options, console())


def _drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="its name, as given by flowrt run or with --name")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", default="", metavar="RUN", help=RUN_HELP)
    where.add_argument("--controller", default="", metavar="RUN", help="the same")
    parser.add_argument("--keys", default="", metavar="DIR", help=KEYS_HELP)
    parser.add_argument(
        "--within-s",
        type=seconds,
        default=DRAIN_TIMEOUT_S,
        metavar="S",
        help="time limit for the worker to leave (default: %(default)s s)",
    )


def _drain(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.drain_command import drain

    run = arguments.run or arguments.controller
    return drain(arguments.worker, run, arguments.keys, arguments.within_s, console())


def _keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a new directory for the keys")
    parser.add_argument("workers", nargs="*", default=[], metavar="NAME", help="a worker that gets a key of its own")


def _keys(arguments: argparse.Namespace) -> int:
    from flowrt.net.curve_keys import write_keys

    directory = arguments.directory
    write_keys(Path(directory), arguments.workers)
    sys.stdout.write(
        f"keys in {directory}: use them with flowrt run --controller.keys {directory}, or {KEYS_VARIABLE} in the "
        "environment of the controller and of each worker\n"
    )
    return EXIT_OK


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default="",
        metavar="FILE",
        help="configuration whose memory is estimated (default: recipe arithmetic)",
    )
    parser.add_argument("--device", default="", metavar="NAME", help="device of the run: cpu, cuda, npu, or auto")
    parser.add_argument("--run-dir", default="", metavar="DIR", help="directory that the run will be written to")
    parser.add_argument("--model", default="", metavar="DIR", help="model that the run will start from")
    parser.add_argument("--controller", default="", metavar="RUN", help=f"{RUN_HELP}: the round trip is measured")
    parser.add_argument(
        "--keys",
        default=os.environ.get(KEYS_VARIABLE, ""),
        metavar="DIR",
        help=f"directory of keys (default: ${KEYS_VARIABLE})",
    )
    parser.add_argument(
        "--on", default="", metavar="PREFIX", help="command prefix that starts a command on all nodes, like srun"
    )
    parser.add_argument(
        "--nodes", type=_count, default=1, metavar="N", help="how many nodes PREFIX starts a command on"
    )
    parser.add_argument(
        "--deadline-s",
        type=seconds,
        default=DOCTOR_TIMEOUT_S,
        metavar="S",
        help="time limit for the controller and the other nodes to answer (default: %(default)s s)",
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.doctor.command import DoctorOptions, doctor

    options = DoctorOptions(
        config=arguments.config,
        device=arguments.device,
        run_dir=arguments.run_dir,
        model=arguments.model,
        controller=arguments.controller,
        keys=arguments.keys,
        on=arguments.on,
        nodes=arguments.nodes,
        deadline_s=arguments.deadline_s,
    )
    return doctor(options, console())


def _data(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.data_check import check_data, read_arguments

    action, *words = arguments.words or [""]
    if action in HELP_FLAGS:
        words = arguments.words
    elif action != "check":
        raise ConfigError(f"flowrt data takes check, not {action!r}: flowrt data check --model DIR --data PATH")
    return check_data(*read_arguments(words), console())


def _reward(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.reward_check import reward_check

    if arguments.words[:1] != ["check"] and topic_of(arguments.words) is None:
        raise ConfigError(
            "flowrt reward takes the word check: flowrt reward check --data PATH --reward FUNCTION, or FILE.py"
        )
    return reward_check(arguments.words[arguments.words[:1] == ["check"] :], console())


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="the directory of a run that has ended")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=_whole_number, metavar="N", help="the checkpoint after N steps; default: newest")
    which.add_argument("--best", action="store_true", help="the best weights (checkpoint.best)")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="data set, repeatable; default: those of the run",
    )
    for key in EVAL_KEYS:
        parser.add_argument(f"--{key.replace('_', '-')}", dest=key, metavar="VALUE", help=f"of the rows ({key})")
    parser.add_argument("--samples", type=_whole_number, metavar="N", help="answers to each prompt (eval.samples)")
    parser.add_argument("--temperature", type=float, metavar="T", help="of sampling (eval.temperature)")
    parser.add_argument("--limit", type=_whole_number, metavar="N", help="prompts of each data set (eval.limit)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")


def _eval(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.evaluate import EvalOptions, evaluate

    options = EvalOptions(
        step=arguments.step,
        best=arguments.best,
        data=tuple(arguments.data),
        flags=tuple(f"--{key}={value}" for key in EVAL_KEYS if (value := getattr(arguments, key)) is not None),
        samples=arguments.samples,
        temperature=arguments.temperature,
        limit=arguments.limit,
    )
    return evaluate(arguments.run_dir, options, arguments.json, console())


def _slurm(arguments: argparse.Namespace) -> int:
    from flowrt.launcher.slurm import write

    sys.stdout.write("".join(f"{path}\n" for path in write(arguments.words)))
    return EXIT_OK


def _prompt(text: str) -> str:
    """A prompt: its number, or the name of a data set and the number of a row."""
    _whole_number(text.rpartition(":")[2])
    return text


def _port(text: str) -> int:
    port = _whole_number(text)
    if port > LARGEST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is no port; they end at {LARGEST_PORT}")
    return port


MAX_DIGITS = 18
"""Of a whole number: those of SQLite have 64 bits."""


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    if len(text) > MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"{text:.40} has {len(text)} digits; give a number of at most {MAX_DIGITS}")
    return int(text)


COMMANDS: Mapping[str, Subcommand] = {
    "run": Subcommand("train a model: flowrt run RECIPE|FILE.py[:NAME] [--KEY VALUE ...] [--watch [PORT]]", _run),
    "config": Subcommand("print the configuration of such a run as TOML", _config),
    "resume": Subcommand("resume a run from its newest checkpoint", _resume),
    "eval": Subcommand("evaluate a checkpoint of a run, or its best weights", _eval, _eval_arguments),
    "status": Subcommand("print the workers and the wait-for graph of a running job", _status, _status_arguments),
    "watch": Subcommand("serve the page of a run, or of a folder of runs", _watch, _watch_arguments),
    "ledger": Subcommand("print how many prompts are in each state, or the history of one", _ledger, _ledger_arguments),
    "export": Subcommand(
        "export a run: model, Perfetto, TensorBoard, W&B, Prometheus, HTML", _export, _export_arguments
    ),
    "replay": Subcommand("show the controller's state at any moment of a run", _replay, _replay_arguments),
    "samples": Subcommand("print stored samples: texts, rewards, tokens", _samples, _samples_arguments),
    "time": Subcommand("print where the time of a run went, by role and cause", _time, _time_arguments),
    "worker": Subcommand("join a running job: flowrt worker ROLE --controller RUN", _worker),
    "drain": Subcommand("remove a worker from a running job without losing a sample", _drain, _drain_arguments),
    "keys": Subcommand("make keys for the controller and the workers", _keys, _keys_arguments),
    "doctor": Subcommand("check this machine, or all nodes of a job, before a run", _doctor, _doctor_arguments),
    "data": Subcommand("check a data set: flowrt data check --model DIR --data PATH [--show N] [--deep]", _data),
    "reward": Subcommand(
        "check reward functions: flowrt reward check --data PATH --reward FUNCTION [--limit N]", _reward
    ),
    "slurm": Subcommand("write SLURM templates with the values of a site", _slurm),
}


STARTING = ("run", "resume", "eval", "worker", "doctor")
"""Commands that start processes of a run, or are one."""


def _parser() -> MainParser:
    """The parser of the whole command line."""
    parser = MainParser(prog="flowrt", usage="flowrt COMMAND [...]", description=DESCRIPTION)
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", prog="flowrt", parser_class=Parser
    )
    for name, command in COMMANDS.items():
        if command.add_arguments is None:
            # No word begins with NUL, so none is a flag to this parser.
            words = commands.add_parser(name, help=command.summary, add_help=False, prefix_chars="\0")
            words.add_argument("words", nargs=argparse.REMAINDER)
        else:
            command.add_arguments(commands.add_parser(name, help=command.summary, description=command.summary))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; ``arguments`` default to those of the process.

    Returns the exit code: 0 done, 1 failed, 2 bad input, 3 no progress, 5 stopped by a guard, 130 interrupted.
    """
    if arguments is None:
        prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    errors = console(stderr=True)
    try:
        code = _call(words)
        if arguments is None:
            ignore_termination()
        # The results of a run are in its directory; those of other commands are what they print.
        is_lost = has_lost_output() and not (words and words[0] in ("run", "resume", "watch"))
        return EXIT_FAILED if is_lost and code == EXIT_OK else code
    except ConfigError as error:
        errors.print(f"flowrt: {error}", soft_wrap=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        errors.print("flowrt: interrupted")
        return EXIT_INTERRUPTED
    except OSError as error:
        errors.print(f"flowrt: {os_error_text(error)}", soft_wrap=True)
        return EXIT_FAILED
    except FlowError as error:
        errors.print(f"flowrt: {error}", soft_wrap=True)
        return EXIT_FAILED


def _call(words: Sequence[str]) -> int:
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise ConfigError(f"there is no command {words[0]!r}; there is: {', '.join(sorted(COMMANDS))}")
    parser = _parser()
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        what = " ".join(word for word in ("flowrt", arguments.command) if word)
        raise ConfigError(f"{what} takes no {' '.join(map(repr, unknown))}; {what} --help lists the arguments")
    if arguments.version:
        from importlib.metadata import version

        sys.stdout.write(f"flowrt {version('flowrt')}\n")
        return EXIT_OK
    if arguments.command is None:
        parser.print_help()
        return EXIT_BAD_INPUT
    if arguments.command in STARTING:
        raise_descriptor_limit()
        check_descriptor_limit()
        check_address_space()
    return COMMANDS[arguments.command].run(arguments)


if __name__ == "__main__":
    sys.exit(main())
