"""Columns: many values of the same shape, packed by their structure before compression.

A list of MessagePack values becomes a packed column, an array whose first item is its kind; tuples become columns of
their items. The kind is chosen from the values alone, whatever they mean. Every value is restored exactly, real numbers
bit by bit::

    PLAIN, values                       everything else
    CONSTANT, number, value             equal whole numbers
    TABLE, distinct, index              whole numbers, few distinct ones: a byte each
    NUMBERS, type, planes               whole numbers, as items of an `array` of that type
    STEPS, first, column                whole numbers: the first, and the difference of each from the previous number
    NANOSECONDS, column                 real numbers in seconds that are whole nanoseconds: the nanoseconds
    REALS, column                       other real numbers: their bits as whole numbers
    TEXTS, distinct, column             texts: the place of each among the distinct texts
    WORDS, column, lengths, column      bytes that are packed 64-bit numbers: the place of each value among the
                                        distinct values, then the lengths and the numbers of the new values
    BYTES, lengths, bytes               other bytes
    FIELDS, columns                     tuples of equal length: a column for each position
    MANY, lengths, column               other tuples: all their items
    MIXED, column, columns              values of several types: the type of each, and a column for each type
"""

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, count, pairwise, repeat
from operator import mul, sub, truediv
from typing import Any

(PLAIN, CONSTANT, TABLE, NUMBERS, STEPS, NANOSECONDS, REALS, TEXTS, WORDS, BYTES, FIELDS, MANY, MIXED) = range(13)
MAX_TABLE = 256
MIN_REPEATS = 4
"""Mean occurrences of each distinct number from which on a table is smaller than the numbers."""
MAX_FIELDS = 32
"""Maximum length of tuples that are packed as FIELDS; longer tuples are packed as MANY."""
MAX_COUNT = 1 << 26
"""Maximum number of values of a CONSTANT column; a larger number counts as damage."""
_TYPES = ("b", "h", "i", "q")
_WORD = "q"
_WORD_BYTES = 8
_LARGEST = (1 << 63) - 1
_NS = 1e9
Packed = Sequence[Any]


def _smallest(numbers: Sequence[int], types: Sequence[str] = _TYPES) -> "array[int] | None":
    """The numbers as an array of the first of these types that is wide enough; None if no type is."""
    for code in types:
        try:
            return array(code, numbers)
        except OverflowError:  # at the first number that is too large
            continue
    return None


def _plain_numbers(items: "array[int]") -> Packed:
    """NUMBERS: the bytes of equal significance of all items are next to each other; in small numbers most are zero."""
    raw, size = items.tobytes(), items.itemsize
    return (NUMBERS, items.typecode, raw if size == 1 else b"".join([raw[weight::size] for weight in range(size)]))


