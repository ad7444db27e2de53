"""Checks of the values of options and arguments.

A check takes the name of an option and the value that was given. It returns the value to use, or raises TypeError or
ValueError that names the option, the value and what is allowed. ``loss_average`` and ``patterns`` are checks;
``number``, ``count``, ``instance``, ``one_of`` and ``optional`` make one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

Check = Callable[[str, Any], Any]


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether this is an int or a float; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_int(value: Any) -> TypeGuard[int]:
    """Whether this is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: float) -> bool:
    """Whether a number is > 0 and finite."""
    return 0 < value < math.inf


def require_number(name: str, value: Any, allowed: str, test: Callable[[Any], bool], *, owner: str = "") -> None:
    """Raises TypeError or ValueError unless an argument is a number that passes a test.

    Args:
        name: The argument's name.
        value: What was given.
        allowed: Which numbers pass, for the message.
        test: Whether a number passes.
        owner: The class or function whose argument it is, if that is not obvious.
    """
    text = f"{owner}({name}={value!r}): must be " if owner else f"{name}={value!r}: must be "
    if not is_number(value):
        raise TypeError(f"{text}a number, {allowed}, not {type(value).__name__}")
    if not test(value):
        raise ValueError(f"{text}{allowed}")


def require_schedule(name: str, value: Any, allowed: str, test: Callable[[Any], bool], *, owner: str = "") -> None:
    """As :func:`require_number`, but a function of the step passes, too."""
    if not _is_function(value):
        require_number(name, value, f"{allowed}, or a callable(step)", test, owner=owner)


def _is_function(value: Any) -> bool:
    """Whether this can be called; classes do not count."""
    return callable(value) and not isinstance(value, type)


def number(allowed: str, test: Callable[[Any], bool]) -> Check:
    """A check for a number, or a function of the step."""

    def check(name: str, value: Any) -> Any:
        require_schedule(name, value, allowed, test)
        return value

    return check


def count(*, or_callable: bool = False, or_none: bool = True, or_word: str | None = None, least: int = 1) -> Check:
    """A check for an int >= ``least`` or, where allowed, a function of the step, None, or one word."""
    more = ["a callable(step)"] * or_callable + [repr(or_word)] * (or_word is not None) + ["None"] * or_none
    allowed = " or ".join([f"an int >= {least}", *more])

    def check(name: str, value: Any) -> Any:
        if (value is None and or_none) or (or_callable and _is_function(value)) or (or_word and value == or_word):
            return value
        if not is_int(value):
            raise TypeError(f"{name}={value!r}: must be {allowed}, not {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}={value!r}: must be {allowed}")
        return value

    return check


def instance(names: Mapping[Any, Any], *methods: str, kind: type = object) -> Check:
    """A check for the short name of an instance, or for an object of a class or with the methods of a protocol."""
    listed = " and ".join(f"{method}()" for method in methods)
    other = f"an object that has {listed}" if methods else f"an instance of kfac_optim.{kind.__name__}"
    allowed = f"one of {', '.join(map(repr, names))}, or {other}"

    def check(name: str, value: Any) -> Any:
        if value is None or isinstance(value, str):
            if value in names:
                return names[value]
            raise ValueError(f"{name}={value!r}: must be {allowed}")
        has_all = all(callable(getattr(value, method, None)) for method in methods)
        if isinstance(value, type) or not (isinstance(value, kind) and has_all):
            meant = f"; did you mean {value.__name__}()?" if isinstance(value, type) else ""
            raise TypeError(f"{name}={value!r}: must be {allowed}{meant}")
        return value

    return check


def _accepting(allowed: str, accepts: Callable[[Any], bool], error: type[Exception] = ValueError) -> Check:
    def check(name: str, value: Any) -> Any:
        if not accepts(value):
            raise error(f"{name}={value!r}: must be {allowed}")
        return value

    return check


def one_of(*choices: Any, or_callable: bool = False) -> Check:
    """A check for one of some values or, where allowed, a function."""

    def accepts(value: Any) -> bool:
        return (or_callable and _is_function(value)) or any(type(value) is type(x) and value == x for x in choices)

    return _accepting(f"one of {', '.join(map(repr, choices))}{' or a callable' * or_callable}", accepts)


def optional(kind: type, called: str) -> Check:
    """A check for an instance of a class or None; ``called`` is how the message names such an instance."""
    return _accepting(f"{called} or None", lambda value: isinstance(value, kind | None), TypeError)


loss_average = _accepting(
    "one of 'batch', 'batch+sequence', 'elements', None, the number of loss terms (an int >= 1), or a "
    "callable(inputs, output) that returns it",
    lambda x: is_int(x) and x >= 1 or callable(x) or x in ("batch", "batch+sequence", "elements", None),
)


def patterns(name: str, value: Any) -> tuple[str, ...]:
    """The check for regular expressions."""
    listed = isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(item, str) for item in value)
    if not listed:
        raise TypeError(f"{name}={value!r}: must be a sequence of regular expressions, such as ['head']")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}={value!r}: {pattern!r} is not a regular expression: {error}") from None
    return tuple(value)
