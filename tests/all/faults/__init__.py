"""Faults of real engines that take half a minute each to stage."""
