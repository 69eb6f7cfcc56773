"""Pools on a Ray cluster of this machine."""