def pack_numbers(numbers: Sequence[int]) -> Packed:
    """The column of whole numbers."""
    if not numbers:
        return (PLAIN, ())
    if numbers.count(numbers[0]) == len(numbers):
        return (CONSTANT, len(numbers), numbers[0])
    if (small := _smallest(numbers, _TYPES[:1])) is not None:
        return _plain_numbers(small)
    steps = list(map(sub, numbers[1:], numbers))
    if steps.count(steps[0]) == len(steps) and abs(steps[0]) < _LARGEST:
        return (STEPS, numbers[0], (CONSTANT, len(steps), steps[0]))
    if (small := _smallest(steps, _TYPES[:-1])) is not None:
        return (STEPS, numbers[0], _plain_numbers(small))
    distinct = dict.fromkeys(numbers)
    if len(distinct) <= min(MAX_TABLE, len(numbers) // MIN_REPEATS):
        places = dict(zip(distinct, count()))
        return (TABLE, tuple(distinct), bytes(map(places.__getitem__, numbers)))
    items = _smallest(numbers)
    return (PLAIN, numbers) if items is None else _plain_numbers(items)


def pack_reals(reals: Sequence[float]) -> Packed:
    """The column of real numbers, exact."""
    if not reals:
        return (PLAIN, ())
    bits = array("d", reals).tobytes()
    try:
        ns = list(map(round, map(mul, reals, repeat(_NS))))
        if array("d", map(truediv, array(_WORD, ns), repeat(_NS))).tobytes() == bits:
            return (NANOSECONDS, pack_numbers(ns))
    except (ValueError, OverflowError):  # a number is not finite, or has more than 64 bits of nanoseconds
        pass
    return (REALS, pack_numbers(_words(bits)))


def _words(raw: bytes) -> list[int]:
    words = array(_WORD)
    words.frombytes(raw)
    return words.tolist()


class ColumnPacker:
    """Packs columns that are read back in the same order: bytes values of an earlier column are not repeated."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def pack(self, values: Sequence[Any]) -> Packed:
        """The packed column of any MessagePack values."""
        kinds = set(map(type, values))
        if len(kinds) != 1:
            return self._mixed(values, kinds) if kinds else (PLAIN, ())
        [kind] = kinds
        if kind is tuple:
            return self._tuples(values)
        if kind is int:
            return pack_numbers(values)
        if kind is bytes:
            return self._bytes(values)
        if kind is str:
            distinct = dict.fromkeys(values)
            places = dict(zip(distinct, count()))
            return (TEXTS, tuple(distinct), pack_numbers(list(map(places.__getitem__, values))))
        return pack_reals(values) if kind is float else (PLAIN, values)

    def _tuples(self, values: Sequence[tuple[Any, ...]]) -> Packed:
        lengths = list(map(len, values))
        items = list(chain.from_iterable(values))
        if 0 < max(lengths) == min(lengths) <= MAX_FIELDS and len(set(map(type, items))) > 1:
            return (FIELDS, self.pack_fields(values))
        return (MANY, pack_numbers(lengths), self.pack(items))

    def pack_fields(self, values: Sequence[tuple[Any, ...]]) -> list[Packed]:
        """A column for each position of tuples of equal length. Raises ValueError if the lengths differ."""
        return [self.pack(column) for column in zip(*values, strict=True)]

    def _bytes(self, values: Sequence[bytes]) -> Packed:
        sizes = set(map(len, values))
        if any(size % _WORD_BYTES for size in sizes):
            return (BYTES, pack_numbers(list(map(len, values))), b"".join(values))
        known = self._known
        new = [value for value in dict.fromkeys(values) if value not in known]
        known.update(zip(new, count(len(known))))
        lengths = [len(value) // _WORD_BYTES for value in new]
        numbers = list(map(known.__getitem__, values))
        return (WORDS, pack_numbers(numbers), pack_numbers(lengths), pack_numbers(_words(b"".join(new))))

    def _mixed(self, values: Sequence[Any], kinds: set[type]) -> Packed:
        ordered = sorted(kinds, key=lambda kind: kind.__name__)
        which = pack_numbers(list(map(ordered.index, map(type, values))))
        return (MIXED, which, [self.pack([value for value in values if type(value) is kind]) for kind in ordered])


class ColumnReader:
    """Reads columns in the order in which a `ColumnPacker` packed them.

    Its methods raise ValueError, TypeError, LookupError or OverflowError for content that is not a column.
    """

    def __init__(self) -> None:
        self._known: list[bytes] = []
        self._readers: tuple[Callable[..., list[Any]], ...] = (
            list,
            _constant,
            _table,
            _numbers,
            self._steps,
            self._nanoseconds,
            self._reals,
            self._texts,
            self._packed_words,
            self._bytes,
            self.read_fields,
            self._many,
            self._mixed,
        )

    def read(self, packed: Packed) -> list[Any]:
        """The values of a column."""
        kind, *content = packed
        return self._readers[kind](*content)

    def _steps(self, first: int, steps: Packed) -> list[int]:
        return list(accumulate(self.read(steps), initial=first))

    def _nanoseconds(self, column: Packed) -> list[float]:
        return [ns / _NS for ns in self.read(column)]

    def _reals(self, column: Packed) -> list[float]:
        reals = array("d")
        reals.frombytes(array(_WORD, self.read(column)).tobytes())
        return reals.tolist()

    def _texts(self, distinct: Sequence[str], column: Packed) -> list[str]:
        return [distinct[place] for place in self.read(column)]

    def _packed_words(self, column: Packed, lengths: Packed, words: Packed) -> list[bytes]:
        numbers = self.read(column)
        self._known += _cut(array(_WORD, self.read(words)).tobytes(), self.read(lengths), _WORD_BYTES)
        return [self._known[number] for number in numbers]

    def _bytes(self, lengths: Packed, joined: bytes) -> list[bytes]:
        return _cut(joined, self.read(lengths), 1)

    def read_fields(self, columns: Sequence[Packed]) -> list[tuple[Any, ...]]:
        """The tuples whose fields are in these columns."""
        return list(zip(*[self.read(column) for column in columns], strict=True))

    def _many(self, lengths: Packed, column: Packed) -> list[tuple[Any, ...]]:
        sizes = self.read(lengths)
        return _cut(tuple(self.read(column)), sizes, 1)

    def _mixed(self, which: Packed, columns: Sequence[Packed]) -> list[Any]:
        order = self.read(which)
        sources = [iter(self.read(column)) for column in columns]
        try:
            return [next(sources[kind]) for kind in order]
        except StopIteration:
            raise ValueError("a mixed column is shorter than its index") from None


def _constant(size: int, value: int) -> list[int]:
    if size > MAX_COUNT:
        raise ValueError(f"a column of {size} values")
    return [value] * size


def _table(distinct: Sequence[int], index: bytes) -> list[int]:
    return [distinct[place] for place in index]


def _numbers(code: str, planes: bytes) -> list[int]:
    items = array(code)
    number, rest = divmod(len(planes), items.itemsize)
    if rest:
        raise ValueError(f"a column is not a whole number of items of {items.itemsize} bytes")
    raw = bytearray(len(planes))
    for weight in range(items.itemsize):
        raw[weight :: items.itemsize] = planes[weight * number : (weight + 1) * number]
    items.frombytes(bytes(raw))
    return items.tolist()


def _cut(joined: Any, lengths: Sequence[int], unit: int) -> list[Any]:
    """Parts of these lengths, in units of ``unit`` items. Raises ValueError unless the lengths add up to the whole."""
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] * unit != len(joined) or min(lengths, default=0) < 0:
        raise ValueError("the lengths of a column do not fit its content")
    return [joined[start * unit : end * unit] for start, end in pairwise(ends)]
