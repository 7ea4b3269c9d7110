"""What /metrics shows, in a registry of its own: numbers about work, none about what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from cdr_kernel.serve.faults import KINDS

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
FACTS = (0, 10, 100, 1_000, 10_000, 100_000, 1_000_000)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The counters of one application.

    Stages: decode, queue (waiting for a batch), rank, pack (envelope, exit, headers), commit (of a session), write
    (of facts), encode.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        to = self.registry
        self.requests = Counter("cdr_requests", "Requests answered", ["operation", "status"], registry=to)
        self.seconds = Histogram("cdr_request_seconds", "Whole requests", ["operation"], buckets=LATENCY, registry=to)
        self.stages = Histogram("cdr_stage_seconds", "Parts of requests", ["stage"], buckets=LATENCY, registry=to)
        self.batch = Histogram("cdr_batch_size", "Ranks in one rank_many", buckets=BATCHES, registry=to)
        self.qualified = Histogram("cdr_qualified_facts", "Facts past the gate, per rank", buckets=FACTS, registry=to)
        self.considered = Counter("cdr_considered_facts", "Facts that ranks looked at, gate included", registry=to)
        self.passed = Counter("cdr_gate_passed_facts", "Facts past the gate", registry=to)
        self.guarded = Counter("cdr_guard_activations", "Facts with an n-gram penalty", registry=to)
        self.alerts = Counter("cdr_guard_alerts", "Ranks whose guard was active on over 20 %", registry=to)
        self.exits = Counter("cdr_exits", "Exits, by reason", ["reason"], registry=to)
        self.rejected = Counter("cdr_rejected", "Requests turned away at the door", ["reason"], registry=to)
        self.in_flight = Gauge("cdr_requests_in_flight", "Requests being worked on", registry=to)
        self.evicted = Counter("cdr_sessions_evicted", "Sessions that left", ["reason"], registry=to)
        self.store_facts = Gauge("cdr_store_facts", "Facts in a store", ["tenant"], registry=to)
        self.sessions = Gauge("cdr_sessions", "Sessions in this process", ["tenant"], registry=to)
        self.session_bytes = Gauge("cdr_session_bytes", "Memory of sessions", ["tenant"], registry=to)
        self.row_cache = Gauge("cdr_row_cache_bytes", "Memory of rows kept between windows", ["tenant"], registry=to)
        self.request_bytes = Gauge("cdr_request_bytes", "Bodies of requests that are held", ["tenant"], registry=to)
        self.answer_bytes = Gauge("cdr_answer_bytes", "Answers that wait for their readers", ["tenant"], registry=to)
        self.faults = Counter("cdr_faults", "Damage and I/O errors of stores", ["kind"], registry=to)
        for kind in KINDS:
            self.faults.labels(kind)
        self.unread = Counter("cdr_unread", "Answers that their clients did not take", ["operation"], registry=to)
        ProcessCollector(registry=self.registry)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a part of a request."""
        start = perf_counter()
        try:
            yield
        finally:
            self.stages.labels(name).observe(perf_counter() - start)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return bytes(generate_latest(self.registry))
