"""Sends a collector an empty export, in the router's protocol and, if that fails, in the other."""

import time
from collections.abc import Mapping
from urllib.parse import urlsplit

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub

from kvturn.collector_access import collector_headers, collector_tls
from kvturn.otlp import GRPC, HTTP
from kvturn_cli.doctor.facts import CollectorFacts
from kvturn_cli.doctor.probes.http import Question, Unanswered, ask

HTTP_PATH = "/v1/traces"
HTTP_PORT = 4318


_REFUSALS = ("UNAUTHENTICATED", "PERMISSION_DENIED", "HTTP 401", "HTTP 403")


class CollectorAccess:
    """Headers and TLS, by OpenTelemetry's own variables, as all that export read them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises FileFault for files with which TLS could never come about."""
        self.tls = collector_tls(environ)
        self.headers = collector_headers(environ)
        """By lower-case name."""


async def probe_collector(
    endpoint: str, protocol: str, asked_of: str, timeout_s: float, access: CollectorAccess
) -> CollectorFacts:
    """Tries `protocol` first; where it is "" what the endpoint is meant for."""
    parts = urlsplit(endpoint)
    guessed = HTTP if parts.path.strip("/") or parts.port == HTTP_PORT else GRPC
    wanted = protocol or guessed
    first = ""
    for tried in (GRPC, HTTP) if wanted == GRPC else (HTTP, GRPC):
        began_s = time.perf_counter()
        why = await (_over_grpc if tried == GRPC else _over_http)(endpoint, timeout_s, access)
        if not why:
            answer_ms = (time.perf_counter() - began_s) * 1_000
            return CollectorFacts(
                endpoint, asked_of, protocol=tried, wanted=wanted, answer_ms=answer_ms
            )
        first = first or why
    refused = first.startswith(_REFUSALS)
    return CollectorFacts(endpoint, asked_of, problem=first, refused=refused, wanted=wanted)


async def _over_grpc(endpoint: str, timeout_s: float, access: CollectorAccess) -> str:
    """Returns why it does not take an export; "" if it does."""
    parts = urlsplit(endpoint)
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    if parts.scheme == "https":
        channel = grpc.aio.secure_channel(parts.netloc, access.tls.credentials(), options=options)
    else:
        channel = grpc.aio.insecure_channel(parts.netloc, options=options)
    try:
        stub = TraceServiceStub(channel)  # type: ignore[no-untyped-call]
        headers = tuple(access.headers.items())
        await stub.Export(ExportTraceServiceRequest(), timeout=timeout_s, metadata=headers)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {timeout_s:g} s"
        return f"{error.code().name}: {(error.details() or '')[:200]}"
    finally:
        await channel.close(None)
    return ""


async def _over_http(endpoint: str, timeout_s: float, access: CollectorAccess) -> str:
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + HTTP_PATH
    question = Question(
        url,
        {**access.headers, "Content-Type": "application/x-protobuf"},
        "POST",
        ExportTraceServiceRequest().SerializeToString(),
        timeout_s,
        tls=access.tls.context() if endpoint.startswith("https://") else None,
    )
    try:
        answer = await ask(question)
    except Unanswered as problem:
        return str(problem)
    return "" if answer.status == 200 else f"HTTP {answer.status} for {HTTP_PATH}"
