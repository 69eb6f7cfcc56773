"""Requests and answers of a server with a stub engine."""
