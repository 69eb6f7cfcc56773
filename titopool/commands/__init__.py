"""The commands of `titopool`, one module each; `titopool/commands/group.py` has their list.

Runs in: the user's terminal. A module imports at its top only what its help needs, so that help and
completion stay fast; what a command does is imported when it runs.
"""
