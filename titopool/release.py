"""The release of titopool, and which releases of client and server work together."""

RELEASE = "0.1.0"
# On every response of the server: its release.
VERSION_HEADER = "X-Titopool-Version"


def are_compatible(one: str, other: str) -> bool:
    """Whether a client and a server of these releases work together.

    A release may change fields of bodies and answers if it changes the first number, or the second
    one before 1.0.
    """
    return _series(one) == _series(other)


def series_of(release: str) -> str:
    """The releases that work with `release`, in pip's words: `0.1.*`."""
    return ".".join((*_series(release), "*"))


def _series(release: str) -> tuple[str, ...]:
    first, second = [*release.split("."), "0"][:2]
    return (first, second) if first == "0" else (first,)
