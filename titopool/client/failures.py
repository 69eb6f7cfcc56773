"""Errors of calls that the server did not answer, beside those that it sends (`titopool/errors.py`).

    TitopoolError                 what the server sends, by its code
    ├── ConnectionLost            no connection to the server, or it was cut
    ├── TimedOut                  no answer within the client's timeout
    ├── UnexpectedAnswer          an answer that is not the server's, or that cannot be read
    └── IncompatibleServer        the server is of a release that this client does not know

`status` is 0 where no answer came.
"""

import os
import ssl
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from titopool.errors import TitopoolError


class ConnectionLost(TitopoolError):
    """The server cannot be reached, or the connection was cut before the whole answer."""

    status = 0
    code = "connection_lost"


class TimedOut(TitopoolError):
    """The server did not answer within the client's timeout. The server has been told to stop."""

    status = 0
    code = "timed_out"


class UnexpectedAnswer(TitopoolError):
    """The answer is not titopool's, for example a proxy's, or cannot be read."""

    status = 0
    code = "unexpected_answer"


class IncompatibleServer(TitopoolError):
    """Client and server are of releases that do not work together; the message names which."""

    status = 0
    code = "incompatible_server"


def no_server(url: str, error: BaseException, remedy: str) -> str:
    """What every command and client says where no server answers; `remedy` beside starting one."""
    number = getattr(error, "errno", None) or 0
    # asyncio's own text repeats the address, and OpenSSL's numbers are not the system's.
    is_of_system = isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and number > 0
    reason = os.strerror(number) if is_of_system else str(error) or type(error).__name__
    if isinstance(error, ssl.SSLError):
        return f"{url}: no TLS connection ({reason}); check the certificate (SSL_CERT_FILE) and the URL"
    parts = urlsplit(url)
    proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    if proxy:
        # Without its user and password.
        via = urlsplit(proxy).netloc.rpartition("@")[2] or "of the environment"
        return (
            f"{url}: no answer through the proxy {via} ({reason}); check http_proxy and no_proxy, or "
            "start a server with `titopool serve`"
        )
    return f"{url}: no server answers ({reason}); start one with `titopool serve`, or {remedy}"
