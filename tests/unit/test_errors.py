"""Texts of errors."""

import pytest

from flowrt.errors import first_line


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
