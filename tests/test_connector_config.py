"""What the connector is told at start, and by each request: taken whole or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvturn.otlp import Destination
from kvturn.v1 import common_pb2
from kvturn_connector.config import ConfigError, ConnectorConfig, turned_off_by
from kvturn_connector.turn import NO_TURN, TEXT_BYTES_MAX, Turn, scope_of

if TYPE_CHECKING:
    from pathlib import Path

NS_PER_S = 10**9


def test_defaults_behave_as_the_stock_connector() -> None:
    """Nothing said: nothing retained, nothing read, upstream's own defaults."""
    config = ConnectorConfig.from_extra({})
    assert not config.active
    assert config.recompute_threshold_tokens == 64
    assert config.max_hold_ns == 480 * NS_PER_S
    assert config.question_deadline_ns == 50_000_000
    assert config.retentions_max == 4096
    assert (config.lease_endpoints, config.engine_name, config.http_address) == ((), "", "")
    assert (config.secret, config.traces) == (b"", None)


@pytest.mark.parametrize(
    ("endpoint", "bidirectional", "active"),
    [("127.0.0.1:1", True, True), ("127.0.0.1:1", False, False), ("", True, False)],
)
def test_both_switches_are_needed(endpoint: str, bidirectional: bool, active: bool) -> None:
    """A lease service, and upstream's own switch for reads from decode."""
    extra = {"kvturn_lease_endpoint": endpoint, "bidirectional_kv_xfer": bidirectional}
    assert ConnectorConfig.from_extra(extra).active is active
    assert bool(turned_off_by(extra)) is not active


def test_what_turns_the_connector_off_is_told_by_name() -> None:
    """One switch, the other, or both."""
    assert turned_off_by({"kvturn_lease_endpoint": "a:1"}) == ("bidirectional_kv_xfer",)
    assert turned_off_by({"bidirectional_kv_xfer": True}) == ("kvturn_lease_endpoint",)
    assert turned_off_by({}) == ("kvturn_lease_endpoint", "bidirectional_kv_xfer")


def test_every_key_is_taken(tmp_path: Path) -> None:
    """Units are converted once, here."""
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(b"0123456789abcdef\n")
    config = ConnectorConfig.from_extra(
        {
            "kvturn_lease_endpoint": "lease.internal:50051",
            "kvturn_engine_name": "decode-0",
            "kvturn_http_address": "http://10.0.0.7:8200/",
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 128,
            "decoder_kv_blocks_ttl": 1.5,
            "kvturn_question_deadline_ms": 2.5,
            "kvturn_retentions_max": 7,
            "kvturn_secret_file": str(secret_file),
            "kvturn_otlp_endpoint": "http://127.0.0.1:4317",
            "kvturn_nixl_progress_delay_us": 1000,
            "backends": ["UCX"],
        }
    )
    assert config == ConnectorConfig(
        lease_endpoints=("lease.internal:50051",),
        engine_name="decode-0",
        http_address="http://10.0.0.7:8200",
        bidirectional=True,
        recompute_threshold_tokens=128,
        max_hold_ns=1_500_000_000,
        question_deadline_ns=2_500_000,
        retentions_max=7,
        secret=b"0123456789abcdef",
        traces=Destination("http://127.0.0.1:4317"),
        nixl_progress_delay_us=1000,
    )


@pytest.mark.parametrize(
    "endpoint", ["localhost:1", "10.0.0.1:65535", "[::1]:50051", "a.b-c.example:80"]
)
def test_endpoint_is_a_host_and_a_port(endpoint: str) -> None:
    """Names, IPv4 and bracketed IPv6."""
    extra = {"kvturn_lease_endpoint": endpoint}
    assert ConnectorConfig.from_extra(extra).lease_endpoints == (endpoint,)


