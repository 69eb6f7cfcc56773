"""Prompts of ids and text."""
