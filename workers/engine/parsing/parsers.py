"""vLLM's parsers of tool calls and reasoning, by vLLM's names.

Runs in: each worker process, which makes parsers and lets them adjust sampling parameters, and the helpers,
which parse. They do not run in front ends, because importing them takes seconds and they need vLLM's
tokenizer. The parsers are used as in vLLM's chat server (0.25.1 to 0.33,
openai/chat_completion/serving.py): they adjust the sampling parameters, then parse a completion whole
or step by step.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from titopool.errors import ConfigError, InvalidRequest
from titopool.settings.config import ServerConfig
from titopool.wire.messages import ChatParsing
from workers.engine.parsing.thoughts import THINKING, Thoughts, find_thoughts
from workers.engine.sampling import client_errors

logger = logging.getLogger(__name__)

# Parsers of reasoning that take one token a step: this one asserts it.
BY_TOKEN = frozenset({"hunyuan_a13b"})

# A message in OpenAI's nesting, and the finish_reason.
Parsed = tuple[dict[str, Any], str]


def check_parsers(config: ServerConfig) -> None:
    """Checks the parsers' names before the model is loaded.

    Raises:
        ConfigError: vLLM has no parser of that name.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for setting, manager in (
        ("tool_call_parser", ToolParserManager),
        ("reasoning_parser", ReasoningParserManager),
    ):
        name, known = getattr(config, setting), manager.list_registered()
        if name and name not in known:
            raise ConfigError(
                f"{setting}: expected one of {', '.join(sorted(known))}, got {name!r}"
            )


def load_parsers(config: ServerConfig, llm: Any) -> "Parsers | None":
    """The parsers that the settings name, for `llm`, vLLM's AsyncLLM; None: no setting names one.

    Raises:
        ConfigError: a parser does not work with the model's tokenizer.
    """
    if not config.tool_call_parser and not config.reasoning_parser:
        return None
    return Parsers(config.tool_call_parser, config.reasoning_parser, llm)


