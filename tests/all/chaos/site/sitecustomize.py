"""Gives the workers of a supervised server a stub engine that reports points to the harness.

On the PYTHONPATH of a server that tests/all/chaos/test_supervised.py starts; has no effect elsewhere.
"""

import os
import sys

if os.environ.get("CHAOS_CONTROL") and sys.orig_argv[1:3] == ["-m", "workers"]:
    from tests.all.chaos import worker

    worker.replace_engine(os.environ["CHAOS_CONTROL"])
