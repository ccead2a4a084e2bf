"""Every field of a request that a supported vLLM knows, and what the router does with it.

Read by the tests and, inside a vLLM environment, by checks against vLLM's own request classes. A
field that is not here makes those checks fail: whoever adds a vLLM version decides what it means
for the two legs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

KEPT = "kept"
"""Both legs carry it as the client sent it: it shapes the prompt, or does no harm to one token."""

DECODE = "decode"
"""Only the decode leg carries it: it clashes with "one token, not streamed"."""

SET = "set"
"""The prefill leg carries a value of the router's own, decode the client's."""

ALONE = "alone"
"""A request with this example is answered by decode alone."""

HELD = "held"
"""A request with this example is answered by the decode engine that has what it names."""

WITHHELD = "withheld"
"""No engine sees what the client sent."""


class Field(NamedTuple):
    """How a field travels; `example` is a value that vLLM accepts, `needs` what it must go with."""

    way: str
    example: Any
    needs: Mapping[str, Any] = MappingProxyType({})


_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}
_REPETITION = {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}

_BOTH = {
    "model": Field(KEPT, "m"),
    "frequency_penalty": Field(KEPT, 0.5),
    "presence_penalty": Field(KEPT, 0.5),
    "repetition_penalty": Field(KEPT, 1.1),
    "logit_bias": Field(KEPT, {"5": 1.0}),
    "seed": Field(KEPT, 2**53 + 1),
    "temperature": Field(KEPT, 0.3),
    "top_p": Field(KEPT, 0.9),
    "top_k": Field(KEPT, 5),
    "min_p": Field(KEPT, 0.1),
    "watermarking": Field(KEPT, False),
    "user": Field(KEPT, "u"),
    "length_penalty": Field(KEPT, 1.5),
    "stop_token_ids": Field(KEPT, [7]),
    "include_stop_str_in_output": Field(KEPT, True),
    "ignore_eos": Field(KEPT, True),
    "skip_special_tokens": Field(KEPT, False),
    "spaces_between_special_tokens": Field(KEPT, False),
    "truncate_prompt_tokens": Field(KEPT, 32),
    "truncation_side": Field(KEPT, "left"),
    "allowed_token_ids": Field(KEPT, [1, 2]),
    "bad_words": Field(KEPT, ["x"]),
    "add_special_tokens": Field(KEPT, True),
    "response_format": Field(KEPT, _JSON_SCHEMA),
    "structured_outputs": Field(KEPT, {"json": _SCHEMA}),
    "priority": Field(KEPT, 3),
    "session_id": Field(KEPT, "s"),
    "return_tokens_as_token_ids": Field(KEPT, True),
    "return_token_offsets": Field(KEPT, True),
    "mm_payload": Field(KEPT, "none"),
    "return_mm_kwargs": Field(KEPT, False),
    "cache_salt": Field(KEPT, "salt"),
    "vllm_xargs": Field(KEPT, {"a": 1, "b": [1, "x"]}),
    "repetition_detection": Field(KEPT, _REPETITION),
    "thinking_token_budget": Field(KEPT, 100),
    "stream": Field(SET, True),
    "stream_options": Field(DECODE, {"include_usage": True}, {"stream": True}),
    "stream_interval": Field(DECODE, 4),
    "max_tokens": Field(SET, 500),
    "min_tokens": Field(DECODE, 100, {"max_tokens": 200}),
    "stop": Field(DECODE, ["x"]),
    "return_token_ids": Field(DECODE, True),
    "n": Field(ALONE, 2),
    "use_beam_search": Field(ALONE, True, {"n": 2}),
    "prompt_logprobs": Field(ALONE, 1),
    "routed_experts_prompt_start": Field(ALONE, 3),
    "echo": Field(ALONE, True),
    "request_id": Field(WITHHELD, "mine"),
    "kv_transfer_params": Field(WITHHELD, {"remote_host": "evil"}),
    "ec_transfer_params": Field(WITHHELD, {"remote_host": "evil"}),
}

CHAT_FIELDS = _BOTH | {
    "messages": Field(
        KEPT, [{"role": "user", "content": [{"type": "text", "text": "What is \u00e9\U0001f600?"}]}]
    ),
    "logprobs": Field(KEPT, True),
    "top_logprobs": Field(KEPT, 5, {"logprobs": True}),
    "logprob_token_ids": Field(KEPT, [1, 2], {"logprobs": True}),
    "max_completion_tokens": Field(SET, 500),
    "tools": Field(KEPT, [_TOOL]),
    "tool_choice": Field(KEPT, "required", {"tools": [_TOOL]}),
    "parallel_tool_calls": Field(KEPT, False),
    "reasoning_effort": Field(KEPT, "low"),
    "include_reasoning": Field(KEPT, False),
    "add_generation_prompt": Field(KEPT, False),
    "continue_final_message": Field(KEPT, True, {"add_generation_prompt": False}),
    "documents": Field(KEPT, [{"title": "t", "text": "x"}]),
    "chat_template": Field(KEPT, "{{ messages }}"),
    "chat_template_kwargs": Field(KEPT, {"enable_thinking": False}),
    "media_io_kwargs": Field(KEPT, {"image": {"a": 1}}),
    "mm_processor_kwargs": Field(KEPT, {"a": 1}),
    "return_prompt_text": Field(DECODE, True),
    "return_assistant_tokens_mask": Field(KEPT, True),
}

COMPLETION_FIELDS = _BOTH | {
    "prompt": Field(KEPT, "What is \u00e9\U0001f600?"),
    "logprobs": Field(KEPT, 5),
    "logprob_token_ids": Field(KEPT, [1, 2], {"logprobs": 5}),
    "suffix": Field(KEPT, "end"),
    "prompt_embeds": Field(ALONE, "AAAA"),
}

_FUNCTION = {"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}
_MESSAGE = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
_NOT_OF_RESPONSES = (
    *("length_penalty", "spaces_between_special_tokens", "truncate_prompt_tokens"),
    *("truncation_side", "allowed_token_ids", "bad_words", "add_special_tokens"),
    *("response_format", "return_tokens_as_token_ids", "return_token_offsets"),
    *("repetition_detection", "thinking_token_budget", "stream_options", "stream_interval"),
    *("max_tokens", "min_tokens", "return_token_ids", "n", "use_beam_search", "prompt_logprobs"),
    *("routed_experts_prompt_start", "echo"),
)

RESPONSES_FIELDS = {
    name: field for name, field in _BOTH.items() if name not in _NOT_OF_RESPONSES
} | {
    "input": Field(KEPT, [_MESSAGE]),
    "instructions": Field(KEPT, "Be \u00e9."),
    "include": Field(KEPT, ["message.output_text.logprobs"]),
    "top_logprobs": Field(KEPT, 5),
    "max_tool_calls": Field(KEPT, 3),
    "parallel_tool_calls": Field(KEPT, False),
    "prompt": Field(KEPT, None),
    "prompt_cache_key": Field(KEPT, "k"),
    "reasoning": Field(KEPT, {"effort": "low"}),
    "include_reasoning": Field(KEPT, False),
    "service_tier": Field(KEPT, "flex"),
    "text": Field(KEPT, {"format": {"type": "json_object"}}),
    "tools": Field(KEPT, [_FUNCTION]),
    "tool_choice": Field(KEPT, "required", {"tools": [_FUNCTION]}),
    "previous_input_messages": Field(KEPT, [{"role": "user", "content": "x"}]),
    "media_io_kwargs": Field(KEPT, {"image": {"a": 1}}),
    "mm_processor_kwargs": Field(KEPT, {"a": 1}),
    "chat_template_kwargs": Field(KEPT, {"enable_thinking": False}),
    "store": Field(SET, True),
    "stream": Field(SET, True),
    "max_output_tokens": Field(SET, 500),
    "stop": Field(DECODE, ["x"]),
    "metadata": Field(DECODE, {"a": "b"}),
    "enable_response_messages": Field(DECODE, True),
    "previous_response_id": Field(HELD, "resp_1"),
    "background": Field(ALONE, True),
    "truncation": Field(ALONE, "auto"),
    "request_id": Field(SET, "mine"),
}
