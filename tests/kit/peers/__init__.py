"""Clients and servers of other projects, and stand-ins for both."""
