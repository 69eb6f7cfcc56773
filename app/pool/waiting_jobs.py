"""The jobs of a front end that no worker has yet, in the order in which they go out."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from app.pool.records import OpenJob


class WaitingJobs:
    """A queue from which any job can be taken at once, however long it is."""

    def __init__(self) -> None:
        # By job id, first to last.
        self._jobs: OrderedDict[int, OpenJob] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._jobs.values())

    @property
    def first(self) -> OpenJob:
        return next(iter(self))

    def put_last(self, open_job: OpenJob) -> None:
        self._jobs[open_job.job.job_id] = open_job

    def put_first(self, open_jobs: Sequence[OpenJob]) -> None:
        """Puts jobs before all others, in their order."""
        for open_job in reversed(open_jobs):
            self._jobs[open_job.job.job_id] = open_job
            self._jobs.move_to_end(open_job.job.job_id, last=False)

    def take(self, job_id: int) -> OpenJob | None:
        """Removes a job; None if it does not wait."""
        return self._jobs.pop(job_id, None)
