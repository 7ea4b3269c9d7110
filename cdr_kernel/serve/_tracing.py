"""Traces of requests and their parts, for whoever runs OpenTelemetry: times and outcomes, no texts or vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

NEEDS = 'traces need the otel extra: pip install ".[otel]" in a checkout'
NAME = "cdr_kernel.serve"


class Tracing:
    """Makes spans. provider: an OpenTelemetry TracerProvider; None makes one that sends OTLP over HTTP, as the standard
    OTEL_* variables say. Raises ImportError with the pip line where the extra is missing."""

    def __init__(self, provider: Any = None) -> None:
        try:
            from opentelemetry import propagate, trace
        except ImportError as error:
            raise ImportError(f"{NEEDS} ({error})") from error
        self._provider = _exporting() if provider is None else provider
        self._tracer = self._provider.get_tracer(NAME)
        self._extract = propagate.extract
        self._server = trace.SpanKind.SERVER
        self._error = trace.StatusCode.ERROR

    @contextmanager
    def request(self, method: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """The span of a request, a child of the caller's where its headers name one."""
        with self._span(method, context=self._extract(headers), kind=self._server) as span:
            yield span

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The span of a part of the current request."""
        with self._span(name):
            yield

    @contextmanager
    def _span(self, name: str, **more: Any) -> Iterator[Any]:
        """A span which says of an error what type it was: its text may have a part of the request in it."""
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(name, **more, **quiet) as span:
            try:
                yield span
            except BaseException as error:
                span.set_status(self._error, type(error).__name__)
                raise

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _exporting() -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(f"{NEEDS} ({error})") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "cdr-serve"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
