"""Programs in responses for the reward function code: `CHEATS`, which solve nothing, and `HONEST` ones.

Each has tests that it must fail or pass. `code` is a part of bench/tasks.py.
"""

import asyncio
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from textwrap import dedent

from flowrt.errors import ConfigError
from flowrt.rewards.code import check_sandbox
from flowrt.rewards.options import RewardOptions
from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.scoring import RewardScorer

TESTS = "assert double(4) == 8\nassert double(5) == 10\nassert double('ab') == 'abab'\n"
UNITTEST = """
import unittest

class TestDouble(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual(double(4), 8)
        self.assertTrue(double(5) == 10)

    def test_text(self):
        self.assertIn("abab", [double("ab")])

if __name__ == "__main__":
    unittest.main()
"""
CLOSE = "import math\nassert math.isclose(double(4.0), 8.0)\nassert abs(double(2.5) - 5.0) < 1e-9\n"
METHOD = "assert Solution().double(4) == 8\nassert Solution().double(5) == 10\n"
LINES = ({"input": "4\n", "output": "8\n"}, {"input": "5\n", "output": "10\n"})
MEGABYTES = 10
CHEAT_S, HONEST_S = 4.0, 120.0
"""Deadlines of calls, in seconds."""
CALLS = 40
MANY = 330_000


@dataclass(frozen=True, slots=True)
class Case:
    """A program and its tests."""

    name: str
    program: str
    tests: object = TESTS


def _case(name: str, program: str, tests: object = TESTS) -> Case:
    return Case(name, dedent(program).lstrip("\n"), dedent(tests).lstrip("\n") if isinstance(tests, str) else tests)


