"""A column that a message contains more than once is encoded once; references cannot allocate much memory."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import RemoteProtocolError
from flowrt.protocol import messages as m
from flowrt.protocol.codec import MAX_REFERENCE_ITEMS, MAX_REFERENCES, MIN_REFERENCE_ITEMS, decode, encode
from flowrt.protocol.messages import Incoming, LaneTurn, Part
from tests.effort import examples

TURN = LaneTurn(sender="a", receiver="b", kind="samples", incarnation=0, sequence=0, transport="gloo")
LENGTHS = (
    0,
    1,
    MIN_REFERENCE_ITEMS - 1,
    MIN_REFERENCE_ITEMS,
    MIN_REFERENCE_ITEMS + 1,
    100,
    MAX_REFERENCE_ITEMS,
    MAX_REFERENCE_ITEMS + 1,
)


def part_of(ids: tuple[int, ...]) -> Part:
    return Part("x", ids, ids)


def grant_of(slots: tuple[int, ...], parts: tuple[Part, ...], incoming: tuple[Incoming, ...]) -> m.Grant:
    zeros = (0,) * len(slots)
    return m.Grant(
        request=1,
        lease=2,
        slots=slots,
        flows=("data",),
        groups=slots,
        members=zeros,
        prompts=slots,
        epochs=zeros,
        attempts=zeros,
        spans=(slots,),
        inline=(),
        parts=parts,
        incoming=incoming,
        closed=False,
    )


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4), st.data())
def test_repeated_columns_round_trip(lengths: list[int], data: st.DataObject) -> None:
    distinct = [tuple(range(place, place + length)) for place, length in enumerate(lengths)]
    columns = st.sampled_from(distinct)
    parts = tuple(map(part_of, data.draw(st.lists(columns, max_size=2 * MAX_REFERENCES))))
    message = grant_of(
        data.draw(columns), parts[:MAX_REFERENCES], (Incoming(TURN, parts[MAX_REFERENCES:]), Incoming(TURN, parts[:2]))
    )
    assert decode(encode(message)) == message


def test_a_repeated_column_takes_few_bytes_and_decodes_to_one_object() -> None:
    ids = tuple(range(1000))
    part = part_of(ids)
    data = encode(grant_of(ids, (part,) * 3, (Incoming(TURN, (part,) * 3),)))
    assert len(data) < 1.05 * 8 * len(ids)
    grant = decode(data)
    assert isinstance(grant, m.Grant)
    assert all(part.ids is grant.slots for part in (*grant.parts, *grant.incoming[0].parts))


def test_equal_columns_in_two_objects_round_trip() -> None:
    left, right = (tuple(range(first, first + 100)) for first in (7, 7))
    message = m.ReleaseTensors((), left, right)
    assert decode(encode(message)) == message


def test_columns_given_as_lists_round_trip_as_tuples() -> None:
    slots: Any = list(range(20))
    ids = tuple(range(100, 120))
    parts = (part_of(ids), part_of(ids))
    data = encode(
        m.Grant(
            request=1,
            lease=2,
            slots=slots,
            flows=("data",),
            groups=ids,
            members=slots,
            prompts=ids,
            epochs=(0,) * 20,
            attempts=ids,
            spans=(),
            inline=(),
            parts=parts,
            incoming=(),
            closed=False,
        )
    )
    grant = decode(data)
    assert isinstance(grant, m.Grant)
    assert grant.slots == grant.members == tuple(slots)
    assert {grant.groups, grant.prompts, grant.attempts, *(part.ids for part in grant.parts)} == {ids}


SEND_SAMPLES = m.MESSAGES.index(m.SendSamples)
RAW_TURN = ["a", "b", "samples", 0, 0, "gloo"]
PACKED = bytes(8 * MIN_REFERENCE_ITEMS)


@pytest.mark.parametrize("reference", [[1], [-1], [True], ["0"], [], [0, 0], [[0]], [None]], ids=str)
def test_an_invalid_reference_is_refused(reference: list[object]) -> None:
    data = msgpack.packb([SEND_SAMPLES, RAW_TURN, [["x", PACKED, 0], ["x", reference, 0]]])
    with pytest.raises(RemoteProtocolError):
        decode(data)


def test_a_reference_before_any_column_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"parts\[0\].ids must be packed 8-byte items"):
        decode(msgpack.packb([SEND_SAMPLES, RAW_TURN, [["x", [0], 0]]]))


def test_references_expand_to_a_bounded_number_of_items() -> None:
    column = [["x", bytes(8 * MAX_REFERENCE_ITEMS), 0]]
    largest = decode(msgpack.packb([SEND_SAMPLES, RAW_TURN, column + [["x", [0], 0]] * (MAX_REFERENCES - 1)]))
    assert isinstance(largest, m.SendSamples)
    assert sum(len(part.ids) for part in largest.parts) == MAX_REFERENCES * MAX_REFERENCE_ITEMS
    with pytest.raises(RemoteProtocolError, match=rf"parts\[{MAX_REFERENCES}\].ids"):
        decode(msgpack.packb([SEND_SAMPLES, RAW_TURN, column + [["x", [0], 0]] * MAX_REFERENCES]))
    with pytest.raises(RemoteProtocolError, match=r"parts\[1\].ids"):
        decode(msgpack.packb([SEND_SAMPLES, RAW_TURN, [["x", bytes(8 * MAX_REFERENCE_ITEMS + 8), 0], ["x", [0], 0]]]))
