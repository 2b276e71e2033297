"""One rank under `flowrt.workers.ranks`: it ends with torchrun from its first moment, not only once torch is loaded.

``python -m flowrt.workers.rank MODULE ARGUMENTS``.
"""

import runpy
import sys

from flowrt.lifeline import die_with_parent


def main() -> None:
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
