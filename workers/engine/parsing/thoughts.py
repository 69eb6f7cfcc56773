"""Where a grammar begins in a model that thinks before it answers.

With a reasoning parser, vLLM's engine applies a grammar after the end of a thought only, which need
not come. So titopool tells the engine for each request whether to wait.
"""

import json
from typing import Any

import numpy as np

from workers.engine.sampling import client_errors

# Of parsers that name no markers.
COMMON_MARKERS = ("<think>", "</think>")
# Options of a grammar that structural tags do not have.
WITHOUT_A_FORM = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
# Some parsers of vLLM see thoughts only where the template was told to think.
THINKING: dict[str, Any] = {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}


def find_thoughts(parser_name: str, llm: Any) -> "Thoughts":
    """The thoughts of the model of `llm`, vLLM's AsyncLLM, by the reasoning parser of that name."""
    from vllm.reasoning import ReasoningParserManager

    tokenizer = llm.renderer.tokenizer
    kind = ReasoningParserManager.get_reasoning_parser(parser_name)
    parser = kind(tokenizer, model_config=llm.model_config, **THINKING)
    names = ("reasoning_start_str", "reasoning_end_str")
    start, end = (getattr(parser, name, None) for name in names)
    eos = llm.model_config.try_get_generation_config().get("eos_token_id")
    turn_ends = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
    options = llm.vllm_config.structured_outputs_config
    return Thoughts(
        tokenizer,
        (start, end) if start and end else COMMON_MARKERS,
        sorted(turn_ends),
        has_tags=options.backend == "xgrammar" and not options.disable_any_whitespace,
    )


class Thoughts:
    """The markers of a model's thoughts."""

    def __init__(
        self, tokenizer: Any, markers: tuple[str, str], turn_ends: list[int], *, has_tags: bool
    ):
        """`has_tags`: whether the engine's grammars can be any structural tag of xgrammar."""
        self._tokenizer = tokenizer
        self._start, self._end = markers
        self._turn_ends = turn_ends
        self._has_tags = has_tags
        vocabulary = tokenizer.get_vocab()
        # The token that opens a thought; None: several tokens do.
        self.start_id: int | None = vocabulary.get(self._start)
        self._end_id: int | None = vocabulary.get(self._end)

    def is_open(self, prompt_ids: np.ndarray) -> bool:
        """Whether the last turn of the prompt, int32 ids, has a thought without its end."""
        (turn_ends,) = np.nonzero(np.isin(prompt_ids, self._turn_ends))
        turn = prompt_ids[turn_ends[-1] + 1 :] if len(turn_ends) else prompt_ids
        if self.start_id is not None and self._end_id is not None:
            (markers,) = np.nonzero(np.isin(turn, (self.start_id, self._end_id)))
            return bool(len(markers)) and int(turn[markers[-1]]) == self.start_id
        text = self._tokenizer.decode(turn.tolist())
        return bool(text.rfind(self._start) > text.rfind(self._end))

    def before_grammar(self, structured_outputs: Any) -> Any:
        """A grammar that lets a thought come before `structured_outputs`, and asks for none.

        The result is `structured_outputs` where vLLM or xgrammar cannot make it (vLLM 0.25), and
        where several tokens open or end a thought.
        """
        import vllm.parser.abstract_parser as parsing
        import xgrammar.structural_tag as tags
        from vllm.sampling_params import StructuredOutputsParams

        to_format = getattr(parsing, "structured_outputs_to_format", None)
        formats = ("TokenFormat", "AnyTokensFormat", "OptionalFormat")
        knows_tokens = all(hasattr(tags, name) for name in formats)
        is_one_token = self.start_id is not None and self._end_id is not None
        has_no_form = any(getattr(structured_outputs, name, None) for name in WITHOUT_A_FORM)
        can_make = self._has_tags and knows_tokens and is_one_token and not has_no_form
        if to_format is None or not can_make:
            return structured_outputs
        try:
            answer = to_format(structured_outputs).model_dump()
        except client_errors():
            # The trial of the grammar says what is wrong with it.
            return structured_outputs
        thought = {
            "type": "tag",
            "begin": {"type": "token", "token": self.start_id},
            "content": {"type": "any_tokens", "exclude_tokens": [self._end_id]},
            "end": {"type": "token", "token": self._end_id},
        }
        elements = [{"type": "optional", "content": thought}, answer]
        tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
        return StructuredOutputsParams(structural_tag=json.dumps(tag))
