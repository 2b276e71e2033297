"""Child process of tests: replays recordings of simulated runs. Reads a directory per line, prints a line of JSON."""

import json
import sys
from pathlib import Path

from flowrt.errors import FlowError
from tests.simulation.recorded_runs import replayed_states


def main() -> None:
    for line in sys.stdin:
        try:
            answer: dict[str, str] = dict(replayed_states(Path(line.strip())))
        except FlowError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
