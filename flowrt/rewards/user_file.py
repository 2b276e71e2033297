"""How a user's reward function, or filter function, is called, and the outcome of what it returns.

- A parameter called response or completion receives the response, one called answer the reference answer, and any other
  the column of its name, such as prompt.
- If one of the first two parameters has another name, which is no column, it receives the response; if that is received
  by name, or by the first of the two, it receives the answer. If neither is received by name, parameters that are
  columns do not count: ``compute_score(data_source, solution_str, ground_truth)``.
- A parameter that receives the answer for one row and its column for another is refused.
- One called log receives a function that logs a number under a name: ``log("acc", 1.0)``.
- ``**names`` receives each column, and the response and the answer, that no parameter receives.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter

from flowrt.rewards.outcomes import Result, RewardOutcome
from flowrt.rewards.rows import json_text
from flowrt.runtime.user_module import Unusable, cut, defined_at, load_module

RESPONSE = ("response", "completion")
ANSWER = "answer"
MISSING = object()
"""In place of the answer of a row without one."""


class MissingColumn(Exception):
    """A parameter without a default is not a column of the row; the text is the parameter's name."""


class Arguments:
    """Binds the parameters of one function."""

    def __init__(self, function: Callable[..., object]) -> None:
        """Inspect the function. Raises TypeError if it takes no argument."""
        try:
            self.parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a function written in C without a signature
            self.parameters = [Parameter("args", Parameter.VAR_POSITIONAL)]
        self.bound = frozenset(function.keywords if isinstance(function, partial) else ())
        """Parameters that a partial function has bound by name: they keep their values."""
        self.parameters = [parameter for parameter in self.parameters if parameter.name not in self.bound]
        if not self.parameters:
            raise TypeError("it takes no argument")
        names = {parameter.name for parameter in self.parameters}
        unnamed = [index for index, named in enumerate((names & {*RESPONSE}, names & {ANSWER})) if not named]
        self._unnamed = unnamed
        self._function = function
        self._columns: set[str] = set()
        """Parameters that are columns of rows so far."""
        self._others: set[str] = set()
        """Parameters of other names that have received the response or the answer."""
        self._takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self.parameters)

    def of(
        self, response: str, answer: object, columns: Mapping[str, object], facts: Mapping[str, object] | None = None
    ) -> tuple[list[object], dict[str, object]]:
        """The positional and the keyword arguments of a call; a column goes before a fact of its name.

        Raises MissingColumn, also for an answer `MISSING`, and Unusable for a parameter that is a column of some rows
        and would receive the response or the answer for others.
        """
        known = {**(facts or {}), **columns, ANSWER: answer, **dict.fromkeys(RESPONSE, response)}
        if answer is MISSING:
            del known[ANSWER]
        both: list[tuple[str, object]] = [(RESPONSE[0], response), (ANSWER, answer)]
        unnamed = [both[index] for index in self._unnamed]
        others: set[str] = set()
        positional: list[object] = []
        named: dict[str, object] = {}
        for index, parameter in enumerate(self.parameters):
            if parameter.kind is Parameter.VAR_KEYWORD:
                continue
            if parameter.kind is Parameter.VAR_POSITIONAL:
                positional += [value for _, value in unnamed if value is not MISSING]
                unnamed = []
                continue
            if parameter.name in known:
                value = known[parameter.name]
            elif unnamed and parameter.kind is not Parameter.KEYWORD_ONLY and self._can_be_unnamed(index):
                _, value = unnamed.pop(0)
                others |= {parameter.name} if value is not MISSING else set()
                if value is MISSING and parameter.default is Parameter.empty:
                    raise MissingColumn(ANSWER)
                value = parameter.default if value is MISSING else value
            elif parameter.default is not Parameter.empty:
                if parameter.kind is Parameter.POSITIONAL_ONLY:
                    break
                continue
            else:
                raise MissingColumn(parameter.name)
            # Parameters after one that keeps its default are passed by name.
            if parameter.kind is Parameter.POSITIONAL_ONLY or (
                parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and len(positional) == index
            ):
                positional.append(value)
            else:
                named[parameter.name] = value
        self._check_meaning(columns, others)
        if self._takes_any:
            has = {parameter.name for parameter in self.parameters} | self.bound
            rest = (*columns.items(), *unnamed)
            named |= {name: value for name, value in rest if name not in has and value is not MISSING}
        return positional, named

    def _can_be_unnamed(self, index: int) -> bool:
        """Whether a parameter that is no column can receive the response or the answer."""
        return index < 2 or (len(self._unnamed) == 2 and self.parameters[index].default is Parameter.empty)

    def _check_meaning(self, columns: Mapping[str, object], others: set[str]) -> None:
        """Note which parameters have received columns, and which ``others``. Raises Unusable for one that is both."""
        self._columns |= columns.keys() & {parameter.name for parameter in self.parameters}
        self._others |= others
        if both := sorted(self._columns & self._others):
            what = f"its parameter {both[0]!r} is a column of some rows, and would get the response or the answer for"
            fix = f"call the parameters for these response and answer, or put {both[0]} behind a *"
            raise Unusable(f"{what} others; {fix}", defined_at(self._function))


