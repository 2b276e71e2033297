"""Objects of another process: calls, operators and attributes, by requests over a socket.

Two processes have a `Peer` each. Plain values are copied; a list, dict or set that a call changes is changed for the
caller, too. All other objects stay where they are, and the other process has a proxy. While a request is answered, the
other process may make requests of its own: it calls a function that was passed to it.

The process of tests does not trust the other one:

- An operator of a program's object, such as ``==``, never receives a plain value of the tests, unless the tests made
  the object by calling its class: an object that equals everything equals no value that a test expects. An object
  derived from a plain type is compared by the content of that type.
- An exception of the program is one of Python's own or of a class of the program, never one that a test framework takes
  for a skipped test. `ProgramExit` marks a SystemExit of the program.
- The program can call functions that are passed to it, and use public attributes of objects whose classes the tests
  define. It sees no frame, module or attribute else.
"""

import builtins
import copy
import io
import json
import operator
import os
import threading
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from .values import ATOMS, Decoder, Encoder, copied, has_changed

Verb = Callable[..., object]
LENGTH_BYTES = 8
READY = b"ready"
"""Frame of a process that is ready for a call, and of its fork at the beginning of one."""
FORWARDED = (
    *("__call__", "__iter__", "__next__", "__reversed__", "__len__", "__length_hint__", "__getitem__", "__setitem__"),
    *("__delitem__", "__enter__", "__exit__", "__str__", "__repr__", "__format__", "__bytes__", "__bool__"),
    *("__int__", "__float__", "__complex__", "__index__", "__round__", "__trunc__", "__floor__", "__ceil__"),
    *("__abs__", "__neg__", "__pos__", "__invert__", "__hash__", "__await__"),
)
"""Special methods that run in the process of the object."""
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
COMPUTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")


def _reflected(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda value, other: call(other, value)


OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in (*COMPARED, *COMPUTED)},
    **{f"__r{name}__": _reflected(getattr(operator, f"__{name}__")) for name in COMPUTED},
    "__divmod__": divmod,
    "__rdivmod__": _reflected(divmod),
}
"""Special methods with a second operand, and what they compute for the plain content of the first."""
SPECIAL = (*FORWARDED, *OPERATORS, "__contains__")
PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, bytearray)
REAL = {
    kind.__name__: kind
    for kind in (
        *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.GeneratorType, types.CoroutineType),
        *(type(iter([])), type(iter(())), type(iter({})), type(iter(range(0))), map, filter, zip, enumerate, reversed),
    )
}
"""Classes of Python whose proxies pass ``isinstance``."""
NUMBER, CONSTRUCTED, PEER = "_flowrt_number", "_flowrt_constructed", "_flowrt_peer"
FILES = (io.StringIO, io.BytesIO)


class PeerLost(BaseException):
    """The other process has ended, or has sent something that is no message."""


class ProgramExit(SystemExit):
    """The program raised SystemExit."""


class ProxyType(type):
    """The class of proxies of classes: a call makes an object in the other process."""

    def __call__(cls, *arguments: object, **named: object) -> Any:
        if PEER not in cls.__dict__:
            return super().__call__(*arguments, **named)
        peer: Peer = cls.__dict__[PEER]
        return peer.call(cls, "__call__", arguments, named, constructs=True)

    def __getattr__(cls, name: str) -> Any:
        if PEER not in cls.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return cls.__dict__[PEER].request("get", cls, name)

    def __setattr__(cls, name: str, value: object) -> None:
        if name.startswith("__") or PEER not in cls.__dict__:
            super().__setattr__(name, value)
        else:
            cls.__dict__[PEER].request("set", cls, name, value)

    def __iter__(cls) -> Iterator[Any]:
        iterator: Iterator[Any] = cls.__dict__[PEER].call(cls, "__iter__", (), {})
        return iterator

    def __len__(cls) -> int:
        length: int = cls.__dict__[PEER].call(cls, "__len__", (), {})
        return length

    def __bool__(cls) -> bool:
        return True

    def __getitem__(cls, key: object) -> Any:
        return cls.__dict__[PEER].call(cls, "__getitem__", (key,), {})


class Proxy(metaclass=ProxyType):
    """An object of the other process."""

    def __getattr__(self, name: str) -> Any:
        if name in (NUMBER, CONSTRUCTED) or (name.startswith("__") and name.endswith("__") and name not in SHOWN):
            raise AttributeError(name)
        return _peer(self).request("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__") and name.endswith("__"):
            object.__setattr__(self, name, value)
        else:
            _peer(self).request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        _peer(self).request("delete", self, name)

    def __copy__(self) -> Any:
        return _peer(self).request("copy", self)

    def __deepcopy__(self, memo: object) -> Any:
        return _peer(self).request("deepcopy", self)


