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
    """What the writer of a window gets.

    Attributes:
        window: The number of the window, from 1.
        anchor: What remains to be written (§4), in one sentence.
        envelope: The packed facts.
        backward_summary: A summary of what was written (§4.3). None if `run_windows` was given no function for it.
    """

    window: int
    anchor: str
    envelope: Envelope
    backward_summary: str | None = None

    __repr__ = one_line


@dataclass(frozen=True, eq=False)
class Window:
    """One window of a task.

    If an exit stopped the window before it was written, `output` and `report` are None and the window is not counted
    (R32).

    Attributes:
        number: From 1.
        prompt: What the writer got.
        ranking: The whole ranking.
        envelope: The packed facts.
        output: The text.
        report: What the text achieved.
        exit: Whether the loop ends, and why.
        headers: The headers of §6 and §8.
        guarantee_holds: §9, reading R35.
        band: The band of §8.1. None for an empty envelope.
        document: The text of the whole task if exit 1 or 2 ends it (§6). None otherwise, and if the outputs of earlier
            windows are not known (a resumed session without `keep_outputs`).
    """

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
    """Join the outputs of a task's windows to its final text (§6), with a blank line between two.

    Newlines around an output are removed. An output without text is left out.

    Args:
        outputs: The outputs, in the order of their windows.
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
    """Write a task window by window: rank, pack, write, assess, until one of the exits of §6 is true.

    Safety, limit and exhaustion are tested before the writer is called, and all four exits after the session was
    updated (readings R15, R32). The session is updated before a window is yielded. So you can stop at any window and go
    on later with the same session.

    Args:
        generate: Writes a window: takes a `WindowPrompt`, returns the text.
        query: The query embedding, [D], from the session's model.
        retriever: As in `cdr_rank`.
        session: The session.
        token_budget: As in `pack_facts`.
        assess: Reports what an output achieved, with the completeness of the whole task. If the report names no
            embedding model, the store's is used.
        k: As in `cdr_rank`. Packing by need always sees the whole ranking.
        max_facts: As in `pack_facts`.
        count_tokens: As in `pack_facts`.
        multiplier: As in `cdr_rank`.
        where: As in `cdr_rank`.
        backward_summary: Makes the optional summary (§4.3) from the outputs so far. It is not called before the first
            output.
        pack: As in `pack_facts`.

    Yields:
        The windows. The exit of the last one says why it is the last.

    Raises:
        SessionEnded: If the session has ended already. The message says what opens it again (reading R37).
        Exception: What `generate` and `assess` raise. The session is then as it was before that window.
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
