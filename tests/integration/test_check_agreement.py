"""`flowrt data check` and `flowrt reward check` refuse exactly what `flowrt run` refuses, on drawn command lines."""

from pathlib import Path

import pytest

from flowrt.errors import EXIT_BAD_INPUT, EXIT_OK
from tests.proofs.check_agreement import verdicts, write_files

LINES = 24


@pytest.mark.slow
def test_checks_and_runs_agree_on_drawn_command_lines(tmp_path: Path) -> None:
    write_files(tmp_path)
    results = [verdicts(tmp_path, number) for number in range(LINES)]
    for verdict in results:
        assert verdict.agree, (verdict.flags, verdict.codes, verdict.outputs)
    assert {code for verdict in results for code in verdict.codes.values()} == {EXIT_OK, EXIT_BAD_INPUT}
    assert not list(tmp_path.glob("run-*"))  # nothing is written
