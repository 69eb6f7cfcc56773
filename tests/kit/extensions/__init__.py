"""Extensions of vLLM's worker that fail in the ways that tests need."""
