"""Golden requests: for each URL rule requests, and in `answers/` the answer to each of them.

`exchanges.py` has the requests in the order in which one server gets them; `masks.py` takes out what
differs from run to run. tests/golden/test_golden.py compares; after a change of behaviour `make golden` writes
the files anew, and the commit says what has changed.
"""