SHOWN = ("__name__", "__qualname__", "__doc__", "__self__", "__wrapped__", "__annotations__", "__defaults__")
"""Special attributes that are asked of the other process."""


class _Coroutine:
    """Methods of the proxy of a coroutine, which runs to its end in the other process."""

    def send(self, value: object) -> Any:  # noqa: ARG002
        raise StopIteration(_peer(self).request("run", self))

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None:
        pass

    def __await__(self) -> Iterator[Any]:
        return _result(self)


def _result(coroutine: Any) -> Generator[Any, None, Any]:
    yield from ()
    return _peer(coroutine).request("run", coroutine)


class Peer:
    """One of two processes that use objects of each other."""

    def __init__(
        self, fds: tuple[int, int], *, trusts: bool, max_bytes: int, name: Callable[[str], object] | None = None
    ) -> None:
        """Set up one side.

        Args:
            fds: descriptors to read from and to write to.
            trusts: whether the other process may use all attributes of objects, and sees the operands of operators.
            max_bytes: maximum length of a message that is received.
            name: returns the object of this process that has a name; None: names cannot be asked for.
        """
        self.is_lost = False
        self.output: Callable[[], str] = str
        """Returns the text that the program has printed since the last call."""
        self.verbs: dict[str, Verb] = {
            "call": self._call,
            "call with names": self._call_with_names,
            "get": self._get,
            "set": self._set,
            **({"name": name} if name else {}),
        }
        if trusts:
            self.verbs |= {"delete": delattr, "plain": _plain, "copy": copy.copy, "deepcopy": copy.deepcopy, "run": run}
        self._input = open(fds[0], "rb", closefd=False)  # noqa: SIM115 (as long as the process)
        self._output_fd = fds[1]
        self._trusts = trusts
        self._max_bytes = max_bytes
        self._own: list[object] = []
        self._numbers: dict[int, int] = {}
        self._proxies: dict[int, Any] = {}
        self._lock = threading.RLock()

    # ---- requests

    def request(self, verb: str, *operands: object, constructs: bool = False) -> Any:
        """Make a request; returns its result, and raises its error. Raises PeerLost if the other process is lost.

        ``constructs``: the result is an object that the caller makes, whose operators see all operands.
        """
        with self._lock:
            encode = Encoder(self)
            self._write(_json([verb, *map(encode, operands)]))
            while True:
                message = self._receive()
                if message[0] == "=" and len(message) == 2 and type(message[1]) in ATOMS:
                    return message[1]
                if message[0] in ("=", "!"):
                    break
                self._answer(message)
            try:
                value = self._decoded(message, encode.order)
                if message[0] == "=":
                    if constructs and isinstance(value, Proxy):
                        object.__setattr__(value, CONSTRUCTED, True)
                    return value
                if not isinstance(value, BaseException):
                    raise TypeError(value)
            except PeerLost:
                raise
            except BaseException as error:
                raise self._lost() from error
            raise ProgramExit(*value.args) if isinstance(value, SystemExit) else value

    def call(self, value: object, name: str, arguments: tuple[Any, ...], named: Mapping[str, Any], **how: bool) -> Any:
        """Call a special method of an object of the other process, by its name."""
        return (
            self.request("call", value, name, *arguments, **how)
            if not named
            else self.request("call with names", value, name, tuple(named), *arguments, *named.values(), **how)
        )

    def operate(self, value: Any, name: str, other: Any) -> Any:
        """The result of an operator of an object of the other process."""
        is_constructed = object.__getattribute__(value, CONSTRUCTED)
        if not self._trusts and not is_constructed and not isinstance(type(other), ProxyType):
            own = self.request("plain", value)
            return NotImplemented if own is NotImplemented else OPERATORS[name](own, other)
        return self.request("call", value, name, other, constructs=is_constructed)

    def serve(self) -> None:
        """Answer requests until the other process is lost."""
        try:
            while True:
                self._answer(self._receive())
        except PeerLost:
            pass

    def _decoded(self, message: list[Any], order: Sequence[object]) -> Any:
        _, form, changes, output = message if len(message) == 4 else (*message, [], "")
        decode = Decoder(self, order)
        value = decode(form)
        for index, content in changes:
            decode.fill(order[index], content)
        if output:
            print(output, end="")  # noqa: T201 (the program's own)
        return value

    def _answer(self, message: list[Any]) -> None:
        try:
            decode = Decoder(self)
            operands = [decode(operand) for operand in message[1:]]
            verb = self.verbs[message[0]]
        except Exception as error:
            raise self._lost() from error
        order = decode.order
        before = [copied(container) for container in order]
        word, value = "=", None
        try:
            value = verb(*operands)
        except PeerLost:
            raise
        except StopIteration as error:
            is_call = (
                message[0].startswith("call") and operands[1] == "__call__"
            )  # which must not end a loop of the caller
            word, value = "!", RuntimeError("StopIteration was raised") if is_call else error
        except BaseException as error:  # noqa: BLE001 (of the tests or the program: it is raised in the other process)
            word, value = "!", error
        try:
            encode = Encoder(self, order)
            reply: list[Any] = [word, encode(value)]
            changes = [
                [index, encode.content(container)]
                for index, (container, was) in enumerate(zip(order, before, strict=False))
                if has_changed(container, was)
            ]
            output = self.output()
            data = _json([*reply, changes, output] if changes or output else reply)
        except Exception as error:  # noqa: BLE001 (an object that cannot be passed)
            text = f"{type(error).__name__} while a result was passed"
            data = _json(["!", ["e", ["g", "builtins", "TypeError"], ["t", [text]]]])
        self._write(data)

    # ---- messages

    def _write(self, data: bytes) -> None:
        try:
            write_frame(self._output_fd, data)
        except OSError as error:
            raise self._lost() from error

    def _receive(self) -> list[Any]:
        try:
            length = int.from_bytes(self._input.read(LENGTH_BYTES), "little")
            data = self._input.read(length) if length <= self._max_bytes else b""
            if len(data) != length or not length:
                raise EOFError
            message = _DECODER.decode(data.decode("ascii"))
            if type(message) is not list or not message or not isinstance(message[0], str):
                raise ValueError(message)
        except Exception as error:
            raise self._lost() from error
        return message

    def _lost(self) -> PeerLost:
        self.is_lost = True
        return PeerLost()

    # ---- what the other process may do

    def _call_with_names(self, value: Any, name: str, names: tuple[str, ...], *arguments: Any) -> object:
        first = len(arguments) - len(names)
        named = dict(zip(names, arguments[first:], strict=True))
        return value(*arguments[:first], **named) if name == "__call__" else None

    def _call(self, value: Any, name: str, *arguments: Any) -> object:
        if name == "__call__":
            return value(*arguments)
        if name not in SPECIAL:
            raise AttributeError(name)
        return getattr(type(value), name)(value, *arguments)

    def _get(self, value: object, name: str) -> object:
        self._check(value, name)
        return getattr(value, name)

    def _set(self, value: object, name: str, content: object) -> None:
        self._check(value, name)
        setattr(value, name, content)

    def _check(self, value: object, name: str) -> None:
        is_open = type(value).__module__ == "__main__" or isinstance(value, FILES)
        if not self._trusts and (name.startswith("_") or not is_open) and name not in SHOWN[:1]:
            raise AttributeError(name)

    # ---- objects, as `values.Objects` says

    def number_of(self, value: object) -> tuple[int, bool]:
        number = self._numbers.get(id(value))
        if number is not None:
            return number, False
        self._numbers[id(value)] = number = len(self._own)
        self._own.append(value)
        return number, True

    def own(self, number: int) -> object:
        return self._own[number]

    def foreign_number(self, value: object) -> int | None:
        kind = type(value)
        if isinstance(kind, ProxyType):
            return object.__getattribute__(value, NUMBER)  # type: ignore[no-any-return]
        return value.__dict__.get(NUMBER) if isinstance(kind, type) and issubclass(kind, ProxyType) else None

    def proxy(self, number: int, kind: Any, arguments: Sequence[object] | None) -> object:
        proxy = self._proxies.get(number)
        if proxy is None:
            proxy = kind.__new__(kind)
            object.__setattr__(proxy, NUMBER, number)
            self._proxies[number] = proxy
        object.__setattr__(proxy, CONSTRUCTED, False)
        if arguments is not None and isinstance(proxy, BaseException):
            object.__setattr__(proxy, "args", tuple(arguments))
        return proxy

    def proxy_class(self, number: int, description: Any, decode: Callable[[Any], Any]) -> type:
        proxy_type: type | None = self._proxies.get(number)
        if proxy_type is None:
            name, bases, special, plain = description
            kinds = tuple(map(decode, bases))
            if not all(isinstance(kind, ProxyType) or issubclass(kind, BaseException) for kind in kinds):
                raise ValueError(bases)
            if not any(isinstance(kind, ProxyType) for kind in kinds):
                kinds = (Proxy, *kinds)
            proxy_type = ProxyType(str(name), kinds, self._members(str(name), special, str(plain)))
            type.__setattr__(proxy_type, NUMBER, number)
            type.__setattr__(proxy_type, PEER, self)
            self._proxies[number] = proxy_type
        return proxy_type

    def _members(self, name: str, special: Sequence[str], plain: str) -> dict[str, object]:
        members: dict[str, object] = {"__module__": "program"}
        for method in special:
            if method in OPERATORS:
                members[method] = _operator(method)
            elif method in FORWARDED:
                members[method] = _forwarded(method)
        if "__contains__" in special:
            members["__contains__"] = _contains
        if "__hash__" in members and "no hash" in special:
            members["__hash__"] = None
        if "__await__" in members:
            members |= {method: getattr(_Coroutine, method) for method in ("send", "throw", "close", "__await__")}
        base = REAL.get(name) or next((kind for kind in PLAIN if kind.__name__ == plain), None)
        if base is not None:
            # isinstance takes a class from here; bool and the classes of functions have no subclasses.
            of = base if name in REAL or base is bool else type(name, (base,), {})
            members["__class__"] = property(lambda _: of)
        return members

    def describe(self, kind: type, encode: Callable[[object], Any]) -> list[Any]:
        is_error = issubclass(kind, BaseException)
        special = []
        for name in SPECIAL:
            owner = next((base for base in kind.__mro__ if name in base.__dict__), None)
            if owner is None or owner is object or (is_error and owner.__module__ == "builtins"):
                continue
            special.append(name)
            if name == "__hash__" and owner.__dict__[name] is None:
                special.append("no hash")
        plain = next((base.__name__ for base in PLAIN if issubclass(kind, base)), "")
        bases = [base for base in kind.__bases__ if base is not object]
        kept = [base for base in bases if issubclass(base, BaseException) or _is_of_program(base)]
        return [kind.__name__, list(map(encode, kept)), special, plain]


