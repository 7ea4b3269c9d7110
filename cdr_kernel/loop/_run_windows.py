"""The loop: retrieve, rank, pack, write, assess, update, until one of the four exits is true (§6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cdr_kernel.loop._headers import band, crp_headers, guarantee_holds
from cdr_kernel.rank import Envelope, Ranking, cdr_rank, pack_facts
from cdr_kernel.rank._cdr_rank import Ranks, newest_in
from cdr_kernel.rank._pack import count_tokens_default
from cdr_kernel.retrieve import Retriever
from cdr_kernel.session import Exit, Session, WindowReport
from cdr_kernel.spec.constants import LIMIT_REACHED, TASK_COMPLETE
from cdr_kernel.store._attributes import Where
from cdr_kernel.text._repr import html_table, one_line
from cdr_kernel.validation._scalars import counted


@dataclass(frozen=True, eq=False)
class WindowPrompt:
    """What the writer of a window gets: its 1-based number, what remains to be written (§4), the packed
    facts, and a summary of what was written where one is asked for (§4.3)."""

    window: int
    anchor: str
    envelope: Envelope
    backward_summary: str | None = None

    __repr__ = one_line


@dataclass(frozen=True, eq=False)
class Window:
    """One window as it came out. A window that an exit stopped before the writer has output and report None,
    and is not counted (R32). band: §8.1, None for an empty envelope. guarantee_holds: §9, R35.

    document: the assembled output of the whole task, where exit 1 or 2 ends it (§6); None else, and where the outputs
    of earlier windows are not known (a session that goes on without `keep_outputs`)."""

    number: int
    prompt: WindowPrompt
    ranking: Ranking
    envelope: Envelope
    output: str | None
    report: WindowReport | None
    exit: Exit
    headers: dict[str, str]
    guarantee_holds: bool
    band: str | None
    document: str | None = None

    def __repr__(self) -> str:
        written = "not written" if self.output is None else f"{len(self.output)} characters"
        return (
            f"<Window {self.number}: {counted(len(self.envelope.facts), 'fact')}, {written}, exit {self.exit.reason}>"
        )

    def _repr_html_(self) -> str:
        rows = {"output": self.output or "not written", "exit": self.exit.reason or "none", **self.headers}
        return html_table(f"Window {self.number}", rows) + self.envelope._repr_html_()

    @classmethod
    def of(
        cls,
        session: Session,
        prompt: WindowPrompt,
        ranking: Ranking,
        output: str | None,
        report: WindowReport | None,
        exit: Exit,
        outputs: Sequence[str] = (),
    ) -> Window:
        """The window of a prompt, with what its envelope says in headers, of a session as it is after it.

        outputs: those of the task's windows as far as they are known.
        """
        envelope = prompt.envelope
        return cls(
            number=prompt.window,
            prompt=prompt,
            ranking=ranking,
            envelope=envelope,
            output=output,
            report=report,
            exit=exit,
            headers=crp_headers(envelope, session, exit),
            guarantee_holds=guarantee_holds(envelope),
            band=None if envelope.min_novelty is None else band(envelope.min_novelty),
            document=final_output(session, exit, outputs),
        )


def assemble(outputs: Iterable[str]) -> str:
    """§6: the final output, which is those of the task's windows in their order, a blank line between two.

    Line ends around an output go, and so does an output without text.
    """
    return "\n\n".join(output.strip("\r\n") for output in outputs if output.strip())


def final_output(session: Session, exit: Exit, outputs: Sequence[str]) -> str | None:
    """What §6 has emitted at exits 1 and 2; None at others, and where these are not the outputs of all windows."""
    emits = {TASK_COMPLETE, LIMIT_REACHED} & {exit.reason, *exit.also}
    return assemble(outputs) if emits and len(outputs) == session.window_count else None


def run_windows(
    generate: Callable[[WindowPrompt], str],
    query: Any,
    retriever: Retriever | Ranks,
    session: Session,
    *,
    token_budget: int,
    assess: Callable[[str], WindowReport],
    k: int | None = None,
    max_facts: int | None = None,
    count_tokens: Callable[[str], int] = count_tokens_default,
    multiplier: Any = None,
    where: Where | None = None,
    backward_summary: Callable[[list[str]], str] | None = None,
    pack: str | None = None,
) -> Iterator[Window]:
    """Yield the windows of a task until one of the exits of §6 is true; the last one says which.

    generate: writes a window. query: [D] from the session's model. assess: what an output achieved, with the
    completeness of the whole task; its report may leave the model to be named by the store's. k, multiplier, where:
    as in `cdr_rank`, but packing by need sees the whole ranking, whatever k is. token_budget, max_facts,
    count_tokens, pack: as in `pack_facts`. backward_summary: makes the optional summary (§4.3) of the outputs so far,
    those of this run and before them what a session with `keep_outputs` has; not asked before the first one.

    A session that has ended writes no other window: SessionEnded, and its message says what opens it again (R37).

    R32: safety, limit and exhaustion are tested before the writer is called, and all four exits after the
    session was updated (R15). The session is updated before a window is yielded: stop iterating whenever you
    like, and go on later with the same session. What generate or assess raises passes through and leaves the
    session as it was before that window.
    """
    if not isinstance(session, Session):
        raise TypeError(f"session: expected a Session, got {type(session).__name__}")
    session.check_open(newest_in(retriever))
    outputs = list(session.outputs)
    while True:
        number = session.window_count + 1
        by_need = session.settings.packing == "need" and pack != "greedy"
        ranking = cdr_rank(query, retriever, session, k=None if by_need else k, multiplier=multiplier, where=where)
        wanted = k if max_facts is None else max_facts
        if by_need and wanted is not None and session.window_count == 0:
            session.warn_of_gate(len(ranking), len(retriever.store), wanted)
        envelope = pack_facts(ranking, token_budget, count_tokens=count_tokens, max_facts=max_facts, pack=pack)
        output, report, summary = None, None, None
        exit = session.before_window(envelope)
        if backward_summary is not None and outputs and not exit.stop:
            summary = backward_summary(list(outputs))
        prompt = WindowPrompt(number, session.anchor(), envelope, summary)
        if not exit.stop:
            output = generate(prompt)
            if not isinstance(output, str):
                raise TypeError(f"generate must return a str, got {type(output).__name__}")
            report = assess(output)
            session.update(report, output, envelope=envelope, embedding_model=retriever.store.embedding_model)
            outputs.append(output)
            exit = session.exit(report, envelope)
        yield Window.of(session, prompt, ranking, output, report, exit, outputs)
        if exit.stop:
            return
