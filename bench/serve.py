"""python -m bench serve: a server under load, on loopback: at capacity, at four times that, and told to end.

64 sessions go window by window through rank and update, and start again with another query after five. Capacity: as
many requests at once as there are sessions, each as soon as the last one is answered. Overload: requests at four times
the rate that capacity had, whether answered or not, over connections that are open and over ones that are opened then.
Everything is bounded by --requests; the server is a process of its own. Before anything is timed, every session's first
ranking is compared with `cdr_rank` in this process, to the last bit.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.data import Clusters, Float32, grow, load_base, load_queries
from bench.measure import machine
from cdr_kernel import FactStore, Retriever, Session, SubQuery, cdr_rank
from cdr_kernel.retrieve._retriever import WORTH_CODES

MODEL = "bench"
WINDOWS = 5
IMPORTANCE = 8.0
"""Of all facts: their texts are written in every window; with an importance of 1 that ends a session (§6, exit 3)."""
OVERLOAD = 4
CONNECTIONS = 512
"""Open before the overload begins, as those of a gateway are; more are opened where all are busy. A second overload
begins with none, as when clients come from elsewhere all at once."""
RESIDUAL = 8
START_S = 600
OUTPUT = "the cluster network gives every pod an address and routes packets between the nodes of the cluster "


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


class Connection:
    """One HTTP/1.1 connection that is kept open. As little as needed, since it shares the cores with the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer. Raises OSError or EOFError where the connection ends first."""
        await self.open()
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        at = lower.index(b"content-length:") + 15
        body = await reader.readexactly(int(lower[at : lower.index(b"\r", at)]))
        if b"connection: close" in lower:
            self.close()
        return int(head[9:12]), body

    async def open(self) -> None:
        """Connect, unless it is."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)

    def close(self) -> None:
        """End it."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def request(method: str, path: str, body: Any = None) -> bytes:
    """The bytes of a request."""
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    )
    return f"{head}\r\n\r\n".encode() + data


def b64(vector: Float32) -> str:
    """A vector as JSON carries it."""
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode("ascii")


@dataclass
class Load:
    """What the sessions send: made before the clock runs."""

    queries: list[Float32]
    residuals: list[Float32]
    gate: float
    k: int
    ids: list[str] = field(default_factory=list)

    def sub_queries(self, i: int) -> list[tuple[str, Float32]]:
        """Ids and vectors of session i's sub-queries."""
        rows = self.residuals[i % len(self.residuals)]
        return [(f"s{j}", rows[j % len(rows)]) for j in range(RESIDUAL)]

    def new_session(self, i: int) -> bytes:
        """Session i."""
        items = [{"id": id, "label": id.upper(), "text": id, "embedding": b64(row)} for id, row in self.sub_queries(i)]
        settings = {"min_relevance": self.gate, "max_windows": 20}  # more than WINDOWS: a refused reset ends nothing
        return request("POST", "/v1/sessions", {"embedding_model": MODEL, "sub_queries": items, "settings": settings})

    def rank(self, i: int, turn: int) -> bytes:
        """A rank of session i in its turn-th task."""
        query = b64(self.queries[(i + 7 * turn) % len(self.queries)])
        return request(
            "POST", f"/v1/sessions/{self.ids[i]}/rank", {"embedding_model": MODEL, "query": query, "k": self.k}
        )

    def steps(self, i: int) -> Iterator[tuple[str, bytes]]:
        """The requests of session i, without end."""
        path = f"/v1/sessions/{self.ids[i]}"
        updates = []
        for window in range(WINDOWS):
            report = {"completeness_score": 0.1, "addressed": [f"s{window}"]}
            words = f"window {window} of session {i} says: {OUTPUT}"
            body = {"embedding_model": MODEL, "output": words, "report": report}
            updates.append(request("POST", f"{path}/update", body))
        reset = request("POST", f"{path}/reset")
        ranks = [self.rank(i, turn) for turn in range(len(self.queries))]
        turn = 0
        while True:
            yield "reset", reset
            for window in range(WINDOWS):
                yield "rank", ranks[turn]
                yield "update", updates[window]
            turn = (turn + 1) % len(ranks)


