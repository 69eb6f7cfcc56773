"""Real front ends before workers with a stub engine."""
