"""What the server answers, as structs: its routes encode them, and its clients decode them.

Runs in: each gunicorn process, and programs that import `titopool`. Imports: nothing of titopool. A field that not every answer has is `UNSET`.
Answers of other projects' wires stand in their folders of `app`.
"""
