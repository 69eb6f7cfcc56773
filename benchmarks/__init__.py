"""Benchmarks of this server, the bare engine and other servers. Not part of the product."""
