"""Trainers that send weights."""
