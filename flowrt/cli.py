"""The ``flowrt`` command."""

import sys
from collections.abc import Sequence

from rich.console import Console

from flowrt.errors import EXIT_BAD_INPUT, EXIT_FAILED, ConfigError, FlowError

USAGE = """usage: flowrt run [arithmetic | gsm8k] [--config FILE.toml] [--KEY VALUE ...]

  flowrt run                               GRPO on generated arithmetic, on this machine
  flowrt run gsm8k --data FILE.jsonl       GRPO on word problems from a file
  flowrt run [RECIPE] --help               every knob, one sentence each
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed, 2 bad input, 3 stalled, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    errors = Console(stderr=True)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if words else EXIT_BAD_INPUT
    if words[0] != "run":
        errors.print(f"flowrt: there is no command {words[0]!r}; there is: run", highlight=False, markup=False)
        return EXIT_BAD_INPUT
    # Imported late: `flowrt --help` should not wait for what a run needs.
    from flowrt.launch.local import run
    from flowrt.recipes.load import parse

    try:
        code: int = run(parse(words[1:]), Console())
        return code
    except ConfigError as error:
        errors.print(f"flowrt: {error}", highlight=False, markup=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except FlowError as error:
        errors.print(f"flowrt: {type(error).__name__}: {error}", highlight=False, markup=False, soft_wrap=True)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
