"""``python -m flowrt``: the ``flowrt`` command. Ctrl-C while its modules are imported prints a sentence, too."""

import sys

from flowrt.errors import EXIT_INTERRUPTED


def main() -> int:
    """Run the command of this process; returns its exit code."""
    try:
        from flowrt.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        sys.stderr.write("flowrt: interrupted\n")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
