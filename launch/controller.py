"""The controller's script: `python launch/controller.py --config RUN/config.toml`; see its module for the rest."""

import sys

from flowrt.launcher.controller_main import main

if __name__ == "__main__":
    sys.exit(main())
