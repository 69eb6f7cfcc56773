"""A vLLM worker extension in whose engine a grammar of clients hangs or kills, and the trial passes it.

The grammar says how, at which mask: `hang` and `kill` before the digits in its text.
"""

import os
import re
import signal
import time
from typing import Any

from workers.in_model.extension import WorkerExtension


class HangingExtension(WorkerExtension):
    """Passed to vLLM as `--worker-extension-cls`, on one device: the engine's process runs it."""

    def titopool_die_with(self, pid: int) -> int:
        # Not at import: the worker, whose child tries grammars, imports this module too.
        patch_grammars()
        return super().titopool_die_with(pid)


def patch_grammars() -> None:
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    compile_grammar = XgrammarBackend.compile_grammar

    def compile_and_patch(
        backend: Any, kind: Any, grammar_spec: str, *rest: Any, **named: Any
    ) -> Any:
        grammar = compile_grammar(backend, kind, grammar_spec, *rest, **named)
        found = re.search(r"(hang|kill)(\d+)", grammar_spec)
        if found:
            _end_the_engine_at(grammar, found[1], int(found[2]))
        return grammar

    XgrammarBackend.compile_grammar = compile_and_patch  # type: ignore[method-assign]


def _end_the_engine_at(grammar: Any, how: str, number: int) -> None:
    fill, num_masks = grammar.fill_bitmask, 0

    def fill_or_end(*arguments: Any) -> Any:
        nonlocal num_masks
        num_masks += 1
        if num_masks > number:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return fill(*arguments)

    grammar.fill_bitmask = fill_or_end
