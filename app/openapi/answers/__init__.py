"""Shapes of answers as structs: for the description, not for writing answers.

Runs in: each gunicorn process. Imports: `titopool`, `app.schemas`. `tests/openapi/` compares real
answers with them. A field that not every answer has is `UNSET`.
"""