def test_a_lease_service_of_several_processes_is_a_list() -> None:
    """With commas between; blanks around them do not count."""
    extra = {"kvturn_lease_endpoint": "a:1, [::1]:2 ,b:3"}
    assert ConnectorConfig.from_extra(extra).lease_endpoints == ("a:1", "[::1]:2", "b:3")


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("kvturn_lease_endpoint", "localhost", "HOST:PORT"),
        ("kvturn_lease_endpoint", ":50051", "HOST:PORT"),
        ("kvturn_lease_endpoint", "localhost:", "HOST:PORT"),
        ("kvturn_lease_endpoint", "localhost:grpc", "HOST:PORT"),
        ("kvturn_lease_endpoint", "localhost:\u00b2", "HOST:PORT"),
        ("kvturn_lease_endpoint", "http://localhost:50051", "HOST:PORT"),
        ("kvturn_lease_endpoint", "::1", "HOST:PORT"),
        ("kvturn_lease_endpoint", "a b:1", "HOST:PORT"),
        ("kvturn_lease_endpoint", "localhost:0", "must be HOST:PORT"),
        ("kvturn_lease_endpoint", "localhost:65536", "must be HOST:PORT"),
        ("kvturn_lease_endpoint", "a:1,,b:2", "HOST:PORT"),
        ("kvturn_lease_endpoint", "a:1,", "HOST:PORT"),
        ("kvturn_lease_endpoint", ",".join(["a:1"] * 17), "at most 16"),
        ("kvturn_lease_endpoint", 50051, "expected text"),
        ("kvturn_engine_name", 7, "expected text"),
        ("kvturn_engine_name", "n" * 129, "128 bytes"),
        ("kvturn_engine_name", "a\x1b[31m", "cannot be shown"),
        ("kvturn_http_address", "10.0.0.7:8200", "http://"),
        ("kvturn_http_address", "ftp://10.0.0.7", "http://"),
        ("kvturn_http_address", "http://", "http://"),
        ("kvturn_http_address", "http://10.0.0.7:8200/v1", "http://10.0.0.6:8200"),
        ("kvturn_http_address", "http://a..b:8200", "1 to 63 characters"),
        ("kvturn_http_address", "http://0.0.0.0:8200", "that routers can reach"),
        ("kvturn_http_address", "http://[0::0]:8200", "that routers can reach"),
        ("kvturn_http_address", None, "expected text"),
        ("kvturn_otlp_endpoint", "127.0.0.1:4317", "http://"),
        ("bidirectional_kv_xfer", "true", "true or false"),
        ("bidirectional_kv_xfer", 1, "true or false"),
        ("kv_recompute_threshold", -1, "between 0 and"),
        ("kv_recompute_threshold", 63.5, "whole number"),
        ("kv_recompute_threshold", "64", "expected a number"),
        ("kv_recompute_threshold", True, "expected a number"),
        ("decoder_kv_blocks_ttl", 0, "between 1 and 86400"),
        ("decoder_kv_blocks_ttl", float("nan"), "between 1 and 86400"),
        ("decoder_kv_blocks_ttl", float("inf"), "between 1 and 86400"),
        ("kvturn_question_deadline_ms", 0, "between 1 and 10000"),
        ("kvturn_question_deadline_ms", 10_001, "between 1 and 10000"),
        ("kvturn_question_deadline_ms", None, "expected a number"),
        ("kvturn_retentions_max", 0, "between 1 and"),
        ("kvturn_retentions_max", 1.5, "whole number"),
        ("kvturn_secret_file", "/nonexistent/secret", "cannot be read"),
        ("kvturn_secret_file", "a\0b", "cannot be read"),
        ("kvturn_secret_file", "/", "cannot be read"),
        ("kvturn_secret_file", b"secret", "expected text"),
        ("kvturn_leese_endpoint", "localhost:1", "did you mean kvturn_lease_endpoint?"),
        ("kvturn_ttl", 9, "known are kvturn_engine_name"),
        ("bidirectional_kv_xfr", True, "did you mean bidirectional_kv_xfer?"),
        ("decoder_kv_block_ttl", 9, "did you mean decoder_kv_blocks_ttl?"),
        ("kv_recompute_treshold", 9, "did you mean kv_recompute_threshold?"),
        ("kvtrun_lease_endpoint", "a:1", "did you mean kvturn_lease_endpoint?"),
    ],
)
def test_wrong_value_is_refused_by_name(key: str, value: Any, fix: str) -> None:
    """One line that names the key and says what would be right."""
    with pytest.raises(ConfigError) as caught:
        ConnectorConfig.from_extra({key: value})
    message = str(caught.value)
    assert message.startswith(f"{key}: ")
    assert fix in message
    assert "\n" not in message


def test_keys_of_upstream_are_not_judged() -> None:
    """Only kvturn's own prefix is closed, and what can only be a slip is told."""
    ConnectorConfig.from_extra({"backends": ["UCX"], "some_future_key": object()})


@pytest.mark.parametrize(
    ("content", "holds"), [(b"", 0), (b"short", 5), (b"x" * 65, 65), (b" " * 20, 0)]
)
def test_secret_of_the_wrong_length_is_refused(tmp_path: Path, content: bytes, holds: int) -> None:
    """White space around it does not count; the message does not show the secret."""
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(content)
    expected = f"kvturn_secret_file: .* holds {holds} bytes, not 16 to 64"
    with pytest.raises(ConfigError, match=expected):
        ConnectorConfig.from_extra({"kvturn_secret_file": str(secret_file)})


