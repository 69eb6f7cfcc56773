"""What front ends count and measure: requests, tokens, waits.

Runs in: each gunicorn process, and its master where that adds up the counts of processes that have
ended.
"""
