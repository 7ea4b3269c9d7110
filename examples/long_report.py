"""A report of several windows on the packaged corpus, with a stub where a model would write.

    python examples/long_report.py -o report.html

`write` gets what a model needs: what remains, the facts, and what was written before.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from cdr_kernel import Retriever, Session, WindowPrompt, WindowReport, demo, run_windows
from cdr_kernel.loop import ExtractWriter
from cdr_kernel.report import RunRecord, StoreMap, write_report


def prompt_of(prompt: WindowPrompt) -> str:
    """What you would send to a model."""
    facts = "\n".join(f"- {fact.text}" for fact in prompt.envelope.facts)
    return f"{prompt.anchor}\n\nWrite the next section from these facts alone:\n{facts}"


def main() -> None:
    """Run the windows and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("long_report.html"))
    parser.add_argument("--tokens", type=int, default=400, help="budget of an envelope")
    options = parser.parse_args()

    corpus = demo.load()
    session = Session(corpus.sub_queries, embedding_model=demo.EMBEDDING_MODEL, min_relevance=0.3, exclude_packed=True)
    stub = ExtractWriter(corpus.store, session)  # writes the facts themselves

    def write(prompt: WindowPrompt) -> str:
        print(f"--- window {prompt.window}: {len(prompt_of(prompt))} characters for a model")
        return stub(prompt)

    def assess(output: str) -> WindowReport:
        return stub.assess(output)  # or a judge of yours

    where = StoreMap(corpus.store.view(), corpus.query, np.stack([sub.embedding for sub in corpus.sub_queries]))
    record, pages = RunRecord(corpus.task, where), []
    retriever = Retriever(corpus.store)
    for window in run_windows(write, corpus.query, retriever, session, token_budget=options.tokens, assess=assess):
        record.add(window)
        pages.append(window.output or "")
        for name, value in window.headers.items():
            print(f"    {name}: {value}")
    print(f"{len(' '.join(pages).split())} words; {window.exit.reason}; completeness {session.completeness:.2f}")
    document = record.document(
        settings={"min_relevance": 0.3, "token_budget": options.tokens, "exclude_packed": True},
        model=demo.EMBEDDING_MODEL,
        store={"path": None, "facts": len(corpus.store)},
        complete=True,
    )
    write_report(options.output, {"long report": document})
    print(options.output)


if __name__ == "__main__":
    main()
