"""Whether torch sees enough accelerators here: ``python -m flowrt.launcher.device_probe NAME COUNT``.

Prints the reason in one sentence if not, else nothing. The probe is a separate process: the launcher does not import
torch, and a process that has initialised CUDA must not fork.
"""

import sys

from flowrt.errors import ConfigError
from flowrt.transport.devices import choose


def main() -> None:
    name, count = sys.argv[1], int(sys.argv[2])
    try:
        choose(name, count - 1)
    except ConfigError as error:
        print(error)  # noqa: T201 (its output is the answer)


if __name__ == "__main__":
    main()