@pytest.mark.parametrize("length", [16, 64])
def test_secret_is_the_content_of_its_file(tmp_path: Path, length: int) -> None:
    """Shortest and longest."""
    secret_file = tmp_path / "secret"
    secret_file.write_bytes(b"\n" + b"s" * length + b"\r\n")
    config = ConnectorConfig.from_extra({"kvturn_secret_file": str(secret_file)})
    assert config.secret == b"s" * length


# --- what each request says about its turn -------------------------------------------------------

SAID = {
    "tenant": "key-1",
    "model": "smol",
    "conversation": "c1",
    "turn": 3,
    "lease_id": "inc.1.1",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "history": "000102030405060708090a0b0c0d0e0f",
}


def test_turn_is_what_the_router_says() -> None:
    """All members of the contract."""
    turn = Turn.of({"do_remote_decode": True, "kvturn": SAID})
    assert turn == Turn(
        conversation=common_pb2.ConversationKey(tenant="key-1", model="smol", conversation_id="c1"),
        turn=3,
        lease_id="inc.1.1",
        traceparent=SAID["traceparent"],
        history=bytes(range(16)),
    )


@pytest.mark.parametrize("params", [None, {}, {"kvturn": None}, {"kvturn": "c1"}, {"kvturn": []}])
def test_request_without_a_turn_says_nothing(params: dict[str, Any] | None) -> None:
    """Stock requests, and what is no object."""
    assert Turn.of(params) == NO_TURN


@pytest.mark.parametrize("missing", ["model", "conversation"])
def test_lease_without_a_conversation_is_not_read(missing: str) -> None:
    """Nobody could check whose KV it is (S4); the trace is kept."""
    said = {key: value for key, value in SAID.items() if key != missing}
    turn = Turn.of({"kvturn": said})
    assert (turn.conversation, turn.lease_id) == (None, "")
    assert turn.traceparent == SAID["traceparent"]


@pytest.mark.parametrize("value", [7, None, ["c1"], "\ud800", "c" * (TEXT_BYTES_MAX + 1), ""])
def test_malformed_text_counts_as_not_said(value: object) -> None:
    """Nothing that a request says may raise in the scheduler thread."""
    assert Turn.of({"kvturn": {**SAID, "conversation": value}}).conversation is None
    tenant = Turn.of({"kvturn": {**SAID, "tenant": value}}).conversation
    assert tenant is not None
    assert tenant.tenant == ""
    assert Turn.of({"kvturn": {**SAID, "lease_id": value}}).lease_id == ""


@pytest.mark.parametrize("value", [True, -1, 1 << 32, 1.0, "3", None])
def test_malformed_turn_number_counts_as_not_told(value: object) -> None:
    """It goes into a uint32, which refuses these."""
    turn = Turn.of({"kvturn": {**SAID, "turn": value}})
    assert common_pb2.Retention(turn=turn.turn).turn == 0


@pytest.mark.parametrize(
    "value", [None, 7, "", "0" * 31, "0" * 33, "0" * 31 + "g", "A" * 32, "0" * 31 + "\n", "٠" * 32]
)
def test_malformed_history_counts_as_not_said(value: object) -> None:
    """The lease service refuses a grant whose digest is not 16 bytes."""
    assert Turn.of({"kvturn": {**SAID, "history": value}}).history == b""


def test_scope_is_all_that_kv_depends_on() -> None:
    """Adapter by name and path, salt, and media with their kind."""
    position = SimpleNamespace(offset=4, length=2)
    feature = SimpleNamespace(mm_position=position, modality="image", identifier="hash")
    lora = SimpleNamespace(lora_name="lora", lora_path="/loras/1")
    request: Any = SimpleNamespace(lora_request=lora, cache_salt="salt", mm_features=[feature])
    conversation = common_pb2.ConversationKey(tenant="t", model="lora", conversation_id="c")
    scope = scope_of(request, conversation, model="/models/m")
    assert (scope.tenant, scope.model, scope.cache_salt) == ("t", "/models/m", "salt")
    assert scope.adapter == "lora\0/loras/1"
    (item,) = scope.media
    assert (item.offset, item.length, item.identifier) == (4, 2, "image\0hash")
    plain: Any = SimpleNamespace(lora_request=None, cache_salt=None, mm_features=[])
    scope = scope_of(plain, conversation, model="/models/m")
    assert (scope.adapter, scope.cache_salt, scope.media) == ("", "", ())
