"""No test fails because a machine is busy: none compares elapsed seconds with a limit, or has a short deadline."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time", "time_ns", "monotonic_ns"}


def limits_on_elapsed_time(tree: ast.AST) -> Iterator[int]:
    """Lines that assert that a difference of two times is below something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield from (
                node.lineno
                for comparison in ast.walk(node.test)
                if isinstance(comparison, ast.Compare) and _is_limit(comparison)
            )


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


MIN_DEADLINE_S = 20.0
DEADLINE_AT = {"asyncio.timeout": 0, "asyncio.wait_for": 1, "api.connect": 3}
"""Index of the deadline among the arguments of a call that fails the test when it expires."""


def short_deadlines(tree: ast.Module) -> Iterator[int]:
    """Lines with a call of `DEADLINE_AT` whose deadline is short, unless the test expects its failure."""
    constants = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    expected = {id(call) for node in ast.walk(tree) if _expects_failure(node) for call in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in expected:
            at = DEADLINE_AT.get(ast.unparse(node.func), len(node.args))
            deadline = node.args[at] if at < len(node.args) else None
            if isinstance(deadline, ast.Name):
                deadline = constants.get(deadline.id)
            seconds = deadline.value if isinstance(deadline, ast.Constant) else None
            if isinstance(seconds, int | float) and seconds < MIN_DEADLINE_S:
                yield node.lineno


def _expects_failure(node: ast.AST) -> bool:
    contexts = node.items if isinstance(node, ast.With | ast.AsyncWith) else []
    return any("pytest.raises" in (text := ast.unparse(context)) or "suppress(" in text for context in contexts)


@pytest.mark.parametrize("lines_of", [limits_on_elapsed_time, short_deadlines])
def test_no_test_depends_on_the_speed_of_the_machine(lines_of: Callable[[ast.Module], Iterator[int]]) -> None:
    lines = [
        f"{path.relative_to(TESTS.parent)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        for line in lines_of(ast.parse(path.read_text()))
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


@pytest.mark.parametrize(
    ("code", "detected"),
    [
        ("async with asyncio.timeout(5):\n    pass", True),
        ("WITHIN_S = 5.0\nawait asyncio.wait_for(done, WITHIN_S)", True),
        ("await api.connect(address, 'w', 'w', 5)", True),
        ("await api.connect(address, 'w', 'w', 60)", False),
        ("with pytest.raises(WaitExpired):\n    await api.connect(address, 'w', 'w', 0.3)", False),
        ("await asyncio.wait([done], timeout=0.5)", False),
    ],
)
def test_the_check_detects_short_deadlines(code: str, detected: bool) -> None:
    assert bool(list(short_deadlines(ast.parse(code)))) is detected
