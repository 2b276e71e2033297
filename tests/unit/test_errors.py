"""Texts of errors."""

from collections.abc import Iterator

import pytest

from flowrt.errors import MAX_MISTAKES, ConfigError, first_line, refuse


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such file\nTraceback: …"), "no such file"),
        (RuntimeError("\n  shape mismatch\n"), "shape mismatch"),
        (OSError(), "OSError"),
    ],
)
def test_the_first_line_of_an_error_is_its_text_or_its_type(error: Exception, expected: str) -> None:
    assert first_line(error) == expected


def test_without_a_mistake_nothing_is_refused() -> None:
    refuse()
    refuse([], iter(()))


def test_a_single_mistake_is_refused_with_its_sentence() -> None:
    with pytest.raises(ConfigError) as refused:
        refuse([], ["steps is 0; use 1 or more"], ["steps is 0; use 1 or more"])
    assert str(refused.value) == "steps is 0; use 1 or more"


def test_several_mistakes_are_refused_together_and_an_error_ends_its_own_check() -> None:
    def check() -> Iterator[str]:
        yield "a is 1"
        raise ConfigError("b is 2")

    with pytest.raises(ConfigError) as refused:
        refuse(check(), ["c is 3"])
    assert str(refused.value) == "there are 3 mistakes:\n  a is 1\n  b is 2\n  c is 3"


def test_more_mistakes_than_are_listed_are_counted() -> None:
    with pytest.raises(ConfigError) as refused:
        refuse(f"key {number} is wrong" for number in range(MAX_MISTAKES + 3))
    lines = str(refused.value).splitlines()
    assert len(lines) == MAX_MISTAKES + 2
    assert lines[0] == f"there are {MAX_MISTAKES + 3} mistakes:"
    assert lines[-1] == "  and 3 more"
