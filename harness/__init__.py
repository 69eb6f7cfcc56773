"""What tests and benchmarks both need: servers, stub workers, tiny models and hostile requests."""
