"""Errors of calls that the server did not answer, beside those that it sends (`titopool/errors.py`).

    TitopoolError                 what the server sends, by its code
    ├── ConnectionLost            no connection to the server, or it was cut
    ├── TimedOut                  no answer within the client's timeout
    ├── UnexpectedAnswer          an answer that is not the server's, or that cannot be read
    └── IncompatibleServer        the server is of a release that this client does not know

`status` is 0 where no answer came.
"""

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
