"""Measures the server against the bare engine. Not part of the product."""
