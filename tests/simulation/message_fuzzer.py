"""Input from a hostile or broken peer: nearly valid messages, and nearly valid encodings."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, get_args, get_origin

import msgspec

from flowrt.protocol.codec import encode
from flowrt.protocol.messages import MESSAGES, Message, ProtocolRecord

NAMES = ("source0", "rollout0", "rollout1", "reward0", "evaluate0", "trainer0", "policy", "samples", "weights", "")
WORDS = (
    *NAMES,
    "train",
    "eval",
    "rollout",
    "reward",
    "evaluate",
    "prompt",
    "answer",
    "response",
    "logprobs",
    "x\n\x00",
)
EDGES = (-(2**63), 2**63 - 1, 2**53 + 1, 2**32, 2**31, 10**6, 1000, 64, -2)
REALS = (0.0, -1.0, 1.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_MAX_COUNT = 4
_OPENERS = (0x90, 0x9F, 0xDC, 0xDD, 0xC4, 0xC6, 0xD9, 0xDB, 0x80, 0xDF, 0xC1, 0xC7, 0xCF, 0xCB)


class MessageFuzzer:
    """A seeded stream of messages and bytes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def message(self, kinds: Sequence[type[Message]] = MESSAGES) -> Message:
        """A message that the codec accepts, with mostly small numbers and mostly known names."""
        message: Message = self._record(self.random.choice(kinds))
        return message

    def changed(self, message: Any) -> Any:
        """The same record with a new random value of one field."""
        kind: Any = type(message)
        fields = _fields(kind)
        if not fields:
            return message
        name, hint = self.random.choice(fields)
        return msgspec.structs.replace(message, **{name: self._value(hint)})

    def mangled(self, data: bytes) -> bytes:
        """The bytes with a few random changes: bytes replaced, deleted, inserted, repeated, or the rest truncated."""
        raw, draw = bytearray(data), self.random
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(raw) + 1)
            match draw.randrange(6):
                case 0 if at < len(raw):
                    raw[at] = draw.randrange(256)
                case 1:
                    del raw[at : at + draw.randint(1, 4)]
                case 2:
                    raw[at:at] = draw.randbytes(draw.randint(1, 4))
                case 3:
                    raw[at:at] = raw[at : at + draw.randint(1, 16)] * draw.randint(1, 8)
                case 4:
                    raw[at:at] = bytes([draw.choice(_OPENERS)]) + draw.randbytes(draw.randint(0, 4))
                case _:
                    del raw[at + draw.randint(0, 8) :]
        return bytes(raw)

    def data(self) -> bytes:
        """The bytes of a message, mostly mangled."""
        data = encode(self.message())
        return data if self.random.random() < 0.05 else self.mangled(data)

    def _record(self, kind: Any) -> Any:
        return kind(**{name: self._value(hint) for name, hint in _fields(kind)})

    def _value(self, hint: Any) -> Any:
        draw = self.random
        if get_origin(hint) is Annotated:
            return self._value(get_args(hint)[0])
        if isinstance(hint, type) and issubclass(hint, ProtocolRecord):
            return self._record(hint)
        arguments = get_args(hint)
        if get_origin(hint) is tuple:
            if arguments[-1] is Ellipsis:
                return tuple(self._value(arguments[0]) for _ in range(self._count()))
            return tuple(self._value(argument) for argument in arguments)
        if hint is str:
            return draw.choice(WORDS)
        if hint is bytes:
            return draw.randbytes(3)
        if hint is bool:
            return draw.random() < 0.5
        return self._whole() if hint is int else self._real()

    def _count(self) -> int:
        return self.random.choice((0, 1, 1, 1, 2, _MAX_COUNT))

    def _whole(self) -> int:
        return self.random.choice(EDGES) if self.random.random() < 0.08 else self.random.randint(-1, 5)

    def _real(self) -> float:
        return self.random.choice(REALS)


@cache
def _fields(kind: Any) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(kind)]
