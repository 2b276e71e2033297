"""How a reward function is called: which of its parameters receives the response, the answer, a column of the row.

- A parameter called response or completion receives the response, one called answer the answer, any other the column of
  its name (prompt is one).
- Of the first two parameters, those with other names receive the response and the answer, in this order.
- ``**names`` receives everything that no parameter has.
"""

import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter

RESPONSE = ("response", "completion")
ANSWER = "answer"


class MissingColumn(Exception):
    """A parameter without a default is no column of the row; the text is the parameter's name."""


class Arguments:
    """The parameters of one function."""

    def __init__(self, function: Callable[..., object]) -> None:
        """Raises TypeError if the function takes no argument."""
        try:
            self._parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a function written in C without a signature
            self._parameters = [Parameter("args", Parameter.VAR_POSITIONAL)]
        if not self._parameters:
            raise TypeError("it takes no argument")
        names = {one.name for one in self._parameters}
        unnamed = [index for index, named in enumerate((names & {*RESPONSE}, names & {ANSWER})) if not named]
        self._unnamed = unnamed
        self._takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in self._parameters)

    def of(
        self, response: str, answer: object, columns: Mapping[str, object]
    ) -> tuple[list[object], dict[str, object]]:
        """The positional and the named arguments of a call. Raises MissingColumn."""
        known = {**columns, ANSWER: answer, **dict.fromkeys(RESPONSE, response)}
        both: list[tuple[str, object]] = [(RESPONSE[0], response), (ANSWER, answer)]
        unnamed = [both[index] for index in self._unnamed]
        positional: list[object] = []
        named: dict[str, object] = {}
        for index, one in enumerate(self._parameters):
            if one.kind is Parameter.VAR_KEYWORD:
                continue
            if one.kind is Parameter.VAR_POSITIONAL:
                positional += [value for _, value in unnamed]
                unnamed = []
                continue
            if one.name in known:
                value = known[one.name]
            elif index < 2 and unnamed and one.kind is not Parameter.KEYWORD_ONLY:
                _, value = unnamed.pop(0)
            elif one.default is not Parameter.empty:
                if one.kind is Parameter.POSITIONAL_ONLY:
                    break
                continue
            else:
                raise MissingColumn(one.name)
            # After a parameter that keeps its default, the others are named.
            if one.kind is Parameter.POSITIONAL_ONLY or (
                one.kind is Parameter.POSITIONAL_OR_KEYWORD and len(positional) == index
            ):
                positional.append(value)
            else:
                named[one.name] = value
        if self._takes_any:
            has = {one.name for one in self._parameters}
            named |= {name: value for name, value in (*columns.items(), *unnamed) if name not in has}
        return positional, named
