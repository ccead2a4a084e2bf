"""What engines retain and readers ask for, in real sizes.

Conversation `number` is held under retention `number`; all texts are as long as real ones.
"""

from __future__ import annotations

import functools
import random

from kvturn.v1 import common_pb2, lease_pb2

STRIDE_TOKENS = 16
DIGEST_BYTES = 16
BLOCK_TOKENS = 16
SESSION_NUMBER = 1
_TENANTS = 100
_BLOCKS_OF_ENGINE = 100_000
_MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def engine_name(index: int) -> str:
    """Returns an engine's id."""
    return f"decode-{index:05d}"


def incarnation(index: int) -> str:
    """Returns an engine's incarnation, as long as a UUID in hexadecimal."""
    return f"{index:032x}"


def lease_id(engine_index: int, number: int) -> str:
    """Returns the id of a lease."""
    return f"{incarnation(engine_index)}.{number}.{SESSION_NUMBER}"


def conversation(number: int) -> common_pb2.ConversationKey:
    """Returns a conversation's name."""
    return common_pb2.ConversationKey(
        tenant=f"tenant-{number % _TENANTS}",
        model=_MODEL,
        conversation_id=f"conversation-{number:023d}",
    )


def description(engine_index: int) -> lease_pb2.EngineDescription:
    """Returns what a decode engine says about itself."""
    return lease_pb2.EngineDescription(
        engine_id=engine_name(engine_index),
        incarnation=incarnation(engine_index),
        role=common_pb2.ENGINE_ROLE_DECODE,
        http_address=f"http://10.0.{engine_index // 256}.{engine_index % 256}:8200",
        nixl=common_pb2.NixlAddress(
            nixl_engine_id=incarnation(engine_index),
            host=f"10.0.{engine_index // 256}.{engine_index % 256}",
            port=5600,
            tp_size=8,
            dcp_size=1,
            pp_size=1,
        ),
        model=_MODEL,
        vllm_version="0.0.0",
        connector_version="0.0.0",
        kv_blocks=_BLOCKS_OF_ENGINE,
        block_size=BLOCK_TOKENS,
    )


@functools.cache
def payload(points: int) -> bytes:
    """Returns a retention of so many digest points that names nothing yet."""
    rng = random.Random(points)
    return common_pb2.Retention(
        token_count=points * STRIDE_TOKENS,
        block_size=BLOCK_TOKENS,
        groups=[
            common_pb2.BlockGroup(
                block_ids=[rng.randrange(_BLOCKS_OF_ENGINE) for _ in range(points)]
            )
        ],
        digests=common_pb2.TokenDigests(
            stride_tokens=STRIDE_TOKENS,
            digest_bytes=DIGEST_BYTES,
            values=rng.randbytes(points * DIGEST_BYTES),
        ),
        prompt_tokens=points * STRIDE_TOKENS - 1,
        turn=1,
    ).SerializeToString()


def retention(engine_index: int, number: int, points: int) -> common_pb2.Retention:
    """Returns a retention: one block per digest point, one group."""
    message = common_pb2.Retention.FromString(payload(points))
    message.lease_id = lease_id(engine_index, number)
    message.conversation.CopyFrom(conversation(number))
    return message


def begin_read(engine_index: int, number: int) -> lease_pb2.BeginReadRequest:
    """Returns the question of a prefill engine."""
    return lease_pb2.BeginReadRequest(
        lease_id=lease_id(engine_index, number),
        conversation=conversation(number),
        reader_engine_id="prefill-00001",
    )


def end_read(engine_index: int, number: int, points: int) -> lease_pb2.EndReadRequest:
    """Returns the report of a read that completed."""
    request = lease_pb2.EndReadRequest(
        lease_id=lease_id(engine_index, number),
        outcome=lease_pb2.READ_OUTCOME_COMPLETED,
        reused_tokens=points * STRIDE_TOKENS,
        read_bytes=points * 2_097_152,
    )
    request.read_time.FromMilliseconds(12)
    return request


def resolve(number: int) -> lease_pb2.ResolveConversationRequest:
    """Returns the question of a router."""
    return lease_pb2.ResolveConversationRequest(conversation=conversation(number))


def begin_read_answer(points: int) -> bytes:
    """Returns an answer that grants a read, serialized: what an echo of the same size sends."""
    answer = lease_pb2.BeginReadResponse(
        granted=True, retention=retention(1, 1_000, points), nixl=description(1).nixl
    )
    answer.longest_read.FromSeconds(3)
    return answer.SerializeToString()
