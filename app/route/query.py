"""Values of a URL's query, checked."""

import math
from collections.abc import Mapping
from typing import TypeVar

from flask import request

from titopool.errors import InvalidRequest

Value = TypeVar("Value")
# As pydantic reads a bool, which vLLM's server uses.
FLAGS = {
    "true": True, "1": True, "yes": True, "on": True, "t": True, "y": True,
    "false": False, "0": False, "no": False, "off": False, "f": False, "n": False,
}  # fmt: skip


def query_flag(name: str, *, default: bool) -> bool:
    """The bool `name` of the current request's query.

    Raises:
        InvalidRequest: the query has another value.
    """
    return query_choice(name, FLAGS, default=default, shown="true or false")


def query_count(name: str, *, default: int, most: int) -> int:
    """The whole number `name` of the current request's query, from 1 to `most`.

    Raises:
        InvalidRequest: the query has another value.
    """
    given = request.args.get(name)
    if given is None:
        return default
    number = int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else 0
    if not 1 <= number <= most:
        raise InvalidRequest(f"{name}: expected 1 to {most} in the query, got {given[:100]!r}")
    return number


def query_time(name: str) -> float:
    """The Unix time `name` of the current request's query, in seconds; 0 if it has none.

    Raises:
        InvalidRequest: the query has another value.
    """
    given = request.args.get(name, "0")
    try:
        time_s = float(given)
    except ValueError:
        time_s = math.nan
    if math.isnan(time_s):
        raise InvalidRequest(
            f"{name}: expected a Unix time in seconds in the query, got {given[:100]!r}"
        )
    return time_s


def query_choice(
    name: str, choices: Mapping[str, Value], *, default: Value, shown: str = ""
) -> Value:
    """What `choices` has for the word `name` of the current request's query.

    Args:
        shown: the accepted words, for the error; "": all of them.

    Raises:
        InvalidRequest: the query has another word.
    """
    given = request.args.get(name)
    if given is None:
        return default
    if given.lower() not in choices:
        raise InvalidRequest(
            f"{name}: expected {shown or ', '.join(choices)} in the query, got {given[:100]!r}"
        )
    return choices[given.lower()]
