"""The worker processes, which run vLLM, and the supervisor that starts them.

Each sub-package says in which process it runs. Workers and front ends exchange ZeroMQ messages
(`titopool/wire/messages.py`). Modules import vLLM, torch and transformers only inside functions;
`tests/project/test_self_check.py` lists the modules that do so.
"""
