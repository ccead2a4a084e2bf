"""Run by a vLLM environment's Python: both legs' requests, on vLLM's own request classes."""

import json
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[3]
sys.path[:0] = [str(CHECKOUT / "services" / "router"), str(CHECKOUT / "tests")]

from request_fields import (  # noqa: E402
    ALONE,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    HELD,
    RESPONSES_FIELDS,
    WITHHELD,
    Field,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: E402
from vllm.entrypoints.openai.responses.protocol import (  # noqa: E402
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo  # noqa: E402

from kvturn_router.request.body import (  # noqa: E402
    decode_parts,
    needs_decode_alone,
    parse,
    prefill_parts,
)
from kvturn_router.request.responses import (  # noqa: E402
    responses_decode_parts,
    responses_need_decode_alone,
    responses_prefill_parts,
)
from kvturn_router.turn.usage import (  # noqa: E402
    RESPONSE_USAGE,
    StreamUsage,
    passed_on,
)

CHAT = ("/v1/chat/completions", ChatCompletionRequest, CHAT_FIELDS)
COMPLETIONS = ("/v1/completions", CompletionRequest, COMPLETION_FIELDS)
BASES = {
    CHAT[0]: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS[0]: {"model": "m", "prompt": "x"},
}
MODEL_TOKENS = 2048


class ModelConfig:
    """What the request classes ask of a model's configuration."""

    max_model_len = MODEL_TOKENS


def members(path: str, name: str, field: Field) -> dict[str, bytes]:
    body = BASES[path] | field.needs | {name: field.example}
    return parse(json.dumps(body).encode())


def read(request: Any, parts: list[bytes]) -> Any:
    """Reads a leg's body as the engine does."""
    return request.model_validate(json.loads(b"".join(parts)))


def check_every_field_of_vllm_is_known() -> None:
    responses = ("/v1/responses", ResponsesRequest, RESPONSES_FIELDS)
    for path, request, fields in (CHAT, COMPLETIONS, responses):
        unknown = request.model_fields.keys() - fields.keys()
        assert not unknown, f"{path}: say in request_fields.py what becomes of {sorted(unknown)}"


def check_prefill_accepts_its_copy_of_every_field() -> None:
    for path, request, fields in (CHAT, COMPLETIONS):
        for name, field in fields.items():
            got = members(path, name, field)
            if field.way == ALONE:
                assert needs_decode_alone(got, path), name
                continue
            assert not needs_decode_alone(got, path), name
            copy = read(request, prefill_parts(got, b'{"do_remote_decode":true}'))
            assert not copy.stream, name
            given = copy.model_dump(exclude_unset=True)
            assert given["max_tokens"] == 1, name
            assert given.get("max_completion_tokens", 1) == 1, name
            assert copy.kv_transfer_params == {"do_remote_decode": True}, name
            sampling = copy.to_sampling_params(1, {})
            assert (sampling.n, sampling.max_tokens, sampling.min_tokens) == (1, 1, 0), name
            # A stop string is found outside the core, which then sees an abort and keeps no KV.
            assert not sampling.stop, name


def check_both_legs_have_the_same_prompt() -> None:
    for path, request, fields in (CHAT, COMPLETIONS):
        for name, field in fields.items():
            got = members(path, name, field)
            if needs_decode_alone(got, path):
                continue
            prefill = read(request, prefill_parts(got, b"{}"))
            decode = read(request, decode_parts(got, b"{}"))
            assert prompt_of(prefill) == prompt_of(decode), (path, name)


def prompt_of(request: Any) -> Any:
    """Returns all that decides which tokens a request's prompt has."""
    tokens = request.build_tok_params(ModelConfig())
    cut = None
    if request.truncate_prompt_tokens is not None:
        cut = tokens.get_encode_kwargs(), tokens.truncate_prompt_tokens
    if isinstance(request, CompletionRequest):
        return request.prompt, cut, tokens.add_special_tokens, tokens.truncation_side
    template = request.build_chat_params(None, "auto")
    return request.messages, request.tools, template, cut, tokens.add_special_tokens


def check_a_prompt_cut_to_what_fits_is_another_one_on_prefill() -> None:
    # The reason why such a request is answered by decode alone.
    path, request, _ = CHAT
    got = members(path, "truncate_prompt_tokens", Field(ALONE, -1))
    assert needs_decode_alone(got, path)
    prefill = read(request, prefill_parts(got, b"{}"))
    assert prompt_of(prefill) != prompt_of(read(request, decode_parts(got, b"{}")))


def check_decode_reads_what_the_client_sent() -> None:
    for path, request, fields in (CHAT, COMPLETIONS):
        for name, field in fields.items():
            got = members(path, name, field)
            read_by_decode = read(request, decode_parts(got, None)).model_dump()
            sent = request.model_validate(
                json.loads(json.dumps(BASES[path] | field.needs | {name: field.example}))
            ).model_dump()
            if field.way == WITHHELD:
                assert read_by_decode[name] != sent[name], name
            for ours in (read_by_decode, sent):
                for withheld in ("request_id", "kv_transfer_params", "ec_transfer_params"):
                    ours.pop(withheld)
            assert read_by_decode == sent, name


def check_the_legs_of_every_field_of_a_response() -> None:
    for name, field in RESPONSES_FIELDS.items():
        if name not in ResponsesRequest.model_fields:
            continue
        body = {"model": "m", "input": "x"} | field.needs | {name: field.example}
        got = parse(json.dumps(body).encode())
        assert responses_need_decode_alone(got) is (field.way == ALONE), name
        decode = read(ResponsesRequest, responses_decode_parts(got, None, "resp_ours"))
        assert decode.request_id == "resp_ours", name
        sent = ResponsesRequest.model_validate(json.loads(json.dumps(body))).model_dump()
        kept = decode.model_dump()
        for withheld in ("request_id", "kv_transfer_params", "ec_transfer_params"):
            assert sent.pop(withheld) != kept.pop(withheld) or name != withheld, name
        assert kept == sent, name
        if field.way in (ALONE, HELD):
            continue
        prefill = read(ResponsesRequest, responses_prefill_parts(got, b'{"do_remote_decode":true}'))
        assert not prefill.stream, name
        assert not prefill.store, name
        assert prefill.to_sampling_params(1000, {}).max_tokens == 1, name
        assert not prefill.to_sampling_params(1000, {}).stop, name
        for of_prompt in ("input", "instructions", "tools", "tool_choice", "truncation"):
            assert getattr(prefill, of_prompt) == getattr(decode, of_prompt), name
        template = prefill.build_chat_params(None, "auto"), decode.build_chat_params(None, "auto")
        assert template[0] == template[1], name


def made_response() -> ResponsesResponse:
    parts = responses_decode_parts(parse(b'{"model":"m","input":"x"}'), None, "resp_ours")
    request = read(ResponsesRequest, parts)
    input_details = InputTokensDetails(
        cached_tokens=48,
        cache_write_tokens=0,
        input_tokens_per_turn=[],
        cached_tokens_per_turn=[],
    )
    output_details = OutputTokensDetails(
        reasoning_tokens=0,
        tool_output_tokens=0,
        output_tokens_per_turn=[],
        tool_output_tokens_per_turn=[],
    )
    usage = ResponseUsage(
        input_tokens=48,
        input_tokens_details=input_details,
        output_tokens=9,
        output_tokens_details=output_details,
        total_tokens=57,
    )
    sampling = request.to_sampling_params(10, {})
    return ResponsesResponse.from_request(request, sampling, "m", 1, [], "completed", usage)


def check_a_response_has_the_id_that_the_router_chose() -> None:
    assert made_response().id == "resp_ours"


def check_usage_is_where_the_router_looks_for_it() -> None:
    whole = made_response().model_dump_json().encode()
    _, usage = passed_on(whole, 30, RESPONSE_USAGE)
    assert usage == (48, 9, 30, "m")
    event = ResponseCompletedEvent(
        type="response.completed", sequence_number=1, response=made_response()
    )
    stream = StreamUsage(30, RESPONSE_USAGE)
    text = event.model_dump_json(indent=None, by_alias=True)
    stream.feed(f"event: {event.type}\ndata: {text}\n\n".encode())
    assert stream.tokens == (48, 9, 30, "m")
    details = PromptTokenUsageInfo(cached_tokens=48)
    chat = UsageInfo(prompt_tokens=48, total_tokens=57, completion_tokens=9)
    chat.prompt_tokens_details = details
    answer = b'{"usage":' + chat.model_dump_json().encode() + b"}"
    _, usage = passed_on(answer, 30)
    assert usage == (48, 9, 30, "")


if __name__ == "__main__":
    checks = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
    for name in sys.argv[1:] or checks:
        checks[name]()
        print("ok", name)
