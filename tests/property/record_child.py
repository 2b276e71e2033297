"""Records simulated runs: ``python -m tests.property.record_child RUNS DIR`` prints a line of JSON for each."""

import json
import sys
from pathlib import Path

from tests.simulation.recorded_runs import RecordedCluster


def main() -> None:
    for number in range(int(sys.argv[1])):
        run_dir = Path(sys.argv[2]) / str(number)
        run_dir.mkdir(parents=True)
        states = RecordedCluster(number, run_dir).play().states
        sys.stdout.write(json.dumps({"run_dir": str(run_dir), "states": states}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
