"""The ``flowrt`` command."""

import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console

from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, ConfigError, FlowError

USAGE = """usage: flowrt run [arithmetic | gsm8k] [--config FILE.toml] [--KEY VALUE ...]
       flowrt status RUN | --controller ADDRESS [--keys DIR] [--json]
       flowrt resume RUN [--steps N] [--KEY VALUE ...]
       flowrt ledger RUN [--prompt N [--epoch E]]
       flowrt worker ROLE --controller ADDRESS [--name NAME]
       flowrt drain WORKER --run RUN | --controller ADDRESS
       flowrt keys DIR [NAME ...]
       flowrt doctor [--config FILE] [--on WORDS --nodes N] [--controller ADDRESS] [--json | --merge FILE ...]
       flowrt templates [DIR] [--partition NAME] [--account NAME] [--nodes N] [--gpus N] [...]

  flowrt run                               GRPO on generated arithmetic, on this machine
  flowrt run gsm8k --data FILE.jsonl       GRPO on word problems from a file
  flowrt run [RECIPE] --help               every knob, one sentence each
  flowrt status RUN                        who waits for whom in a run that goes on
  flowrt resume RUN [--steps N]            go on with a run from its newest checkpoint (to step N)
  flowrt resume RUN --trainer.ranks N      the same with other ranks, workers or hosts; RUN --help: what may change
  flowrt ledger RUN                        how many prompts of a run are in which state
  flowrt ledger RUN --prompt N             the life of a prompt
  flowrt worker ROLE --controller ADDRESS  join a running job, as a rollout, reward or reference worker, say
  flowrt drain WORKER --run RUN            let a worker leave a running job without losing a sample
  flowrt keys DIR [NAME ...]               make keys: one for the controller, one for all workers or for each NAME
  flowrt doctor                            can a run go well on this machine? --on 'srun ...': on these nodes?
  flowrt templates DIR --partition NAME    write SLURM templates with this site's values; --help lists them
"""
ROLES = ("reference", "reward", "rollout", "source", "trainer")
HELP = ("-h", "--help")
KEYS_HINT = "FLOWRT_KEYS in the environment of the controller and of each worker"


def _run(words: list[str]) -> int:
    # Imported late: `flowrt --help` should not wait for what a run needs.
    from flowrt.launch.local import run
    from flowrt.recipes.load import parse

    code: int = run(parse(words), Console())
    return code


def _keys(words: list[str]) -> int:
    from flowrt.wire.keys import write_keys
    from flowrt.wire.sockets import new_pair

    if not words or any(word.startswith("-") for word in words):
        raise ConfigError("flowrt keys takes a new directory, and names of workers if each is to have its own key")
    write_keys(Path(words[0]), words[1:], new_pair)
    sys.stdout.write(f"keys in {words[0]}: use them with flowrt run --controller.keys {words[0]}, or {KEYS_HINT}\n")
    return 0


def _doctor(words: list[str]) -> int:
    from flowrt.launch.doctor import doctor

    code: int = doctor(words, Console())
    return code


def _templates(words: list[str]) -> int:
    from flowrt.launch.templates import write

    paths = write(words)
    sys.stdout.write("".join(f"{path}\n" for path in paths))
    return 0


def _status(words: list[str]) -> int:
    from flowrt.launch.status import run

    code: int = run(words, Console())
    return code


def _resume(words: list[str]) -> int:
    from flowrt.launch.resume import resume

    run_dir, flags = _run_dir("flowrt resume takes a run directory [--steps N] [--KEY VALUE ...]", words)
    code: int = resume(run_dir, flags, Console())
    return code


def _ledger(words: list[str]) -> int:
    from flowrt.launch.accounts import show

    takes = "flowrt ledger takes a run directory [--prompt N] [--epoch N]"
    run_dir, flags = _run_dir(takes, [part for word in words for part in word.split("=", 1)])
    values = dict(zip(flags[::2], [*flags[1::2], ""], strict=False))
    if not values.keys() <= {"--prompt", "--epoch"} or not all(value.isdecimal() for value in values.values()):
        raise ConfigError(f"{takes}, and --prompt a whole number; not {' '.join(words)!r}")
    prompt, epoch = (int(values[flag]) if flag in values else None for flag in ("--prompt", "--epoch"))
    show(run_dir, prompt, epoch, Console())
    return 0


def _worker(words: list[str]) -> int:
    import runpy

    role = words[0] if words else ""
    if role not in ROLES:
        raise ConfigError(f"flowrt worker takes a role, not {role!r}; there is: {', '.join(ROLES)}")
    sys.argv = [f"flowrt worker {role}", *words[1:]]
    runpy.run_module(f"flowrt.workers.{role}", run_name="__main__", alter_sys=False)
    return 0


def _drain(words: list[str]) -> int:
    from flowrt.launch.draining import drain

    code: int = drain(words, Console())
    return code


def _run_dir(takes: str, words: list[str]) -> tuple[Path, list[str]]:
    """The run directory, and the flags, each with its value behind it or in it. Raises ConfigError: ``takes``."""
    places: list[str] = []
    flags: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            places.append(word)
        elif word in HELP or "=" in word:
            flags.append(word)
        else:
            flags += [word, *islice(rest, 1)]
    if len(places) != 1:
        raise ConfigError(takes)
    return Path(places[0]), flags


# In the order of the messages that name them.
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "doctor": _doctor,
    "drain": _drain,
    "keys": _keys,
    "ledger": _ledger,
    "resume": _resume,
    "run": _run,
    "status": _status,
    "templates": _templates,
    "worker": _worker,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 bad input, 3 stalled, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    errors = Console(stderr=True)
    # What takes a word or two is explained with all the others.
    of_few_words = len(words) == 2 and words[0] in ("keys", "ledger", "resume", "worker")
    if not words or words[of_few_words] in HELP:
        sys.stdout.write(USAGE)
        return 0 if words else EXIT_BAD_INPUT
    if words[0] not in COMMANDS:
        there_is = ", ".join(COMMANDS)
        said = f"flowrt: there is no command {words[0]!r}; there is: {there_is}"
        errors.print(said, highlight=False, markup=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    try:
        return COMMANDS[words[0]](words[1:])
    except ConfigError as error:
        errors.print(f"flowrt: {error}", highlight=False, markup=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except OSError as error:
        errors.print(f"flowrt: {error}", highlight=False, markup=False, soft_wrap=True)
        return EXIT_FAILED
    except FlowError as error:
        errors.print(f"flowrt: {type(error).__name__}: {error}", highlight=False, markup=False, soft_wrap=True)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