@dataclass
class Seen:
    """What came back. ms: of answers with 200, by kind. statuses: how often each; "lost": no answer. opened: how many
    connections were opened meanwhile."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    opened: int = 0

    def add(self, kind: str, status: int, ms: float) -> None:
        """An answer."""
        self.statuses[str(status)] += 1
        if status == 200:
            self.ms.setdefault(kind, []).append(ms)

    def quantile(self, q: float, kind: str | None = None) -> float:
        """Milliseconds, of one kind or all."""
        values = self.ms.get(kind, []) if kind else [ms for each in self.ms.values() for ms in each]
        return float(np.percentile(values, q)) if values else float("nan")

    @property
    def rps(self) -> float:
        """Answers with 200 a second."""
        return self.statuses["200"] / self.seconds

    @property
    def errors(self) -> int:
        """Answers that are neither 200 nor 429, and requests without one."""
        return sum(n for status, n in self.statuses.items() if status not in ("200", "429"))


async def _timed(connection: Connection, kind: str, sent: bytes, seen: Seen) -> int:
    start = perf_counter()
    try:
        status, _ = await connection.ask(sent)
    except (OSError, EOFError):
        connection.close()
        seen.statuses["lost"] += 1
        return 0
    seen.add(kind, status, (perf_counter() - start) * 1e3)
    return status


async def at_capacity(load: Load, port: int, requests: int, until: asyncio.Event | None = None) -> Seen:
    """Each session sends its next request as soon as the last one is answered, until so many were sent."""
    seen, left = Seen(), requests

    async def run(i: int) -> None:
        nonlocal left
        connection = Connection(port)
        for kind, sent in load.steps(i):
            if left <= 0 or (until is not None and until.is_set()):
                break
            left -= 1
            if not await _timed(connection, kind, sent, seen):
                break
        connection.close()

    start = perf_counter()
    await asyncio.gather(*(run(i) for i in range(len(load.ids))))
    seen.seconds = perf_counter() - start
    return seen


async def overloaded(load: Load, port: int, rate: float, requests: int, connections: int) -> Seen:
    """So many requests a second, whatever comes back; requests of one session may then overtake each other.

    connections: that are open when it begins. What opening others takes counts as theirs.
    """
    seen, idle = Seen(), [Connection(port) for _ in range(connections)]
    for connection in idle:
        await connection.open()
    steps = [load.steps(i) for i in range(len(load.ids))]
    tasks: set[asyncio.Task[None]] = set()

    async def send(i: int) -> None:
        if idle:
            connection = idle.pop()
        else:
            connection = Connection(port)
            seen.opened += 1
        kind, sent = next(steps[i])
        await _timed(connection, kind, sent, seen)
        idle.append(connection)

    start = perf_counter()
    for number in range(requests):
        wait = start + number / rate - perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        elif number % 16 == 0:
            await asyncio.sleep(0)  # late: send at once, but let answers in
        task = asyncio.create_task(send(number % len(steps)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    sending = perf_counter() - start
    await asyncio.gather(*tasks)
    seen.seconds = sending
    for connection in idle:
        connection.close()
    return seen


class Server:
    """`cdr serve` as a process of its own, on a free port of loopback."""

    def __init__(self, store: Path, *options: str) -> None:
        command = [sys.executable, "-m", "cdr_kernel", "serve", str(store), "--port", "0", "--no-access-log", *options]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.port = int(self._event("listening")["port"])
        self._event("ready")

    def _event(self, name: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("{") and json.loads(line)["event"] == name:
                found: dict[str, Any] = json.loads(line)
                return found
            if line.startswith("error: "):
                raise SystemExit(f"the server says: {line}")
        raise SystemExit(f"the server ended before it said {name!r}")

    def rss(self) -> int:
        """Bytes resident now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """Seconds of processor time so far, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> dict[str, Any]:
        """Tell it to end; what it says of the requests it accepted and answered, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        told = self._event("stopped")
        assert self.process.stderr is not None
        self.process.stderr.close()
        return {**told, "status": self.process.wait(START_S)}


async def start_sessions(load: Load, port: int, sessions: int) -> None:
    """Create the sessions."""
    connection, load.ids = Connection(port), []
    for i in range(sessions):
        status, body = await connection.ask(load.new_session(i))
        if status != 200:
            raise SystemExit(f"a session could not be made: {body.decode()}")
        load.ids.append(json.loads(body)["id"])
    connection.close()


async def check(load: Load, port: int, retriever: Retriever) -> bool:
    """Whether every session's first ranking is that of `cdr_rank`, ids and bits of the scores, asked one by one and all
    at once."""
    connections = [Connection(port) for _ in load.ids]
    together = await asyncio.gather(*(c.ask(load.rank(i, 0)) for i, c in enumerate(connections)))
    for i, (status, body) in enumerate(together):
        alone = await connections[0].ask(load.rank(i, 0))
        subs = [SubQuery(id, id.upper(), id, row) for id, row in load.sub_queries(i)]
        session = Session(subs, embedding_model=MODEL, min_relevance=load.gate)
        expected = cdr_rank(load.queries[i % len(load.queries)], retriever, session, k=load.k)
        for each in ((status, body), alone):
            facts = json.loads(each[1]).get("facts", [])
            if each[0] != 200 or [fact["id"] for fact in facts] != expected.ids:
                return False
            if [fact["score"] for fact in facts] != expected.score.tolist():
                return False
    for connection in connections:
        connection.close()
    return True


