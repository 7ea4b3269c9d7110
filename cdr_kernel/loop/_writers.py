"""Writers of a window: the packed facts themselves, or any command that reads JSON and prints text."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO, Any, TypeAlias

import numpy as np

from cdr_kernel.exceptions import WriterError
from cdr_kernel.loop._assess import assess, similarity_thresholds, split_sentences
from cdr_kernel.loop._run_windows import WindowPrompt
from cdr_kernel.rank import Envelope
from cdr_kernel.session import Session, WindowReport
from cdr_kernel.store import FactStore
from cdr_kernel.validation._scalars import check_number
from cdr_kernel.validation._warn import warn

Embed: TypeAlias = Callable[[list[str]], Any]

MAX_OUTPUT_BYTES = 16 * 2**20
"""What a command may print for one window; a book has one or two of them."""
MAX_TIMEOUT = 604_800.0
"""Seconds, a week."""
GRACE_SECONDS = 1.0
"""How long output is read after a command has ended, where something that it started holds the pipe open."""

_POLL_SECONDS = 0.05
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_SHELL = re.compile(r"[|&;<>]+|`|\$[A-Za-z_{(]")


class ExtractWriter:
    """Writes the packed facts, one a line, and assesses them with the vectors that the store has for them.

    Each sentence is embedded as the fact it stands in, so no model is needed. What an earlier window wrote counts for
    nothing when it is written again. Writing and assessing take turns, as in `run_windows`: `assess` is about the
    window that was written last.
    """

    def __init__(self, store: FactStore, session: Session) -> None:
        self._store = store
        self._session = session
        self._thresholds = similarity_thresholds(store, session.sub_queries)
        self._envelope: Envelope | None = None

    def __call__(self, prompt: WindowPrompt) -> str:
        """The text of the envelope."""
        self._envelope = prompt.envelope
        return prompt.envelope.text

    def assess(self, output: str) -> WindowReport:
        """What the output of the last call achieved (`cdr_kernel.loop._assess`). ValueError for any other text."""
        envelope = self._envelope
        if envelope is None or output != envelope.text:
            raise ValueError("output: expected the text that this writer wrote last")
        view = self._store.view()
        fresh = [fact for fact in envelope.facts if fact.id not in self._session.packed]
        sequence = [fact.sequence for fact in fresh for _ in split_sentences(fact.text)]
        rows = np.searchsorted(view.sequence, np.array(sequence, np.int64))
        return assess(
            "\n".join(fact.text for fact in fresh),
            self._session.sub_queries,
            lambda _: view.take(rows),
            min_similarity=self._thresholds,
            written=self._session.words,
            embedding_model=self._session.embedding_model,
        )


class CommandWriter:
    """Runs a command once a window: one JSON object on its standard input, the window's text on its output.

    command: split as a shell would, but run without one: what only a shell understands is refused unless it is
    quoted. timeout: seconds per window, at most `MAX_TIMEOUT`. embed: sentences -> vectors of the session's
    model; without it the output is assessed by shared words (`cdr_kernel.loop._assess`).

    query, token_budget: what the task asks, and the tokens of an envelope at most, told to the command as they are.

    The object has task {query, sub_queries [{id, label, text, expected_words, remaining}]}, window (1-based),
    max_windows, token_budget (integer or null), anchor, facts [{id, text, source, score}], backward_summary (string or
    null) and remaining (labels).

    Raises ValueError for a command that cannot be split or is not found and for a bad timeout, `WriterError` where it
    fails, takes too long, or prints nothing, no UTF-8 or more than `MAX_OUTPUT_BYTES`; it is ended then, with whatever
    it started. Where it ended well and something it started goes on, that is let be: its output counts for
    `GRACE_SECONDS` more, with a warning.
    """

    def __init__(
        self,
        command: str,
        store: FactStore,
        session: Session,
        *,
        query: str | None = None,
        token_budget: int | None = None,
        timeout: float = 300.0,
        embed: Embed | None = None,
    ) -> None:
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"expected a command, got {command!r} ({error})") from None
        operator = _SHELL.search(_QUOTED.sub(" ", command))
        if operator is not None:
            raise ValueError(
                f"expected a command that needs no shell, got {operator[0]!r} in it: use sh -c '...' (or quote it)"
            )
        if not self._argv or shutil.which(self._argv[0]) is None:
            raise ValueError(f"expected a command that can be run, got {command!r}")
        self._session = session
        self._query = query
        self._token_budget = token_budget
        self._timeout = check_number(timeout, "timeout", 0.0, MAX_TIMEOUT)
        self._embed = embed
        self._thresholds = None if embed is None else similarity_thresholds(store, session.sub_queries)

    def __call__(self, prompt: WindowPrompt) -> str:
        """The text the command printed."""
        window = f"window {prompt.window}: the writer {self._argv[0]!r}"
        raw, code = self._run(json.dumps(self._request(prompt)) + "\n", window)
        if code != 0:
            raise WriterError(f"{window} ended with exit status {code}, expected 0")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WriterError(
                f"{window} printed byte 0x{raw[error.start]:02x} at {error.start}, expected UTF-8"
            ) from None
        if not text.strip():
            raise WriterError(f"{window} printed nothing, expected the text of the window")
        return text

    def assess(self, output: str) -> WindowReport:
        """What an output achieved (`cdr_kernel.loop._assess`)."""
        return assess(
            output,
            self._session.sub_queries,
            self._embed,
            min_similarity=self._thresholds,
            written=self._session.words,
            embedding_model=self._session.embedding_model,
        )

    def _request(self, prompt: WindowPrompt) -> dict[str, Any]:
        ranking = prompt.envelope.ranking
        remaining = {item.id for item in self._session.residual}
        return {
            "task": {
                "query": self._query,
                "sub_queries": [
                    {
                        "id": item.id,
                        "label": item.label,
                        "text": item.text,
                        "expected_words": item.expected_words,
                        "remaining": item.id in remaining,
                    }
                    for item in self._session.sub_queries
                ],
            },
            "window": prompt.window,
            "max_windows": self._session.max_windows,
            "token_budget": self._token_budget,
            "anchor": prompt.anchor,
            "facts": [
                {"id": fact.id, "text": fact.text, "source": fact.source, "score": score}
                for fact, score in zip(ranking.facts, ranking.score.tolist(), strict=True)
            ],
            "backward_summary": prompt.backward_summary,
            "remaining": [item.label for item in self._session.residual],
        }

    def _run(self, request: str, window: str) -> tuple[bytes, int]:
        try:
            # A session of its own, so that what the command starts ends with it. Unbuffered, so that no lock is held
            # over a pipe that a thread waits for.
            process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=os.name != "nt"
            )
        except OSError as error:
            raise WriterError(f"{window} could not be started ({error.strerror or error})") from None
        pipes = _Pipes(process, request.encode("ascii"))
        try:
            self._wait(process, pipes, window)
        except BaseException:
            _end(process)
            process.wait()
            pipes.close()
            raise
        if process.returncode != 0:
            _end(process)
        if not pipes.close():
            warn(f"{window} ended, but something it started still holds its output: what it had printed is taken")
        return bytes(pipes.output), process.returncode

    def _wait(self, process: subprocess.Popen[bytes], pipes: _Pipes, window: str) -> None:
        """Until the process has ended; what it started may go on."""
        deadline = time.monotonic() + self._timeout
        while True:
            # Whichever comes first, mostly at once after each other; a process that ends gives no event to wait for.
            pipes.done.wait(max(0.0, min(_POLL_SECONDS, deadline - time.monotonic())))
            if len(pipes.output) > MAX_OUTPUT_BYTES:
                raise WriterError(f"{window} printed more than {MAX_OUTPUT_BYTES / 2**20:g} MiB")
            if process.poll() is not None:
                return
            if time.monotonic() >= deadline:
                raise WriterError(f"{window} took longer than {self._timeout:g} s")
            if pipes.done.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))


class _Pipes:
    """Two threads at the pipes of a process: one gives it the request, one takes up to the limit of what it prints."""

    def __init__(self, process: subprocess.Popen[bytes], request: bytes) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.output = bytearray()
        self.done = threading.Event()
        self._giver = threading.Thread(target=self._give, args=(process.stdin, request), daemon=True)
        self._taker = threading.Thread(target=self._take, args=(process.stdout,), daemon=True)
        self._giver.start()
        self._taker.start()

    def _give(self, pipe: IO[bytes], request: bytes) -> None:
        rest = memoryview(request)
        with contextlib.suppress(OSError), pipe:  # a command may end, or close its input, without having read it
            while rest:
                rest = rest[pipe.write(rest) :]

    def _take(self, pipe: IO[bytes]) -> None:
        with pipe:
            while len(self.output) <= MAX_OUTPUT_BYTES and (part := pipe.read(65536)):
                self.output += part
        self.done.set()

    def close(self) -> bool:
        """Read what is still under way, for a short time; whether that was all. A thread that has to wait for
        something the process started is left to itself, with its pipe."""
        self._taker.join(GRACE_SECONDS)
        complete = not self._taker.is_alive()
        if complete:
            self._giver.join(GRACE_SECONDS)
        return complete


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started."""
    if os.name == "nt":
        process.kill()
        return
    with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
        os.killpg(process.pid, signal.SIGKILL)
