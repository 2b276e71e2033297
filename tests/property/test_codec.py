"""The codec: every message round-trips; any other input raises RemoteProtocolError and nothing else."""

import contextlib
import dataclasses
import struct
import tracemalloc
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import LocalProtocolError, RemoteProtocolError
from flowrt.protocol import codec
from flowrt.protocol import messages as m
from flowrt.protocol.codec import MAX_ITEMS, decode, encode
from flowrt.protocol.messages import Incoming, LaneTurn, Part
from tests.effort import examples
from tests.simulation.message_fuzzer import LONG

INT64 = st.integers(-(2**63), 2**63 - 1)
REALS = st.floats(allow_nan=False)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Annotated:
        whole = hint.__metadata__[0] == "q"
        few = st.lists(INT64 if whole else REALS, max_size=4).map(tuple)
        return few | st.sampled_from(LONG) if whole else few
    if dataclasses.is_dataclass(hint):
        return record_of(hint)
    if get_origin(hint) is tuple:
        arguments = get_args(hint)
        if arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, arguments))
    return {int: INT64, float: REALS, str: st.text(max_size=8), bytes: st.binary(max_size=8), bool: st.booleans()}[hint]


RECORDS: dict[Any, st.SearchStrategy[Any]] = {}
"""By type: strategies are built once, because building one takes longer than drawing from it."""


def record_of(kind: Any) -> st.SearchStrategy[Any]:
    if kind not in RECORDS:
        hints = get_type_hints(kind, include_extras=True)
        values = {field.name: values_of(hints[field.name]) for field in dataclasses.fields(kind)}
        RECORDS[kind] = st.builds(kind, **values)
    return RECORDS[kind]


MESSAGES = st.sampled_from(m.MESSAGES).flatmap(record_of)
FAST = settings(max_examples=examples(300), deadline=None)


