"""Collector of the spans that servers export, over OTLP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans in ``spans``, as protobuf messages; ``endpoint`` is its address."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.endpoint = ""

    def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802  (gRPC's name)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def attributes(self, name: str) -> list[dict[str, Any]]:
        """Returns the attributes of each span of a name."""
        return [
            {each.key: getattr(each.value, str(each.value.WhichOneof("value")))
             for each in span.attributes}
            for span in self.spans if span.name == name
        ]  # fmt: skip


@contextmanager
def collector() -> Iterator[Collector]:
    """Yields a collector that listens on a free port."""
    found = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    found.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(None)
