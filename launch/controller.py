"""Script of `flowrt.launcher.controller_main`: `python launch/controller.py --config RUN/config.toml`."""

import sys

from flowrt.launcher.controller_main import main

if __name__ == "__main__":
    sys.exit(main())