MODULE = "flowrt_own_reward"
CALLED_AS = "reward(response, answer)"
FILTER = "filter"
"""Kind of a filter function."""
REWARDS, OFFERED = "rewards", ("prompt", "epoch", "lengths", "version")
"""Columns of a filter function: the rewards of a group, which it always takes, and those that it can take by name."""
LOG, LOGGED = "log", "_"
"""Parameter that receives a function which logs a number, and prefix of the names of parts that are only logged."""
PART_NAME = "a name is text that does not end in /"
LARGEST = 3e38


def load(argument: str, index: int) -> Callable[..., object]:
    """Load a function. Raises Unusable if the file has no such function, and any exception that the file raises.

    Args:
        argument: FILE.py:FUNCTION.
        index: a number that makes the name of the module unique.
    """
    path, _, function = argument.rpartition(":")
    attribute: object = getattr(load_module(path, f"{MODULE}_{index}"), function, None)
    if not callable(attribute):
        raise Unusable(f"it has no function {function!r}; name the function as FILE.py:FUNCTION")
    return attribute


class UserFilter:
    """A loaded filter function."""

    def __init__(self, argument: str, index: int) -> None:
        """Load the function, see `load`.

        Raises Unusable if it is async, or needs other arguments than the rewards and names of `OFFERED`.
        """
        function = argument.rpartition(":")[2]
        loaded = load(argument, index)
        self._function = loaded
        self._line = defined_at(loaded)
        if inspect.iscoroutinefunction(loaded):
            what = f"{function} is an async function; a filter must be a plain one (def) that returns a bool"
            raise Unusable(what, self._line)
        try:
            signature = inspect.signature(loaded)
        except ValueError:  # a function written in C without a signature
            self._taken: list[str] = []
            return
        parameters = list(signature.parameters.values())
        named = [
            parameter.name
            for parameter in parameters[1:]
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._taken = [name for name in OFFERED if takes_any or name in named]
        try:
            signature.bind([], **dict.fromkeys(self._taken))
        except TypeError as error:
            offered = ", ".join(OFFERED)
            raise Unusable(
                f"{function}{signature} cannot be called as {function}(rewards) with what it takes of {offered} by "
                f"name: {error}",
                self._line,
            ) from None

    def __call__(self, response: str, answer: object, columns: Mapping[str, object]) -> RewardOutcome:  # noqa: ARG002
        """Call the function with a group: ``columns`` has the rewards and `OFFERED`.

        The value is 1 for True and 0 for False. Raises any exception of the function.
        """
        result = self._function(columns[REWARDS], **{name: columns[name] for name in self._taken})
        if type(result).__name__ not in ("bool", "bool_"):  # of Python, of NumPy
            what = f"it returned {shown(result)} ({type(result).__name__}), not True or False"
            return RewardOutcome(Result.INVALID, detail=what, line=self._line)
        return RewardOutcome(Result.OK, float(bool(result)))


class Invalid(Exception):
    """A value that is no reward; the text is how, as the end of a sentence."""


def outcome_of(value: object, line: int, logged: Mapping[str, float] | None = None) -> RewardOutcome:
    """The outcome of a call that returned ``value``: a finite number up to 3e38, named numbers, or None.

    The value of named numbers is their sum, without those whose name begins with ``_``: these are only logged, under
    the name without it; text and None among them are left out.

    Args:
        value: what the function returned.
        line: reported with a value of any other kind.
        logged: numbers that the function logged during the call.
    """
    logged = logged or {}
    if value is None:
        return RewardOutcome(Result.NOT_APPLICABLE, parts=logged)
    try:
        if not isinstance(value, Mapping):
            return RewardOutcome(Result.OK, number(value), logged)
        summed: dict[str, float] = {}
        unsummed = dict(logged)
        for name, value_of_part in value.items():
            if not is_part_name(name):
                raise Invalid(f"it returned a part named {cut(repr(name))}; {PART_NAME}")
            if not name.startswith(LOGGED):
                summed[name] = number(value_of_part, f"{cut(repr(name))} as ")
            elif value_of_part is not None and not isinstance(value_of_part, str):
                unsummed[name.removeprefix(LOGGED)] = number(value_of_part, f"{cut(repr(name))} as ")
        if not summed:
            only = " but logged numbers; for a row to which it does not apply it returns None" if unsummed else ""
            raise Invalid(f"it returned no part{only}")
        if twice := summed.keys() & unsummed.keys():
            raise Invalid(f"it returned the part {cut(repr(min(twice)))}, and logged a number of that name")
    except Invalid as wrong:
        return RewardOutcome(Result.INVALID, detail=str(wrong), line=line)
    total = sum(summed.values())
    if not math.isfinite(total) or abs(total) > LARGEST:
        return RewardOutcome(Result.INVALID, detail="it returned parts whose sum is too large", line=line)
    return RewardOutcome(Result.OK, total, summed | unsummed)


def is_part_name(name: object) -> bool:
    """Whether a number can have this name: after `LOGGED` it is text that does not end in a slash, see `PART_NAME`."""
    return isinstance(name, str) and bool(name.removeprefix(LOGGED)) and not name.endswith("/")


def note(logged: dict[str, float], name: str, value: object) -> None:
    """Log a number under a name. Raises Unusable if it is no finite number, or the name no text."""
    if not is_part_name(name):
        raise Unusable(f"it logged a number named {cut(repr(name))}; {PART_NAME}")
    try:
        logged[name] = number(value, f"{cut(repr(name))} as ", "logged")
    except Invalid as wrong:
        raise Unusable(str(wrong)) from None


def number(value: object, what: str = "", did: str = "returned") -> float:
    """A value as a finite number up to `LARGEST`. Raises Invalid, with ``what`` before the value, for any other."""
    kind = type(value).__name__
    is_complex = "complex" in str(getattr(value, "dtype", ""))  # of NumPy, of torch: float() drops a part of it
    if isinstance(value, str | bytes | bytearray) or not hasattr(value, "__float__") or is_complex:
        raise Invalid(f"it {did} {what}{shown(value)} ({kind}), not a number")
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError):  # an array of several numbers; an integer that is too large
        raise Invalid(f"it {did} {what}{shown(value)} ({kind}), not a finite number") from None
    if not math.isfinite(converted) or abs(converted) > LARGEST:
        raise Invalid(f"it {did} {what}{converted}, not a finite number")
    return converted


def shown(value: object) -> str:
    """A value of the user's function, shortened."""
    try:
        return cut(repr(value))
    except Exception:  # noqa: BLE001 (of the user's class, or an integer of more digits than Python writes)
        return "a value that Python cannot write"


def no_column(name: str, columns: Mapping[str, object]) -> str:
    """That a row has no column of this name, as the end of a sentence."""
    key = " (data.answer_key)" if name == ANSWER else ""
    return f"the row has no such column{key}; it has {cut(', '.join(columns))}"


def as_text(answer: object) -> str:
    """A reference answer as text: itself, or its JSON."""
    return answer if isinstance(answer, str) else json_text(answer)
