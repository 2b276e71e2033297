"""Columns of a row keep their types on the way to a reward function, or are refused by name."""

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.errors import ConfigError
from flowrt.recipes.data.files import open_rows
from flowrt.recipes.data_config import DataConfig
from flowrt.recipes.tasks.problems import problem
from flowrt.rewards.rows import NoColumnType, decode_row, encode_row, json_text

scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.uuids()),
    *(st.dates(), st.times(), st.datetimes(), st.datetimes(timezones=st.just(UTC)), st.timedeltas()),
    st.decimals(allow_nan=False),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.just("\0"), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


def types(value: object) -> object:
    """The types of a value and of all in it."""
    if isinstance(value, dict):
        return {key: (type(key), types(content)) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [types(member) for member in value]
    return type(value)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_columns_come_back_with_their_types(columns: dict[str, Any]) -> None:
    decoded = decode_row(encode_row(columns).encode())
    assert decoded == columns
    assert types(decoded) == types(columns)


def test_a_named_time_zone_is_kept() -> None:
    moment = datetime(2026, 3, 29, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    decoded = decode_row(encode_row({"at": moment}))["at"]
    assert (decoded, decoded.tzinfo) == (moment, ZoneInfo("Europe/Berlin"))


def test_a_server_gets_plain_json() -> None:
    row = {"b": b"ab", "a": (1, date(2026, 1, 2)), "c": Decimal("1.50"), "d": time(1), "e": UUID(int=1)}
    assert json_text(row, sort_keys=True) == (
        '{"a": [1, "2026-01-02"], "b": "YWI=", "c": "1.50", "d": "01:00:00", '
        '"e": "00000000-0000-0000-0000-000000000001"}'
    )


def test_a_column_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(NoColumnType, match="complex"):
        encode_row({"a": [{"b": 1j}]})
    with pytest.raises(ConfigError, match="here: field 'odd' has a value of type set"):
        problem({"prompt": "1", "odd": {1}}, DataConfig(prompt_key="prompt"), "here")


def test_columns_of_a_parquet_file_keep_their_types(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = {
        "prompt": "1",
        "image": {"bytes": b"\x89PNG", "path": None},
        "raw": b"\x89PNG",
        "day": date(2026, 1, 2),
        "at": datetime(2026, 1, 2, 3, 4, 5, 6),
        "price": Decimal("1.50"),
        "for": timedelta(seconds=3),
    }
    mapped = pa.array([[("k", b"v")]], pa.map_(pa.string(), pa.binary()))
    parquet.write_table(pa.Table.from_pylist([row]).append_column("map", mapped), tmp_path / "rows.parquet")
    read = open_rows(tmp_path / "rows.parquet").row(0)
    decoded = decode_row(problem(read, DataConfig(prompt_key="prompt"), "").answer)
    assert decoded == row | {"map": [("k", b"v")]}
    assert types(decoded) == types(row | {"map": [("k", b"v")]})
