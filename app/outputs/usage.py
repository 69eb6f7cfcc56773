"""The number of tokens of a request, as OpenAI's API shows it."""

from typing import Any


def usage(num_prompt: int, num_generated: int, num_cached: int) -> dict[str, Any]:
    """OpenAI's `usage`, in tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
