"""What the server answers, as structs: its routes encode them, titopool's own clients decode them.

Runs in: each gunicorn process, and programs that import `titopool`. Imports: nothing of titopool. A
field that not every answer has is `UNSET`, and so is one that is added within a series of releases:
a server of an earlier one lacks it. Answers that none of these clients reads stand in the
folders of their protocols (`app`).
"""