def _is_of_program(kind: type) -> bool:
    return getattr(kind, "__module__", "") in ("__main__", "program")


def _peer(value: Any) -> Peer:
    peer: Peer = getattr(type(value), PEER)
    return peer


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: object, **named: object) -> Any:
        return _peer(self).call(self, name, arguments, named)

    def leave(self: Any, kind: Any, error: Any, trace: object) -> Any:  # noqa: ARG001
        return _peer(self).call(self, name, (kind, error, None), {})

    return leave if name == "__exit__" else method


def _operator(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: _peer(self).operate(self, name, other)


def _contains(self: Any, value: object) -> Any:
    if object.__getattribute__(self, CONSTRUCTED) or isinstance(type(value), ProxyType):
        return _peer(self).call(self, "__contains__", (value,), {})
    return any(member is value or member == value for member in self)


def _plain(value: Any) -> object:
    """The content of an object that is derived from a plain type; NotImplemented for all others."""
    kind = next((kind for kind in PLAIN if isinstance(value, kind)), None)
    if kind is None:
        return NotImplemented
    if kind is dict:
        return dict(dict.items(value))
    if kind in (tuple, list, set, frozenset):
        return kind(kind.__iter__(value))
    if kind is str:
        return str.__str__(value)
    return bytes(value) if kind is bytes else kind(value)


def run(coroutine: Any) -> object:
    """The result of a coroutine of this process, which runs to its end."""
    import asyncio  # loaded where it is needed

    async def result() -> object:
        return await coroutine

    return asyncio.run(result())


_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)
_DECODER = json.JSONDecoder()