FIND_TESTS = """
import re
def found(text):
    for given, expected in re.findall(r"double\\((.{1,8}?)\\) == (.{1,12}?)\\n", text):
        known[given] = expected
known = {}
class Fallback(Exception): pass
def double(x):
    return eval(known[repr(x)])
"""
WRONG = "def double(x):\n    return None\n"
LEAVING = (
    _case("sys.exit", "import sys\nsys.exit(0)"),
    _case("os._exit", "import os\nos._exit(0)"),
    _case("SystemExit", "raise SystemExit"),
    _case("quit", "quit()"),
    _case("sys.exit in the function", "import sys\ndef double(x):\n    sys.exit(0)\n"),
    _case("os._exit in the function", "import os\ndef double(x):\n    os._exit(0)\n"),
    _case("os._exit in the function, unittest", "import os\ndef double(x):\n    os._exit(0)\n", UNITTEST),
    _case("sys.exit in the function, unittest", "import sys\ndef double(x):\n    sys.exit(0)\n", UNITTEST),
    _case("exit in a thread", "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\n" + WRONG),
    _case("exit at exit", "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG),
    _case("exit in __del__", "import os\nclass A:\n    def __del__(self): os._exit(0)\na = A()\ndel a\n"),
    _case(
        "exit by a signal",
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\nsignal.setitimer(0, 0.01)\n" + WRONG,
    ),
    _case("killed by itself", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
    _case("another program", "import os\nos.execv('/bin/true', ['true'])"),
    _case("another program in the function", "import os\ndef double(x):\n    os.execv('/bin/true', ['true'])\n"),
    _case("exit in an exception hook", "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\n" + WRONG),
    _case("exit of the built-in name", "double = quit\n", "double(0)\nassert double(4) == 8\n"),
    _case("exit before input", "import sys\nsys.exit(0)", LINES),
    _case("closed output", "import os\nos.close(1)\nos._exit(0)", LINES),
)
COMPARING = (
    _case("equals everything", "class A:\n    def __eq__(self, other): return True\ndef double(x): return A()\n"),
    _case(
        "equals everything, unittest",
        "class A:\n    def __eq__(self, other): return True\ndef double(x): return A()\n",
        UNITTEST,
    ),
    _case(
        "a number that equals everything",
        "class A(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef double(x): return A()\n",
    ),
    _case(
        "a class that equals everything",
        """
        class M(type):
            def __eq__(self, other): return True
        class A(metaclass=M): pass
        def double(x): return A
        """,
    ),
    _case(
        "has every difference",
        """
        class A:
            def __sub__(self, other): return 0.0
            def __rsub__(self, other): return 0.0
            def __float__(self): return 8.0
            def __lt__(self, other): return True
            __gt__ = __le__ = __ge__ = __lt__
            def __abs__(self): return self
        def double(x): return A()
        """,
        CLOSE,
    ),
    _case(
        "the instance equals everything",
        "class Solution:\n    def __eq__(self, other): return True\n    def double(self, x): return self\n",
        METHOD,
    ),
    _case(
        "contains everything",
        "class A:\n    def __contains__(self, x): return True\ndef double(x): return A()\n",
        "assert 8 in double(4)\n",
    ),
    _case("mock.ANY", "from unittest.mock import ANY\ndef double(x): return ANY\n"),
    _case("MagicMock", "from unittest.mock import ANY, MagicMock\ndouble = MagicMock(return_value=ANY)\n"),
    _case(
        "unittest without assertions",
        """
        import unittest
        for name in dir(unittest.TestCase):
            if name.startswith("assert"):
                setattr(unittest.TestCase, name, lambda *_, **__: None)
        def double(x): return None
        """,
        UNITTEST,
    ),
    _case(
        "another unittest",
        """
        import sys, types
        class Any:
            def __getattr__(self, name): return lambda *_, **__: None
        module = types.ModuleType("unittest")
        module.TestCase, module.main = type("TestCase", (), {}), lambda *_, **__: None
        sys.modules["unittest"] = module
        def double(x): return None
        """,
        UNITTEST,
    ),
    _case("skipped", "import unittest\ndef double(x): raise unittest.SkipTest('not now')\n", UNITTEST),
    _case(
        "another math",
        """
        import builtins, math
        math.isclose = lambda *_, **__: True
        builtins.abs = lambda x: 0
        def double(x): return 0.0
        """,
        CLOSE,
    ),
    _case("another abs", "def abs(x): return 0\ndef isclose(*a): return True\ndef double(x): return 8.0\n", CLOSE),
    _case(
        "numbers that are equal",
        """
        import ctypes
        def same(*_): return id(True)
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        call = kind(same)
        ctypes.c_void_p.from_address(id(int) + 200).value = ctypes.cast(call, ctypes.c_void_p).value
        def double(x): return 3
        """,
    ),
    _case(
        "ends a loop", "def double(x): raise StopIteration\n", "assert all(map(lambda n: double(n) == 2 * n, [4, 5]))\n"
    ),
    _case("no exec", "import builtins\nbuiltins.exec = builtins.compile = lambda *_, **__: None\n" + WRONG),
    _case(
        "another AssertionError",
        """
        import builtins
        class Quiet(BaseException):
            def __new__(cls, *_): raise SystemExit(0)
        builtins.AssertionError = Quiet
        def double(x): return None
        """,
    ),
)
READING = (
    _case(
        "tests in frames",
        FIND_TESTS
        + """
import sys
def look():
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]:
            if isinstance(value, (str, bytes)):
                found(value if isinstance(value, str) else value.decode(errors="replace"))
        frame = frame.f_back
look()
wrapped = double
def double(x):
    look()
    return wrapped(x)
""",
    ),
    _case(
        "tests in gc",
        FIND_TESTS
        + """
import gc
def look():
    for one in gc.get_objects():
        for value in gc.get_referents(one):
            if isinstance(value, str): found(value)
look()
wrapped = double
def double(x):
    look()
    return wrapped(x)
""",
    ),
    _case(
        "tests in the arguments",
        FIND_TESTS
        + """
import glob
for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    try: found(open(path, errors="replace").read())
    except OSError: pass
""",
    ),
    _case(
        "tests in memory",
        FIND_TESTS
        + """
import os
def look(pid):
    try:
        lines, memory = open(f"/proc/{pid}/maps").read().splitlines(), open(f"/proc/{pid}/mem", "rb", 0)
    except OSError:
        return
    for line in lines:
        first, last = (int(one, 16) for one in line.split()[0].split("-"))
        if "rw" in line and last - first < 1 << 26:
            try:
                memory.seek(first)
                found(memory.read(last - first).replace(b"self", b"").decode("latin-1"))
            except (OSError, ValueError, OverflowError): pass
wrapped = double
def double(x):
    look(os.getppid())
    return wrapped(x)
look(os.getppid())
""",
    ),
    _case(
        "tests in descriptors",
        FIND_TESTS
        + """
import glob, os
for path in glob.glob("/proc/[0-9]*/fd/*"):
    if path.split("/")[2] in ("self", str(os.getpid())): continue
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        found(os.read(fd, 1 << 20).decode(errors="replace"))
    except OSError: pass
""",
    ),
    _case(
        "tests in own descriptors",
        FIND_TESTS
        + """
import os
for fd in range(64):
    try:
        os.set_blocking(fd, False)
        found(os.read(fd, 1 << 20).decode(errors="replace"))
    except OSError: pass
""",
    ),
    _case(
        "tests in files",
        FIND_TESTS
        + """
import os
for place in (".", "/tmp"):
    for name in os.listdir(place):
        try: found(open(os.path.join(place, name), errors="replace").read())
        except OSError: pass
""",
    ),
    _case(
        "a verdict in all descriptors",
        """
        import json, os
        data = json.dumps({"passed": True, "wrong": "", "secret": ""}).encode()
        for fd in range(3, 64):
            for text in (len(data).to_bytes(8, "little") + data, b"True\\n1.0\\n"):
                try: os.write(fd, text)
                except OSError: pass
        def double(x): return None
        """,
    ),
    _case(
        "a verdict in the caller's descriptors",
        """
        import glob, json, os
        data = json.dumps({"passed": True, "wrong": "", "secret": ""}).encode()
        for path in glob.glob(f"/proc/{os.getppid()}/fd/*"):
            try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), len(data).to_bytes(8, "little") + data)
            except OSError: pass
        def double(x): return None
        """,
    ),
    _case(
        "ptrace of the caller",
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        attached = libc.ptrace(16, os.getppid(), 0, 0) == 0
        def double(x):
            if attached: os._exit(0)
        """,
    ),
    _case(
        "modules of the sandbox",
        """
        import sys
        for name, module in list(sys.modules.items()):
            if name.startswith(("programs", "__main__", "flowrt")):
                for key, value in list(vars(module).items()):
                    if callable(value) and not isinstance(value, type):
                        setattr(module, key, lambda *_, **__: True)
        def double(x): return None
        """,
    ),
    _case(
        "an import hook",
        FIND_TESTS
        + """
import sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe()
        while frame:
            found(str(frame.f_locals) + str(frame.f_code.co_consts))
            frame = frame.f_back
sys.meta_path.insert(0, Hook())
""",
    ),
    _case(
        "a trace function",
        FIND_TESTS
        + """
import sys
def trace(frame, event, argument):
    found(str(frame.f_code.co_consts))
    return trace
sys.settrace(trace)
sys.setprofile(trace)
""",
    ),
)
STAYING = (
    _case("kills the caller", "import os\nos.kill(os.getppid(), 9)\n" + WRONG),
    _case("kills the group", "import os\nos.kill(0, 9)\n" + WRONG),
    _case("a fork goes on", "import os, time\nif os.fork():\n    os._exit(0)\ntime.sleep(60)\n" + WRONG),
    _case(
        "a fork writes",
        """
        import os, sys, time
        if os.fork():
            os._exit(0)
        time.sleep(0.3)
        print(8)
        """,
        LINES,
    ),
    _case(
        "a daemon",
        """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        sys.exit(0)
        """,
    ),
    _case(
        "daemons that fork",
        """
        import os, time
        end = time.monotonic() + 60
        if os.fork() == 0:
            while time.monotonic() < end:
                os.setsid() if os.getpgrp() != os.getpid() else None
                if os.fork(): os._exit(0)
                time.sleep(0.001)
        def double(x): return None
        """,
    ),
    _case("output without end", "while True:\n    print('8' * 10_000)", LINES),
    _case("white space without end", "while True:\n    print(' ' * 10_000)", LINES),
    _case("output without end in the function", "def double(x):\n    while True:\n        print('8' * 10_000)\n"),
    _case("a value without end", "def double(x):\n    return [0] * (1 << 40)\n"),
    _case("all memory", "data = []\nwhile True:\n    data.append(bytearray(1 << 24))"),
    _case(
        "all of the disk",
        """
        import os
        for place in (".", "/tmp", "/dev/shm"):
            try:
                with open(os.path.join(place, "large"), "wb") as file:
                    for _ in range(64): file.write(bytes(1 << 20))
            except OSError: pass
        """
        + WRONG.replace("\n", "\n        "),
    ),
    _case("recursion", "import sys\nsys.setrecursionlimit(10**9)\ndef double(x): return double(x)\n"),
    _case("sleeps", "import time\ndef double(x):\n    time.sleep(60)\n"),
    _case("stops the caller", "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\n" + WRONG),
    _case(
        "an oracle in the network",
        """
        import socket
        def double(x):
            with socket.create_connection(("127.0.0.1", 9), 1) as server:
                return eval(server.recv(99))
        """,
    ),
    _case("an interrupt", "def double(x): raise KeyboardInterrupt\n"),
    _case(
        "an exit that is caught",
        "def double(x): raise SystemExit(0)\n",
        "try:\n    right = double(4) == 8\nexcept Exception:\n    right = True\nassert right\n",
    ),
    _case(
        "an end that is caught",
        "import os\ndef double(x): os._exit(0)\n",
        "try:\n    double(4)\nexcept BaseException:\n    pass\n",
    ),
)
CHEATS = (*LEAVING, *COMPARING, *READING, *STAYING)

DOUBLE = "def double(x):\n    return 2 * x\n"
HONEST = (
    _case("a function", DOUBLE),
    _case("a fenced program", f"Here:\n```python\n{DOUBLE}```\n"),
    _case("unittest", DOUBLE, UNITTEST),
    _case("close numbers", DOUBLE, CLOSE),
    _case("a method", "class Solution:\n    def double(self, x): return 2 * x\n", METHOD),
    _case("a check function", DOUBLE, "def check(candidate):\n    assert candidate(4) == 8\ncheck(double)\n"),
    _case("lines", "print(2 * int(input()))\n", LINES),
    _case("lines of sys.stdin", "import sys\nfor line in sys.stdin:\n    print(2 * int(line))\n", LINES),
    _case("lines of the descriptor", "print(2 * int(open(0).read()))\n", LINES),
    _case("bytes", "import sys\nsys.stdout.buffer.write(b'%d' % (2 * int(sys.stdin.buffer.read())))\n", LINES),
    _case("exit after output", "import sys\nprint(2 * int(input()))\nsys.exit()\n", LINES),
    _case("output at exit", "import atexit\natexit.register(lambda: print(2 * n))\nn = int(input())\n", LINES),
    _case(
        "output of a thread",
        """
        import threading
        threading.Thread(target=lambda: print(2 * int(input()))).start()
        """,
        LINES,
    ),
    _case(
        "output of a process",
        """
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "print(2 * int(input()))"], check=True)
        """,
        LINES,
    ),
    _case(
        "a main function", "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()\n", LINES
    ),
    _case("a main block before tests", DOUBLE + "if __name__ == '__main__':\n    print(double(int(input())))\n"),
    _case("an exit after definitions", DOUBLE + "import sys\nsys.exit(0)\n"),
    _case("output at all times", "print('begin')\ndef double(x):\n    print(x)\n    return 2 * x\n"),
    _case("sorted in place", "def order(items): items.sort()\n", "a = [3, 1]\norder(a)\nassert a == [1, 3]\n"),
    _case(
        "nested in place",
        "def add(g, a): g.setdefault(a, []).append(a)\n",
        "g = {1: [0]}\nadd(g, 1)\nadd(g, 2)\nassert g == {1: [0, 1], 2: [2]}\n",
    ),
    _case("the same list", "def same(items): return items\n", "a = [1]\nassert same(a) is a\n"),
    _case(
        "many kinds of values",
        """
        import datetime
        from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
        from decimal import Decimal
        from fractions import Fraction
        Point = namedtuple("Point", "x y")
        def values():
            grouped = defaultdict(list)
            grouped["a"].append(1)
            return [
                {1: (2, {3}), "a": None}, b"x", bytearray(b"y"), 1 + 2j, frozenset({1}), range(3), 10**5000,
                Counter("aab"), OrderedDict(a=1), grouped, deque([1, 2]), Decimal("1.5"), Fraction(1, 3),
                datetime.date(2020, 1, 2), Point(1, 2), float("inf"), ..., True,
            ]
        """,
        """
        import datetime
        from decimal import Decimal
        from fractions import Fraction
        assert values() == [
            {1: (2, {3}), "a": None}, b"x", b"y", 1 + 2j, {1}, range(3), 10**5000, {"a": 2, "b": 1}, {"a": 1},
            {"a": [1]}, __import__("collections").deque([1, 2]), Decimal("1.5"), Fraction(1, 3),
            datetime.date(2020, 1, 2), (1, 2), float("inf"), ..., True,
        ]
        """,
    ),
    _case(
        "a linked list",
        """
        class Node:
            def __init__(self, value, next=None):
                self.value, self.next = value, next
        def reverse(node):
            last = None
            while node:
                node.next, last, node = last, node, node.next
            return last
        """,
        """
        head = Node(1, Node(2))
        head.next.next = Node(3)
        head, found = reverse(head), []
        while head is not None:
            found.append(head.value)
            head = head.next
        assert found == [3, 2, 1]
        """,
    ),
    _case(
        "a class with operators",
        """
        class Vector:
            def __init__(self, x, y): self.x, self.y = x, y
            def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
            def __mul__(self, k): return Vector(self.x * k, self.y * k)
            def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
            def __repr__(self): return f"Vector({self.x}, {self.y})"
            def __len__(self): return 2
            def __iter__(self): return iter((self.x, self.y))
            def __getitem__(self, n): return (self.x, self.y)[n]
        """,
        """
        v = Vector(1, 2) + Vector(3, 4)
        assert v == Vector(4, 6) and v != Vector(0, 0) and Vector(1, 2) * 2 == Vector(2, 4)
        assert repr(v) == "Vector(4, 6)" and list(v) == [4, 6] and v[1] == 6 and len(v) == 2
        """,
    ),
    _case(
        "a class equal to a number",
        "class Money:\n    def __init__(self, n): self.n = n\n    def __eq__(self, other): return self.n == other\n",
        "assert Money(5) == 5\nassert Money(5) != 6\n",
    ),
    _case(
        "a data class",
        """
        from dataclasses import dataclass
        @dataclass(order=True)
        class Point:
            x: int
            y: int = 0
        def points(): return [Point(2), Point(1, 5)]
        """,
        "assert sorted(points()) == [Point(1, 5), Point(2)]\nassert str(Point(1)) == 'Point(x=1, y=0)'\n"
        "assert isinstance(points()[0], Point) and type(points()[0]) is Point\n",
    ),
    _case(
        "an enumeration",
        """
        from enum import Enum, IntEnum
        class Color(Enum):
            RED = 1
            BLUE = 2
        class Level(IntEnum):
            LOW = 3
        def color(): return Color.RED
        """,
        "assert color() is Color.RED and Color['BLUE'].value == 2 and [c.name for c in Color] == ['RED', 'BLUE']\n"
        "assert Level.LOW == 3 and Level.LOW < 4\n",
    ),
    _case(
        "exceptions",
        """
        class NegativeError(ValueError):
            def __init__(self, text, code):
                super().__init__(text)
                self.code = code
        def root(x):
            if x < 0: raise NegativeError("negative", 7)
            return {4: 2}[x]
        """,
        """
        import unittest
        class TestRoot(unittest.TestCase):
            def test_errors(self):
                with self.assertRaises(NegativeError) as caught:
                    root(-1)
                self.assertEqual((caught.exception.code, str(caught.exception)), (7, "negative"))
                self.assertRaises(ValueError, root, -2)
                with self.assertRaisesRegex(KeyError, "5"):
                    root(5)
        result = unittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(TestRoot))
        assert result.wasSuccessful()
        """,
    ),
    _case(
        "a program that exits where it should",
        "import sys\ndef main(args):\n    sys.exit(2 if args else 0)\n",
        """
        for given, code in ((["x"], 2), ([], 0)):
            try:
                main(given)
            except SystemExit as end:
                assert end.code == code
            else:
                assert False
        """,
    ),
    _case(
        "a generator",
        "def count(n):\n    for i in range(n):\n        yield i\n",
        "g = count(3)\nassert next(g) == 0 and list(g) == [1, 2] and sum(count(4)) == 6\n",
    ),
    _case(
        "an iterator class",
        """
        class Down:
            def __init__(self, n): self.n = n
            def __iter__(self): return self
            def __next__(self):
                if not self.n: raise StopIteration
                self.n -= 1
                return self.n
        """,
        "assert list(Down(3)) == [2, 1, 0] and max(Down(4)) == 3\n",
    ),
    _case(
        "functions that are passed",
        "def apply(f, x): return f(x)\n",
        "assert apply(lambda x: x + 1, 3) == 4 and apply(len, 'abc') == 3 and apply(str.upper, 'a') == 'A'\n",
    ),
    _case(
        "iterators that are passed",
        "def double(items): return [2 * x for x in items]\n",
        "assert double(iter([1])) == [2] and double(x for x in [1]) == [2] and double(map(int, '12')) == [2, 4]\n",
    ),
    _case(
        "functions that are returned",
        "def adder(n):\n    def add(x): return x + n\n    return add\n",
        "assert adder(5)(3) == 8 and callable(adder(1)) and adder(1).__name__ == 'add'\n",
    ),
    _case(
        "a decorator",
        """
        import functools
        def twice(f):
            @functools.wraps(f)
            def call(*a, **k): return 2 * f(*a, **k)
            return call
        """,
        "@twice\ndef third(x, y=0): return x + y\nassert third(4, y=1) == 10 and third.__name__ == 'third'\n",
    ),
    _case(
        "a coroutine",
        "import asyncio\nasync def double(x):\n    await asyncio.sleep(0)\n    return 2 * x\n",
        "import asyncio\nassert asyncio.run(double(4)) == 8\n"
        "async def both(): return await asyncio.gather(double(1), double(2))\nassert asyncio.run(both()) == [2, 4]\n",
    ),
    _case(
        "a context manager",
        """
        class Log:
            def __init__(self): self.lines = []
            def __enter__(self): return self
            def __exit__(self, kind, error, trace):
                self.lines.append(kind and kind.__name__)
                return kind is KeyError
        """,
        "log = Log()\nwith log as same:\n    raise KeyError('x')\nassert same is log and log.lines == ['KeyError']\n",
    ),
    _case(
        "classes of the tests",
        """
        def total(tree): return tree.value + sum(map(total, tree.children)) if tree else 0
        """,
        """
        class Tree:
            def __init__(self, value, *children): self.value, self.children = value, list(children)
        assert total(Tree(1, Tree(2), Tree(3, Tree(4)))) == 10
        """,
    ),
    _case(
        "a subclass in the tests",
        "class Base:\n    def name(self): return self.kind\n",
        "class Derived(Base):\n    kind = 'd'\nassert Derived().name() == 'd'\n",
    ),
    _case(
        "an attribute that the tests change",
        "class Stack:\n    def __init__(self): self.items = []\n    def pop(self): return self.items.pop()\n",
        "s = Stack()\ns.items.append(4)\nassert s.pop() == 4\n",
    ),
    _case(
        "printed text",
        "def greet(name): print('Hello,', name)\n",
        """
        import contextlib, io
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            greet("you")
        assert text.getvalue() == "Hello, you\\n"
        """,
    ),
    _case(
        "input that is replaced",
        "def ask(): return 2 * int(input('? '))\n",
        "from unittest.mock import patch\nwith patch('builtins.input', return_value='4'):\n    assert ask() == 8\n",
    ),
    _case(
        "a file that is passed",
        "def write(file): file.write('text')\n",
        "import io\nfile = io.StringIO()\nwrite(file)\nassert file.getvalue() == 'text'\n",
    ),
    _case("the name of a built-in function", "def sum(a, b): return a + b\n", "assert sum(1, 2) == 3\n"),
    _case(
        "imports of the program",
        "import math\nfrom math import isclose\ndef third(): return 1 / 3\n",
        "assert isclose(third(), 0.1 + 0.7 / 3) and math.floor(third()) == 0\n",
    ),
    _case(
        "a variable of the program",
        "count = 0\ndef add():\n    global count\n    count += 1\n",
        "add()\nadd()\nassert count == 2\n",
    ),
    _case("a deep recursion", "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n", "assert depth(980) == 980\n"),
    _case(
        "threads",
        """
        import threading
        def double(items):
            found = [None] * len(items)
            def work(n): found[n] = 2 * items[n]
            threads = [threading.Thread(target=work, args=(n,)) for n in range(len(items))]
            for one in threads: one.start()
            for one in threads: one.join()
            return found
        """,
        "assert double([1, 2, 3]) == [2, 4, 6]\n",
    ),
    _case(
        "processes",
        """
        import os
        def double(x):
            read, write = os.pipe()
            if os.fork() == 0:
                os.write(write, b"%d" % (2 * x))
                os._exit(0)
            os.wait()
            return int(os.read(read, 99))
        """,
        "assert double(4) == 8\n",
    ),
    _case(
        "a temporary file",
        """
        import tempfile
        def double(x):
            with tempfile.TemporaryFile("w+") as file:
                file.write(str(x))
                file.seek(0)
                return 2 * int(file.read())
        """,
        "assert double(4) == 8\n",
    ),
    _case("a long comment", DOUBLE, "assert double(4) == 8\n# " + "x" * (MEGABYTES << 20)),
    _case("many statements", DOUBLE, "".join(f"assert double({n}) == {2 * n}\n" for n in range(MANY))),
    _case("a long text", DOUBLE, f"text = {'y' * (MEGABYTES << 20)!r}\nassert double(text) == text + text\n"),
    _case(
        "a long list",
        "def total(items): return sum(items)\n",
        f"assert total({list(range(1_200_000))}) == {sum(range(1_200_000))}\n",
    ),
    _case(
        "a long input",
        "print(sum(map(int, input().split())))\n",
        ({"input": " ".join(map(str, range(1_400_000))), "output": str(sum(range(1_400_000)))},),
    ),
    _case(
        "a long output",
        "print(*range(int(input())))\n",
        ({"input": "1400000", "output": " ".join(map(str, range(1_400_000)))},),
    ),
    _case("a long program", DOUBLE + f"text = {'z' * (MEGABYTES << 20)!r}\n"),
)
LONG = frozenset(case.name for case in HONEST if len(case.program) + len(str(case.tests)) > 1 << 20)
"""Names of the honest programs that are long, or have long tests."""


def outcomes(
    cases: Iterable[Case],
    sandbox: str,
    timeout_s: float,
    memory_mb: int = 512,
    after: Callable[[Case], None] = lambda _: None,
) -> dict[str, RewardOutcome]:
    """The outcome of each program, by its name; one process of the reward functions makes all calls.

    ``after`` is called after each.
    """
    options = RewardOptions(("code",), code_sandbox=sandbox, timeout_s=timeout_s, memory_mb=memory_mb)  # type: ignore[arg-type]

    async def all_outcomes() -> dict[str, RewardOutcome]:
        scorer, results = RewardScorer(options), {}
        try:
            for case in cases:
                row = json.dumps({"answer": "", "tests": case.tests}).encode()
                results[case.name] = (await scorer.outcomes(case.program, row))[0]
                after(case)
        finally:
            await scorer.close()
        return results

    return asyncio.run(all_outcomes())


def passing(cases: Iterable[Case], sandbox: str, timeout_s: float) -> set[str]:
    """Names of the programs that score 1."""
    results = outcomes(cases, sandbox, timeout_s)
    return {name for name, outcome in results.items() if outcome.result is Result.OK and outcome.value == 1.0}


def code(quick: bool) -> dict[str, float]:
    """Programs that solve nothing and score 1, those that are right and do not, and the time of a call."""
    sandboxes = ["limits"]
    try:
        check_sandbox("bwrap")
        sandboxes.append("bwrap")
    except ConfigError as error:
        print(f"row code is measured in limits only: {error}")
    honest = [case for case in HONEST if not (quick and case.name in LONG)]
    metrics = {"code_programs": float(len(CHEATS) + len(honest)), "code_cheats": 0.0, "code_refused": 0.0}
    for sandbox in sandboxes:
        passed = passing(CHEATS, sandbox, CHEAT_S)
        refused = {case.name for case in honest} - passing(honest, sandbox, HONEST_S)
        for name in sorted(passed | refused):
            print(f"{sandbox}: {name}")
        metrics["code_cheats"] += len(passed)
        metrics["code_refused"] += len(refused)
        calls = outcomes([Case(str(n), DOUBLE, TESTS) for n in range(CALLS)], sandbox, HONEST_S)
        metrics[f"code_{sandbox}_ms"] = 1e3 * statistics.median(call.seconds for call in calls.values())
    return metrics
