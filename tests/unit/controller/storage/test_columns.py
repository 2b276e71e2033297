"""Packed columns: any values read back exactly, and similar values need little space."""

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrt.controller.storage.columns import MAX_COUNT, ColumnPacker, ColumnReader

whole = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)
leaves = (
    st.none() | st.booleans() | whole | st.floats() | st.text(max_size=4) | st.binary(max_size=20) | st.just(bytes(16))
)
shapes = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=12)
similar = st.sampled_from(
    (
        whole,
        st.floats(),
        st.integers(0, 10**12).map(lambda ns: ns / 1e9),
        st.lists(whole, max_size=4).map(lambda words: struct.pack(f"<{len(words)}q", *words)),
        st.tuples(st.text(max_size=3), whole, st.binary(max_size=9) | whole),
    )
).flatmap(lambda strategy: st.lists(strategy, max_size=40))


def exact(values: Any) -> str:
    """Text that differs between values that differ, in type or bits too."""
    if isinstance(values, tuple | list):
        return f"({','.join(map(exact, values))})"
    return struct.pack("d", values).hex() if type(values) is float else f"{type(values).__name__} {values!r}"


def round_trip(packed: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(packed), use_list=False)


@given(st.lists(st.lists(shapes, max_size=12) | similar, max_size=4))
def test_columns_of_a_block_read_back_exactly(columns: list[list[Any]]) -> None:
    packer, reader = ColumnPacker(), ColumnReader()
    packed = round_trip([packer.pack(column) for column in columns])
    assert [exact(reader.read(column)) for column in packed] == [exact(column) for column in columns]


@given(st.lists(st.tuples(shapes, shapes), min_size=1, max_size=9))
def test_fields_read_back_exactly(rows: list[tuple[Any, Any]]) -> None:
    packed = round_trip(ColumnPacker().pack_fields(rows))
    assert exact(ColumnReader().read_fields(packed)) == exact(rows)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ([7] * 1000, 10),
        (list(range(10**6, 10**6 + 1000)), 20),
        ([1.0] * 1000, 20),
        ([(10**12 + index) / 1e9 for index in range(1000)], 30),
        ([struct.pack("<3q", 1, 2, 3)] * 1000, 60),
        ([("policy", 3)] * 1000, 40),
    ],
)
def test_columns_of_similar_values_are_small(values: list[Any], size: int) -> None:
    assert len(msgpack.packb(ColumnPacker().pack(values))) <= size


@given(shapes)
def test_invalid_column_data_is_refused(content: Any) -> None:
    try:
        values = ColumnReader().read(round_trip(content))
    except (ValueError, TypeError, LookupError, OverflowError):
        return
    assert isinstance(values, list)


def test_a_column_of_impossible_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a column of"):
        ColumnReader().read((1, MAX_COUNT + 1, 0))