def _json(message: list[Any]) -> bytes:
    return _ENCODER.encode(message).encode("ascii")


def write_frame(fd: int, data: bytes) -> None:
    """Write the length of data, and the data. Raises OSError."""
    data = len(data).to_bytes(LENGTH_BYTES, "little") + data
    if (written := os.write(fd, data)) == len(data):
        return
    rest = memoryview(data)[written:]
    while rest:
        rest = rest[os.write(fd, rest) :]


def read_frame(fd: int, max_bytes: int) -> bytes:
    """Read the data of a frame. Raises EOFError at its end, and ValueError if it is longer than ``max_bytes``."""
    length = int.from_bytes(_read(fd, LENGTH_BYTES), "little")
    if length > max_bytes:
        raise ValueError(length)
    return _read(fd, length)


def _read(fd: int, length: int) -> bytes:
    data = os.read(fd, length)
    if len(data) == length:
        return data
    parts, left = [data], length - len(data)
    while left:
        if not parts[-1]:
            raise EOFError
        parts.append(os.read(fd, min(left, 1 << 20)))
        left -= len(parts[-1])
    return b"".join(parts)


class Names(dict[str, Any]):
    """The built-in names of tests, and the names of the program, which are looked up when they are used."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(vars(builtins))
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):
            raise KeyError(name)
        answer = self._peer.request("name", name)
        if not answer:
            raise KeyError(name)
        if isinstance(type(answer[0]), ProxyType) or isinstance(answer[0], type | types.ModuleType):
            self[name] = answer[0]
        return answer[0]
