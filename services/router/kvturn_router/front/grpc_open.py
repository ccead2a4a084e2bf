"""gRPC's own services, health and reflection, which need no key: calls of them have places of
their own, so that whoever brings no key cannot take those of turns.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvturn_router.errors import TurnError
from kvturn_router.front.grpc_errors import Context, abort

CALLS_MAX: Final = 512
"""Calls of one method at once."""

METHODS_MAX: Final = 8
"""Methods that there may be."""

_MESSAGE_S: Final = 10.0
"""How long the message of a call that takes one may take to come."""


class OpenServices:
    """Takes services in place of the server, by their generated registration."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self._methods = 0

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: the same methods come by name."""
        del handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Adds a service's methods to the server, with a limit on each."""
        self._methods += len(handlers)
        assert self._methods <= METHODS_MAX
        bounded = {name: _bounded(handler) for name, handler in handlers.items()}
        handler = grpc.method_handlers_generic_handler(service, bounded)
        self._server.add_generic_rpc_handlers((handler,))


class _Places:
    """Counts the calls of one method."""

    def __init__(self) -> None:
        self._taken = 0

    async def enter(self, context: Context) -> None:
        """Takes a place; ends the call if there is none."""
        if self._taken >= CALLS_MAX:
            await abort(
                context,
                TurnError(
                    429,
                    f"{CALLS_MAX} such calls are being served, which is the most at once.",
                    reason="TOO_MANY_QUESTIONS",
                    retry_after_s=1,
                ),
            )
        self._taken += 1

    def leave(self) -> None:
        """Gives it back."""
        self._taken -= 1


def _bounded(handler: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns a handler of the same method that takes its message itself, where there is one.

    gRPC would wait for the message first, without an end.
    """
    places = _Places()
    codecs = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.request_streaming:
        talk = _talk(places, handler.stream_stream)
        return grpc.stream_stream_rpc_method_handler(talk, **codecs)
    if handler.response_streaming:
        call = _call(places, handler.unary_stream)
        return grpc.stream_stream_rpc_method_handler(call, **codecs)
    return grpc.stream_unary_rpc_method_handler(_call(places, handler.unary_unary), **codecs)


def _call(places: _Places, behaviour: Callable[[Any, Context], Any]) -> Callable[..., Any]:
    async def call(requests: object, context: Context) -> Any:
        del requests
        await places.enter(context)
        try:
            return await behaviour(await _message(context), context)
        finally:
            places.leave()

    assert not inspect.isasyncgenfunction(behaviour)
    return call


def _talk(places: _Places, behaviour: Callable[[Any, Context], Any]) -> Callable[..., Any]:
    async def talk(requests: Any, context: Context) -> AsyncIterator[Any]:
        await places.enter(context)
        try:
            async for response in behaviour(requests, context):
                yield response
        finally:
            places.leave()

    assert inspect.isasyncgenfunction(behaviour)
    return talk


async def _message(context: Context) -> Message:
    message: object = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MESSAGE_S):
            message = await context.read()
    if not isinstance(message, Message):  # It did not come, or the caller sends none.
        await abort(context, TurnError(400, "There is no message.", reason="MESSAGE_INVALID"))
    return message
