"""``python -m flowrt``: the ``flowrt`` command."""

import sys

from flowrt.cli import main

if __name__ == "__main__":
    sys.exit(main())
