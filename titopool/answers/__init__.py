"""What titopool's own routes answer, as structs: they encode them, and its clients decode what they read.

Runs in: each gunicorn process, and programs that import `titopool`. Imports: nothing of titopool. A
field that not every answer has is `UNSET`, and so is one that is added within a series of releases:
a server of an earlier one lacks it. Answers of other projects' wires stand in the folders of `app`,
but for those that titopool's client reads.
"""
