"""What a worker records of a job that has ended: counters, and what it left in the cache."""

import msgspec

from titopool.messages import Completed, Failed, Job, WorkerCounters, WorkerFacts
from titopool.prefixes import completion_hashes, prompt_hashes
from workers.engine import Generated

# Token ids travel as int32.
ID_BYTES = 4


def count(counters: WorkerCounters, job: Job, result: Completed | Failed) -> None:
    """Adds a job that has ended."""
    if isinstance(result, Failed):
        counters.num_failed_jobs += 1
        return
    counters.num_completed_jobs += 1
    prompt_ids = result.prompt_token_ids or job.prompt_token_ids
    counters.num_prompt_tokens += len(prompt_ids) // ID_BYTES
    counters.num_cached_tokens += result.num_cached_tokens
    counters.num_completion_tokens += sum(
        len(completion.token_ids) // ID_BYTES for completion in result.completions
    )


def prefix_of(job: Job, generated: Generated, facts: WorkerFacts | None) -> bytes:
    """`Completed.prefix`: digests of what the prompts to come may begin with."""
    if job.prefix is None or facts is None:
        return b""
    chain = b""
    if generated.prompt_token_ids:
        # The next turn begins with these ids, not with those that were sent.
        digests = [image.digest for image in job.images]
        chain = prompt_hashes(generated.prompt_token_ids, job.cache_salt, digests, facts.images)
        job = msgspec.structs.replace(
            job, prompt_token_ids=generated.prompt_token_ids, prefix=chain
        )
    completions = [
        completion_hashes(job, one.token_ids, facts.images) for one in generated.completions
    ]
    return chain + b"".join(completions)