class Parsers:
    """Makes the parsers of each request."""

    def __init__(self, tool_call_parser: str, reasoning_parser: str, llm: Any):
        from vllm.parser import ParserManager

        self._tokenizer = llm.renderer.tokenizer
        self._model_config = llm.model_config
        # Whether a step of the parsers must be one token.
        self.by_token = reasoning_parser in BY_TOKEN
        is_harmony = self._model_config.hf_config.model_type == "gpt_oss"
        # None: the model does not think, or (gpt-oss) vLLM's parser makes grammars with thoughts.
        self.thoughts: Thoughts | None = None
        try:
            self._parser_class = ParserManager.get_parser(
                tool_parser_name=tool_call_parser or None,
                reasoning_parser_name=reasoning_parser or None,
                enable_auto_tools=bool(tool_call_parser),
                model_name=self._model_config.model,
                is_harmony=is_harmony,
            )
            # Some constructors raise if the tokenizer lacks the parser's tokens.
            self.make(None, {})
            if reasoning_parser and not is_harmony:
                self.thoughts = find_thoughts(reasoning_parser, llm)
                self._answer_class = ParserManager.get_parser(
                    tool_parser_name=tool_call_parser or None,
                    reasoning_parser_name=None,
                    enable_auto_tools=bool(tool_call_parser),
                    model_name=self._model_config.model,
                    is_harmony=False,
                )
        except Exception as error:
            raise ConfigError(
                f"tool_call_parser {tool_call_parser!r}, reasoning_parser {reasoning_parser!r}: expected "
                f"parsers for the tokenizer of {self._model_config.model}, got: {error}"
            ) from error

    def make(self, tools: Any, chat_template_kwargs: dict[str, Any]) -> Any:
        """A vLLM Parser for one completion: parsers are stateful."""
        return self._of_class(self._parser_class, tools, chat_template_kwargs)

    def make_for_answer(self, tools: Any, chat_template_kwargs: dict[str, Any]) -> Any:
        """A vLLM Parser for a completion without a thought; None: all of its text is content."""
        if self._answer_class is None:
            return None
        return self._of_class(self._answer_class, tools, chat_template_kwargs)

    def _of_class(self, kind: Any, tools: Any, chat_template_kwargs: dict[str, Any]) -> Any:
        return kind(
            self._tokenizer,
            tools,
            chat_template_kwargs=chat_template_kwargs,
            model_config=self._model_config,
        )

    def unparsed_arguments(self, prompt_token_ids: bytes) -> dict[str, Any]:
        """Arguments of AsyncLLM.generate for a grammar of a job that nobody parses.

        The grammar holds from the first token, or from the end of a thought that the prompt opens.
        """
        if self.thoughts is None:
            return {}
        if self.thoughts.is_open(np.frombuffer(prompt_token_ids, np.int32)):
            return {"reasoning_ended": False, "reasoning_parser_kwargs": THINKING}
        return {"reasoning_ended": True}

    def begin(self, chat: ChatParsing, params: Any, prompt_token_ids: bytes) -> "Parsing":
        """The parsing of a job; adjusts `params`, vLLM's SamplingParams, as the parsers require.

        Raises:
            InvalidRequest: vLLM refuses the tools.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        call = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        past = {"role": "assistant", "content": "", "tool_calls": [call] * chat.num_past_calls}
        body = {
            "messages": [past] if chat.num_past_calls else [],
            "parallel_tool_calls": chat.parallel_tool_calls,
            "include_reasoning": chat.include_reasoning,
            "chat_template_kwargs": chat.chat_template_kwargs,
            "skip_special_tokens": params.skip_special_tokens,
            "spaces_between_special_tokens": params.spaces_between_special_tokens,
        }
        if chat.tools:
            body |= {"tools": chat.tools, "tool_choice": chat.tool_choice}
        try:
            request = ChatCompletionRequest.model_validate(body)
            request.structured_outputs = params.structured_outputs
            prompt_ids = np.frombuffer(prompt_token_ids, np.int32).tolist()
            return Parsing(self, request, params, chat.chat_template_kwargs, prompt_ids)
        except client_errors() as error:
            field = "tools" if chat.tools else "chat_template_kwargs"
            text = f"{field}: the parsers refused them: {error}"[:500]
            raise InvalidRequest(text, param=field) from error


class Parsing:
    """The parsers of one job."""

    def __init__(
        self,
        parsers: Parsers,
        request: Any,
        params: Any,
        chat_template_kwargs: dict[str, Any],
        prompt_ids: list[int],
    ):
        self._parsers = parsers
        self._kwargs = chat_template_kwargs
        self._prompt_ids = prompt_ids
        # Of a streamed job: each completion's parser, and the completions that have called a tool.
        self._stream_parsers: dict[int, Any] = {}
        self._callers: set[int] = set()
        parser = parsers.make(request.tools, chat_template_kwargs)
        # Whether completions may begin with what the grammar matches.
        self._may_begin_with_answer = False
        asked = params.structured_outputs
        self._has_tools = parser.tool_parser is not None and request.tool_choice != "none"
        if self._has_tools or parser.reasoning_parser is not None:
            request = parser.adjust_request(request)
            params.skip_special_tokens = request.skip_special_tokens
            params.spaces_between_special_tokens = request.spaces_between_special_tokens
            params.structured_outputs = request.structured_outputs
        self._request = request
        is_clients = asked is not None and params.structured_outputs == asked
        self.engine_arguments = self._reasoning_arguments(parser, params, is_clients)

    def _reasoning_arguments(self, parser: Any, params: Any, is_clients: bool) -> dict[str, Any]:
        """Arguments of AsyncLLM.generate: whether the grammar applies from the first token on.

        Where the model may open a thought by itself, the grammar in `params` becomes one that the
        thought may come before.
        """
        if parser.reasoning_parser is None:
            return {}
        request, thoughts = self._request, self._parsers.thoughts
        is_of_parser = getattr(request, "_grammar_from_parser", False) or getattr(
            request, "_grammar_from_tool_parser", False
        )
        has_ended = (
            not request.include_reasoning
            or is_of_parser
            or parser.is_reasoning_end(self._prompt_ids)
        )
        if thoughts is not None and params.structured_outputs is not None and not is_of_parser:
            if not has_ended and not thoughts.is_open(np.array(self._prompt_ids, np.int32)):
                has_ended = True
                params.structured_outputs = thoughts.before_grammar(params.structured_outputs)
            # A grammar that a tool parser made may have thoughts in its free text, which only
            # their one token tells from an answer.
            self._may_begin_with_answer = has_ended and (
                is_clients or thoughts.start_id is not None
            )
        return {
            "reasoning_ended": has_ended,
            "reasoning_parser_kwargs": {"chat_template_kwargs": self._kwargs},
        }

    def _parser_of(self, token_ids: Sequence[int]) -> Any:
        """The parser of a completion that begins with `token_ids`; None: its text is content."""
        arguments, thoughts = (self._request.tools, self._kwargs), self._parsers.thoughts
        has_thought = thoughts is None or list(token_ids[:1]) == [thoughts.start_id]
        if self._may_begin_with_answer and not has_thought:
            return self._parsers.make_for_answer(*arguments)
        return self._parsers.make(*arguments)

    def whole(self, text: str, token_ids: list[int], finish_reason: str) -> Parsed:
        """The message of a completion that has ended."""
        return _or_plain_text(
            lambda: self._parse(text, token_ids, finish_reason), text, finish_reason
        )

    def _parse(self, text: str, token_ids: list[int], finish_reason: str) -> Parsed:
        parser = self._parser_of(token_ids)
        if parser is None:
            return {"content": text}, finish_reason
        if hasattr(parser, "set_prompt_token_ids"):
            parser.set_prompt_token_ids(self._prompt_ids)
        reasoning, content, calls = parser.parse(
            text,
            self._request,
            enable_auto_tools=self._has_tools,
            model_output_token_ids=token_ids,
        )
        message: dict[str, Any] = {"content": content}
        if reasoning and self._request.include_reasoning:
            message["reasoning"] = reasoning
        if calls and self._has_tools:
            message["tool_calls"] = [_tool_call(call) for call in self._allowed(calls)]
            finish_reason = self._finish_reason(finish_reason, has_called=True)
        return message, finish_reason

    def delta(self, index: int, text: str, token_ids: list[int], finish_reason: str) -> Parsed:
        """What a step's text and tokens add to the message of completion `index`."""
        return _or_plain_text(
            lambda: self._parse_delta(index, text, token_ids, finish_reason), text, finish_reason
        )

    def _parse_delta(
        self, index: int, text: str, token_ids: list[int], finish_reason: str
    ) -> Parsed:
        if index not in self._stream_parsers:
            self._stream_parsers[index] = self._parser_of(token_ids)
        parser = self._stream_parsers[index]
        if parser is None:
            return {"content": text} if text else {}, finish_reason
        added = parser.parse_delta(
            delta_text=text,
            delta_token_ids=token_ids,
            request=self._request,
            prompt_token_ids=self._prompt_ids,
            finished=bool(finish_reason),
        )
        message: dict[str, Any] = {}
        if added is not None:
            message = added.model_dump(exclude_none=True, exclude={"role"})
            calls = self._allowed(added.tool_calls or ())
            message.pop("tool_calls", None)
            if not self._request.include_reasoning:
                # vLLM 0.25's parsers do not look at `include_reasoning`; its server removes it.
                message.pop("reasoning", None)
            if calls:
                self._callers.add(index)
                message["tool_calls"] = [one.model_dump(exclude_none=True) for one in calls]
        if finish_reason:
            finish_reason = self._finish_reason(finish_reason, has_called=index in self._callers)
        return message, finish_reason

    def _allowed(self, calls: Any) -> list[Any]:
        if self._request.parallel_tool_calls is not False:
            return list(calls)
        # A delta has the index of its call; whole calls are in order.
        return [one for number, one in enumerate(calls) if getattr(one, "index", number) == 0]

    def _finish_reason(self, finish_reason: str, *, has_called: bool) -> str:
        """OpenAI's: "tool_calls" if the model chose the function, "stop" if the request named it."""
        is_named = not isinstance(self._request.tool_choice, str)
        if has_called and finish_reason == "stop" and not is_named:
            return "tool_calls"
        return finish_reason


def _or_plain_text(parse: Callable[[], Parsed], text: str, finish_reason: str) -> Parsed:
    """The result of `parse`; the text as content if a parser raises on the model's text."""
    try:
        message, finish_reason = parse()
    except Exception:
        logger.warning("a parser failed; the text is sent unparsed", exc_info=True)
        message = {"content": text}
    return _without_surrogates(message), finish_reason


def _without_surrogates(value: Any) -> Any:
    """`value` with lone surrogates, which UTF-8 cannot encode, as JSON escapes.

    Parsers make them from the escapes that a model writes into arguments.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _without_surrogates(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(one) for one in value]
    return value


def _tool_call(call: Any) -> dict[str, Any]:
    from vllm.utils import random_uuid

    return {
        "id": call.id or f"chatcmpl-tool-{random_uuid()}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
