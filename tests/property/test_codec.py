"""The codec: every message round-trips; any other input raises RemoteProtocolError and nothing else."""

import contextlib
import struct
import tracemalloc
from typing import Annotated, Any, get_args, get_origin

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.errors import LocalProtocolError, RemoteProtocolError
from flowrt.protocol import codec
from flowrt.protocol import messages as m
from flowrt.protocol.codec import MAX_ITEMS, decode, encode, encode_checked
from flowrt.protocol.messages import Incoming, LaneTurn, Part
from tests.effort import examples

INT64 = st.integers(-(2**63), 2**63 - 1)
REALS = st.floats(allow_nan=False)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Annotated:
        return values_of(get_args(hint)[0])
    if isinstance(hint, type) and issubclass(hint, m.ProtocolRecord):
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
        values = {field.name: values_of(field.type) for field in msgspec.structs.fields(kind)}
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


def test_the_tag_of_a_message_is_its_place() -> None:
    assert [kind.__struct_config__.tag for kind in m.MESSAGES] == list(range(len(m.MESSAGES)))


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
    "number over 64 bits in a column": m.Committed(1, (2**63,), ""),
    "fraction in a column of whole numbers": m.Committed(1, (1.5,), ""),  # type: ignore[arg-type]
    "text in a column of numbers": m.Committed(1, ("1",), ""),  # type: ignore[arg-type]
    "none for a column": m.Committed(1, None, ""),  # type: ignore[arg-type]
    "bytes for a column": m.Committed(1, b"12", ""),  # type: ignore[arg-type]
    "text for names": m.ReleaseTensors("prompt", (), ()),  # type: ignore[arg-type]
    "none for a record": m.SendSamples(None, ()),  # type: ignore[arg-type]
    "another record": m.SendSamples(Part("a", (), ()), ()),  # type: ignore[arg-type]
    "record of another kind that has the same fields": m.SendSamples(TURN, (Incoming(TURN, ()),)),  # type: ignore[arg-type]
    "text for a pair": m.StepCompleted(1, ("ab",)),  # type: ignore[arg-type]
    "text that is not UTF-8": m.Leave("\ud800"),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_worker_does_not_send_wrong_field_types(name: str) -> None:
    with pytest.raises(LocalProtocolError):
        encode_checked(WRONG_TYPES[name])


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
        msgpack.packb([m.MESSAGES.index(m.RoleCompleted), 1]),  # it has no fields
        msgpack.packb([m.MESSAGES.index(m.Committed), 1, bytes(8), ""]),  # bytes for numbers
        b"\xdc\x00\x00",
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


def test_a_message_of_too_many_items_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_ITEMS", 1000)
    largest = m.Committed(1, (2,) * 995, "x" * 5000)  # with the array, its tag and three fields
    assert decode(encode(largest)) == largest
    with pytest.raises(LocalProtocolError, match="over 1000 numbers, texts and arrays"):
        encode(m.Committed(1, (2,) * 996, "x" * 5000))


@pytest.mark.parametrize("head", [b"\xdd\x7f\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"])
def test_a_declared_size_without_the_data_is_refused(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(b"\x92\x04" + head)


@pytest.mark.parametrize(
    "head",
    [
        b"\xdd\x00\x40\x00\x00" * 20,
        b"\x93" + bytes([m.MESSAGES.index(m.SendSamples)]) + b"\x96\xa0\xa0\xa0\x00\x00\xa0" + b"\xdd\xff\xff\xff\xff",
        b"\x94" + bytes([m.MESSAGES.index(m.Committed)]) + b"\x01" + b"\xdd\xff\xff\xff\xff",
    ],
    ids=["nested arrays", "records", "numbers"],
)
def test_a_small_message_cannot_allocate_much_memory(head: bytes) -> None:
    assert peak_bytes(head + bytes(100)) < 2**20


def test_arrays_of_a_large_message_announce_no_more_than_it_has() -> None:
    turn = msgpack.packb(["a", "b", "samples", 0, 0, "gloo"])
    longer = b"\xdd" + struct.pack(">I", MAX_ITEMS)
    data = b"\x93" + bytes([m.MESSAGES.index(m.SendSamples)]) + turn + longer + b"\x93\xa1x" + longer
    assert peak_bytes(data + b"\xdb" + struct.pack(">I", MAX_ITEMS) + bytes(MAX_ITEMS)) < 2**20


def peak_bytes(data: bytes) -> int:
    """The memory that the decoder allocates at most before it refuses this data."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---- fields


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ([m.MESSAGES.index(m.Committed), 1, [2, "3"], ""], r"Committed\.refused\[1\]: Expected `int`, got `str`"),
        ([m.MESSAGES.index(m.Leave), 3], r"Leave\.error: Expected `str`, got `int`"),
        ([m.MESSAGES.index(m.Leave), "", 2**63], r"Leave\.code: Expected `int` <= 9223372036854775807"),
        (
            [m.MESSAGES.index(m.SendSamples), ["a", "b", "c", 0, 0, "d"], [["x", [], []], ["x", [1], [1, 2.5]]]],
            r"SendSamples\.parts\[1\]\.lengths\[1\]: Expected `int`, got `float`",
        ),
        (
            [m.MESSAGES.index(m.StepCompleted), 1, [["loss", None]]],
            r"StepCompleted\.metrics\[0\]\[1\]: Expected `float`",
        ),
        ([m.MESSAGES.index(m.RoleCompleted), 1], "RoleCompleted: Expected `array` of at most length 0"),
        ([len(m.MESSAGES)], "Invalid value 42"),
    ],
)
def test_an_error_names_the_field(message: list[Any], text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        decode(msgpack.packb(message))


def test_an_error_in_a_message_of_many_fields_names_it() -> None:
    raw = msgpack.unpackb(encode(WRONG_TYPES["number for a boolean"]))
    assert len(raw) > 16  # its header has three bytes
    with pytest.raises(RemoteProtocolError, match=r"Grant\.closed: Expected `bool`, got `int`"):
        decode(msgpack.packb(raw))


def test_columns_given_as_lists_and_numbers_of_numpy_are_those_of_python_for_the_receiver() -> None:
    slots: Any = list(range(20))
    reals: Any = (1, np.float64(0.5), np.float32(2))
    ids: Any = (np.int64(7), np.int32(8))
    message = m.Commit(
        request=1, stage="make", slots=slots, leases=ids, parts=(), inline=(m.Values("value", reals),), spans=()
    )
    commit = decode(encode_checked(message))
    assert isinstance(commit, m.Commit)
    assert (commit.slots, commit.leases) == (tuple(slots), (7, 8))
    assert list(map(repr, commit.inline[0].values)) == ["1.0", "0.5", "2.0"]


def test_the_first_message_of_a_worker_of_protocol_18_can_be_read_to_refuse_it_by_name() -> None:
    data = msgpack.packb([0, 18, "rollout-0", "rollout", "host", 7, ["shm:a", "gloo"], 2, "boot"])
    hello = m.Hello(18, "rollout-0", "rollout", "host", 7, ("shm:a", "gloo"), 2, "boot")
    assert decode(data) == hello
    assert encode(hello) == data
    assert hello.protocol != m.PROTOCOL
