"""Variables that Kubernetes sets in each pod beside a Service, and that look like settings.

A Service named `titopool`, or `titopool-…`, gives every container of its namespace
`TITOPOOL_SERVICE_HOST`, `TITOPOOL_PORT=tcp://…` and others, unless the pod's specification says
`enableServiceLinks: false`. Names and values are both of a fixed form, which is all that is
taken for one of them here.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping

# What stands before these, "" or "WORKER_", is the rest of the Service's name.
_REST = r"(?:[A-Z0-9_]+_)?"
_PROTOCOL = "(?:TCP|UDP|SCTP)"
_URL = re.compile(r"(?:tcp|udp|sctp)://\S+:\d+")


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


_FORMS: tuple[tuple[re.Pattern[str], Callable[[str], object]], ...] = (
    (re.compile(f"{_REST}SERVICE_HOST"), _is_address),
    # A port with a name has a variable of its own beside that of the first port.
    (re.compile(f"{_REST}SERVICE_PORT(?:_[A-Z0-9_]+)?"), str.isdecimal),
    (re.compile(f"{_REST}PORT(?:_\\d+_{_PROTOCOL})?"), _URL.fullmatch),
    (re.compile(f"{_REST}PORT_\\d+_{_PROTOCOL}_PROTO"), re.compile("tcp|udp|sctp").fullmatch),
    (re.compile(f"{_REST}PORT_\\d+_{_PROTOCOL}_PORT"), str.isdecimal),
    (re.compile(f"{_REST}PORT_\\d+_{_PROTOCOL}_ADDR"), _is_address),
)


def service_variables(environ: Mapping[str, str], prefix: str) -> list[str]:
    """The names in `environ` that begin with `prefix` and stand for a Service."""
    return sorted(
        key
        for key, value in environ.items()
        if key.startswith(prefix)
        and any(
            form.fullmatch(key, len(prefix)) and is_possible(value) for form, is_possible in _FORMS
        )
    )