async def measure(load: Load, server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """One server: warm, then runs of capacity and overload in turn, and memory over all of them."""
    await at_capacity(load, server.port, options.requests // 2)
    before, cpu = server.rss(), server.cpu_s()
    calm = [await at_capacity(load, server.port, options.requests) for _ in range(options.runs)]
    after, cpu = server.rss(), server.cpu_s() - cpu
    busy: list[Seen] = []
    opening: list[Seen] = []
    for run in range(options.runs):
        rate = OVERLOAD * calm[run].rps
        for runs, connections in ((busy, CONNECTIONS), (opening, 0)):
            runs.append(await overloaded(load, server.port, rate, options.requests, connections))
            seen = runs[run]
            say(f"  run {run + 1}: {calm[run].rps:.0f}/s, {dict(seen.statuses)}, {seen.opened} connections opened")
            await asyncio.sleep(1.0)

    def middle(values: list[float], digits: int = 3) -> float:
        return round(median(values), digits)

    p99, p99_overload, p99_opening = (middle([seen.quantile(99) for seen in runs]) for runs in (calm, busy, opening))
    return {
        "p50_ms": middle([seen.quantile(50) for seen in calm]),
        "p99_ms": p99,
        "p50_rank_ms": middle([seen.quantile(50, "rank") for seen in calm]),
        "p99_rank_ms": middle([seen.quantile(99, "rank") for seen in calm]),
        "rps": middle([seen.rps for seen in calm], 1),
        "cpu_ms_per_request": round(cpu * 1e3 / (options.runs * options.requests), 3),
        "errors": sum(seen.errors for seen in (*calm, *busy, *opening)),
        "rejected_at_capacity": sum(seen.statuses["429"] for seen in calm),
        "rejected": sum(seen.statuses["429"] for seen in busy),
        "accepted_in_overload": sum(seen.statuses["200"] for seen in busy),
        "offered_times_capacity": middle(
            [sum(b.statuses.values()) / b.seconds / c.rps for b, c in zip(busy, calm, strict=True)], 2
        ),
        "p50_overload_ms": middle([seen.quantile(50) for seen in busy]),
        "p99_overload_ms": p99_overload,
        "p99_overload_opening_ms": p99_opening,
        "connections_opened": middle([seen.opened for seen in opening], 0),
        "p99_overload_limit_ms": round(5 * p99 + 50, 3),
        "rss_mb": round(after / 2**20, 1),
        "rss_growth": round((after - before) / before, 4),
        "rss_growth_requests": options.runs * options.requests,
    }


async def told_to_end(load: Load, server: Server, requests: int) -> dict[str, Any]:
    """SIGTERM under load: how many requests were accepted, answered by the server, and seen here."""
    running = asyncio.create_task(at_capacity(load, server.port, requests))
    await asyncio.sleep(1.0)
    told = await asyncio.to_thread(server.end)
    seen = await running
    answered = sum(n for status, n in seen.statuses.items() if status != "lost")
    return {**{name: told[name] for name in ("accepted", "answered", "status")}, "seen_in_this_phase": answered}


def make_store(folder: Path, options: argparse.Namespace) -> Load:
    """Grow the facts into a store with its codes; what is asked of it."""
    base, _ = load_base(options.base, options.dim)
    pairs = load_queries(options.queries, base)
    store = FactStore(options.dim, embedding_model=MODEL)
    start = 0
    for rows in grow(Clusters.of(base), options.facts):
        ids = [f"f{i}" for i in range(start, start + len(rows))]
        texts = [f"fact {id} about {OUTPUT[i % 40 :]}" for i, id in enumerate(ids)]
        store.add(ids, texts, rows, importance=[IMPORTANCE] * len(ids))
        start += len(rows)
    store.save(folder)
    if options.facts >= WORTH_CODES:
        Retriever(FactStore.load(folder)).save()
    return Load([query for query, _ in pairs], [subs for _, subs in pairs], options.gate, options.k)


async def bench(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it."""
    say(f"making {options.facts} facts")
    load = make_store(folder, options)
    expected = Retriever(FactStore.load(folder))
    result: dict[str, Any] = {}
    for name, most in (("batched", options.max_batch), ("unbatched", 1)):
        say(f"{name}: starting a server")
        server = Server(folder, "--max-batch", str(most), "--max-queue", str(options.max_queue), "--drain", "0.5")
        try:
            await start_sessions(load, server.port, options.sessions)
            if not await check(load, server.port, expected):
                return {"identical": False}
            result[name] = await measure(load, server, options)
            result[name]["sigterm"] = await told_to_end(load, server, options.requests)
        finally:
            server.process.kill()
    return {"identical": True, **result["batched"], **result}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 where answers were right and nothing but 429 was refused."""
    parser = argparse.ArgumentParser(prog="python -m bench serve", description=__doc__.splitlines()[0])
    parser.add_argument("--facts", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--base", help="E.npy [n, D] to grow facts from (the demo's)")
    parser.add_argument("--queries", help="Q.npz of queries and sub-queries (the demo's)")
    parser.add_argument("--gate", type=float, default=0.55)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--requests", type=int, default=7_000, help="of each run; memory is compared over all runs")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=128)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    for name in ("facts", "sessions", "requests", "runs", "max_batch", "max_queue"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    with tempfile.TemporaryDirectory(prefix="cdr-bench-serve-") as folder:
        result = asyncio.run(bench(options, Path(folder) / "store"))
    settings = {name: getattr(options, name) for name in ("facts", "dim", "gate", "k", "sessions", "requests", "runs")}
    result = {"bench": "serve", **settings, **result, **machine()}
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:24} {value}")
    return 0 if result["identical"] and not result["errors"] else 1


if __name__ == "__main__":
    sys.exit(main())
