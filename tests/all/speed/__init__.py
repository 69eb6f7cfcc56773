"""Measurements: times beside load, and the commands of benchmarks/."""