@pytest.mark.parametrize("kind", m.MESSAGES, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_every_message_round_trips(kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(record_of(kind))
    decoded = decode(encode(message))
    assert decoded == message
    assert type(decoded) is kind


def test_no_tag_is_used_twice() -> None:
    assert len(set(m.MESSAGES)) == len(m.MESSAGES)


@FAST
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_decode_to_a_message(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(data)


@FAST
@given(MESSAGES, st.data())
def test_mutated_messages_raise_only_remote_protocol_errors(message: m.Message, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if how == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif how == "cut" and len(raw) > 1:
            del raw[at]
        else:
            raw.insert(at, data.draw(st.integers(0, 255)))
    try:
        decoded = decode(bytes(raw))
    except RemoteProtocolError:
        return
    assert type(decoded) in m.MESSAGES
    encode(decoded)  # an accepted message is valid in every field


SHAPES = st.recursive(
    st.none() | st.booleans() | INT64 | REALS | st.text(max_size=4) | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@FAST
@given(st.integers(-2, len(m.MESSAGES) + 2), st.lists(SHAPES, max_size=14))
def test_any_fields_behind_a_tag_raise_only_remote_protocol_errors(tag: int, fields: list[Any]) -> None:
    with contextlib.suppress(RemoteProtocolError):
        encode(decode(msgpack.packb([tag, *fields])))


TURN = LaneTurn(sender="a", receiver="b", kind="samples", incarnation=0, sequence=0, transport="gloo")
WRONG_TYPES: dict[str, m.Message] = {
    "text for a number": m.OfferAccepted("1", 2),  # type: ignore[arg-type]
    "boolean for a number": m.OfferAccepted(True, 2),
    "number for text": m.Leave(3),  # type: ignore[arg-type]
    "fraction for a number": m.OfferAccepted(1.5, 2),  # type: ignore[arg-type]
    "number for a boolean": m.Grant(
        request=1,
        lease=2,
        slots=(),
        flows=(),
        groups=(),
        members=(),
        prompts=(),
        epochs=(),
        attempts=(),
        spans=(),
        inline=(),
        parts=(),
        incoming=(),
        closed=1,  # type: ignore[arg-type]
    ),
    "number over 64 bits": m.OfferAccepted(2**70, 2),
    "packed number over 64 bits": m.Committed(1, (2**63,), ""),
    "fraction among packed numbers": m.Committed(1, (1.5,), ""),  # type: ignore[arg-type]
    "text among packed numbers": m.Committed(1, ("1",), ""),  # type: ignore[arg-type]
    "none for packed numbers": m.Committed(1, None, ""),  # type: ignore[arg-type]
    "bytes for packed numbers": m.Committed(1, b"12", ""),  # type: ignore[arg-type]
    "text for names": m.ReleaseTensors("prompt", (), ()),  # type: ignore[arg-type]
    "none for a record": m.SendSamples(None, ()),  # type: ignore[arg-type]
    "another record": m.SendSamples(Part("a", (), ()), ()),  # type: ignore[arg-type]
    "record of another kind that has the same fields": m.SendSamples(TURN, (Incoming(TURN, ()),)),  # type: ignore[arg-type]
    "text for a pair": m.StepCompleted(1, ("ab",)),  # type: ignore[arg-type]
    "text that is not UTF-8": m.Leave("\ud800"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_encoding_wrong_field_types_raises_a_local_protocol_error(name: str) -> None:
    with pytest.raises(LocalProtocolError):
        encode(WRONG_TYPES[name])


def test_encoding_a_non_message_raises_a_local_protocol_error() -> None:
    with pytest.raises(LocalProtocolError):
        encode("hello")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        msgpack.packb([]),
        msgpack.packb([-1]),
        msgpack.packb([len(m.MESSAGES)]),
        msgpack.packb([True]),
        msgpack.packb({}),
        msgpack.packb([2, 1]),  # a heartbeat has no fields
        msgpack.packb([m.MESSAGES.index(m.Committed), 1, b"1234567", ""]),  # not whole numbers of 8 bytes
        msgpack.packb([m.MESSAGES.index(m.Committed), 1, [1, 2], ""]),  # numbers that are not packed
        msgpack.packb([m.MESSAGES.index(m.Leave), msgpack.ExtType(1, b"x")]),
        msgpack.packb([m.MESSAGES.index(m.Leave), msgpack.Timestamp(1)]),
        encode(m.Heartbeat()) + b"\x00",
    ],
)
def test_malformed_messages_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(data)


@pytest.mark.parametrize("depth", [10, 500, 1000, 2000, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(b"\x91" * depth + b"\xc0")


def test_oversized_messages_are_refused_by_encode_and_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(RemoteProtocolError, match="limit"):
        decode(bytes(1001))
    with pytest.raises(LocalProtocolError, match="limit"):
        encode(m.Leave("x" * 1000))


@pytest.mark.parametrize("head", [b"\xdd\x7f\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"])
def test_a_declared_size_without_the_data_is_refused(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(b"\x92\x04" + head)


def test_a_small_message_cannot_allocate_much_memory() -> None:
    hostile = (b"\xdd" + struct.pack(">I", MAX_ITEMS)) * 20
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(hostile)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20, f"{len(hostile)} bytes made the decoder allocate {peak} bytes"


# ---- columns of equal numbers


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40), st.integers(-(2**63), 2**63 - 1))
def test_a_column_of_equal_numbers_is_encoded_as_one_number(slots: list[int], lease: int) -> None:
    same = m.Commit(
        request=1, stage="make", slots=tuple(slots), leases=(lease,) * len(slots), parts=(), inline=(), spans=()
    )
    other = m.Commit(
        request=1, stage="make", slots=tuple(slots), leases=(*same.leases[1:], lease ^ 1), parts=(), inline=(), spans=()
    )
    assert decode(encode(same)) == same
    assert decode(encode(other)) == other
    if len(slots) > 1:
        assert len(encode(same)) <= len(encode(other)) - 8 * (len(slots) - 1)


@pytest.mark.parametrize("lease", [2**63, True, 1.0, None])
def test_the_number_of_a_column_of_equal_numbers_must_have_64_bits(lease: Any) -> None:
    raw = list(
        msgpack.unpackb(
            encode(m.Commit(request=1, stage="make", slots=(1, 2), leases=(3, 3), parts=(), inline=(), spans=()))
        )
    )
    assert raw[4] == 3
    raw[4] = lease
    with pytest.raises(RemoteProtocolError, match="leases"):
        decode(msgpack.packb(raw))
