"""One HTTP request's jobs, and the single end that they come to.

Made by a handler, which waits; completed or failed by the link.
"""

from gevent.event import Event

from titopool.errors import TitopoolError
from titopool.messages import Completed, Job


class Request:
    """Jobs in the order of the request, and their results in the same order."""

    def __init__(self, jobs: list[Job]):
        self.jobs = jobs
        self.results: list[Completed | None] = [None] * len(jobs)
        self.error: TitopoolError | None = None
        self.num_open = len(jobs)
        self._done = Event()

    @property
    def is_done(self) -> bool:
        """Whether the end has come: all jobs are complete, or one has failed."""
        return bool(self._done.is_set())

    def complete(self, index: int, result: Completed) -> None:
        """Records the result of job `index`; does nothing after the end."""
        if self._done.is_set() or self.results[index] is not None:
            return
        self.results[index] = result
        self.num_open -= 1
        if self.num_open == 0:
            self._done.set()

    def fail(self, error: TitopoolError) -> bool:
        """Ends the request with `error`; returns whether it had not ended before."""
        if self._done.is_set():
            return False
        self.error = error
        self._done.set()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the end, at most `timeout_s`; returns whether it has come."""
        return bool(self._done.wait(timeout_s))

    def completed(self) -> list[Completed]:
        """The results of all jobs.

        Raises:
            TitopoolError: why the request failed.
        """
        if self.error is not None:
            raise self.error
        return [result for result in self.results if result is not None]
