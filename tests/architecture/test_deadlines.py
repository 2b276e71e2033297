"""No test compares elapsed seconds with a limit: what takes too long on a busy machine is no defect."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time", "time_ns", "monotonic_ns"}


def limits_on_elapsed_time(tree: ast.AST) -> Iterator[int]:
    """Lines that assert that a difference of two times is below something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield from (node.lineno for one in ast.walk(node.test) if isinstance(one, ast.Compare) and _is_limit(one))


def _is_limit(compare: ast.Compare) -> bool:
    sides = [compare.left, *compare.comparators]
    return any(
        (isinstance(operator, ast.Lt | ast.LtE) and _is_elapsed(left))
        or (isinstance(operator, ast.Gt | ast.GtE) and _is_elapsed(right))
        for operator, left, right in zip(compare.ops, sides, sides[1:], strict=False)
    )


def _is_elapsed(side: ast.expr) -> bool:
    """Whether this is a difference with the reading of a clock."""
    return isinstance(side, ast.BinOp) and isinstance(side.op, ast.Sub) and _reads_clock(side.left)


def _reads_clock(side: ast.expr) -> bool:
    if not isinstance(side, ast.Call):
        return False
    return ast.unparse(side.func).split(".")[-1] in CLOCKS


def test_no_test_limits_elapsed_time() -> None:
    lines = [
        f"{path.relative_to(TESTS.parent)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in limits_on_elapsed_time(ast.parse(path.read_text()))
    ]
    assert not lines, f"compare order or counts, or wait with a deadline that is far off: {lines}"


@pytest.mark.parametrize(
    ("code", "detected"),
    [
        ("assert time.monotonic() - start_s < 3", True),
        ("assert 1 <= perf_counter() - start_s < 3", True),
        ("assert 3.0 > loop.time() - start_s, name", True),
        ("assert time.monotonic() - start_s >= HELD_S", False),
        ("assert time.monotonic() < end_s, 'a deadline'", False),
        ("assert run.took_s < LEASE_S", False),
    ],
)
def test_the_check_detects_limits(code: str, detected: bool) -> None:
    assert bool(list(limits_on_elapsed_time(ast.parse(code)))) is detected
