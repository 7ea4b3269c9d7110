"""The n-gram guard on a large store: making the token hashes, and one window's counts.

    python -m bench ngram [--facts 1000000] [--window-facts 15000] [--json]

Every way of counting is checked on the same facts before it is timed. The baseline is `spec.reference`, which is
never tuned; on all facts it is extrapolated from the window's. Times are medians of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdr_kernel import _C, NGramGuard, reference
from cdr_kernel.text._ngram_guard import TokenHasher, tokenize

N = 6
WORDS = 60
VOCABULARY = 50_000
OUTPUTS, OUTPUT_WORDS = 5, 2_000
DATASKETCH_FACTS = 200


def reference_blacklist(outputs: Sequence[str]) -> set[tuple[str, ...]]:
    blacklist: set[tuple[str, ...]] = set()
    for output in outputs:
        blacklist |= reference.ngrams(reference.tokenize(output), N)
    return blacklist


def reference_window(outputs: Sequence[str], facts: Sequence[str]) -> list[int]:
    """What a window costs without anything kept: its own n-grams, and every qualified fact tokenised again."""
    blacklist = reference_blacklist(outputs[:-1])
    blacklist |= reference.ngrams(reference.tokenize(outputs[-1]), N)
    return [reference.count_matching_ngrams(fact, blacklist, N) for fact in facts]


def corpus(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Facts of about 60 words with the frequencies of a language, and outputs of which half is copied from facts."""
    r = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
    weights = np.linspace(12, 0.2, 26)
    lengths = np.clip(r.poisson(5.2, VOCABULARY), 1, 16)
    spelled = r.choice(letters, (VOCABULARY, 16), p=weights / weights.sum())
    words = np.array(["".join(row[:n]) for row, n in zip(spelled, lengths, strict=True)], dtype=object)
    cumulated = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    cumulated /= cumulated[-1]
    facts: list[str] = []
    while len(facts) < count:
        sizes = r.integers(WORDS - 20, WORDS + 21, min(20_000, count - len(facts)))
        drawn = words[np.searchsorted(cumulated, r.random(int(sizes.sum())))].tolist()
        end = 0
        for size in sizes.tolist():
            end += size
            facts.append(" ".join(drawn[end - size : end]).capitalize() + ".")
    outputs = []
    for _ in range(OUTPUTS):
        output: list[str] = []
        while len(output) < OUTPUT_WORDS:
            fact = facts[int(r.integers(count))].split()
            start = int(r.integers(0, 30))
            output += fact[start : start + int(r.integers(6, 30))]
            output += words[np.searchsorted(cumulated, r.random(int(r.integers(6, 30))))].tolist()
        outputs.append(" ".join(output[:OUTPUT_WORDS]))
    return facts, outputs


def median_ms(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


def plain_peer(outputs: Sequence[str], facts: Sequence[str]) -> Callable[[], list[int]]:
    """The reference with a quick tokenizer: still every qualified fact again in every window."""
    blacklist = reference_blacklist(outputs)

    def count() -> list[int]:
        tokens = map(tokenize, facts)
        return [len(blacklist.intersection(zip(*(t[i:] for i in range(N)), strict=False))) for t in tokens]

    return count


def tuples_peer(outputs: Sequence[str], facts: Sequence[str]) -> Callable[[], list[int]]:
    """Sets of tuples over tokens that are kept."""
    blacklist = reference_blacklist(outputs)
    kept = [reference.tokenize(fact) for fact in facts]
    return lambda: [len(blacklist.intersection(zip(*(t[i:] for i in range(N)), strict=False))) for t in kept]


def numpy_peer(outputs: Sequence[str], facts: Sequence[str]) -> Callable[[], list[int]]:
    """64-bit hashes over all rows at once with numpy, over token hashes that are kept."""
    identity: dict[str, int] = {}
    r = np.random.default_rng(1)
    codes = r.integers(0, 2**64, 4 * VOCABULARY, dtype=np.uint64)

    def hashed(tokens: list[str]) -> np.ndarray:
        return codes[[identity.setdefault(token, len(identity)) for token in tokens]]

    weights = [np.uint64(pow(0x9E3779B97F4A7C15, N - i, 2**64)) for i in range(N)]

    def rolled(tokens: np.ndarray) -> np.ndarray:
        count = max(0, len(tokens) - N + 1)
        total = np.zeros(count, np.uint64)
        for i, weight in enumerate(weights):
            total += tokens[i : i + count] * weight
        return total

    blacklist = np.unique(np.concatenate([rolled(hashed(reference.tokenize(output))) for output in outputs]))
    rows = [reference.tokenize(fact) for fact in facts]
    lengths = np.array([len(row) for row in rows])
    tokens = hashed([token for row in rows for token in row])
    row_of = np.repeat(np.arange(len(rows)), lengths)

    def count() -> list[int]:
        grams = rolled(tokens)
        inside = row_of[: len(grams)] == row_of[N - 1 :]
        at = np.minimum(np.searchsorted(blacklist, grams), len(blacklist) - 1)
        hits = np.flatnonzero(inside & (blacklist[at] == grams))
        distinct = np.unique(np.stack([row_of[hits].astype(np.uint64), grams[hits]]), axis=1)
        counts: list[int] = np.bincount(distinct[0].astype(np.int64), minlength=len(rows)).tolist()
        return counts

    return count


def ahocorasick_peer(outputs: Sequence[str], facts: Sequence[str]) -> Callable[[], list[int]]:
    """An automaton of the blacklisted n-grams over folded texts that are kept."""
    import ahocorasick

    automaton = ahocorasick.Automaton()
    for at, gram in enumerate(sorted(reference_blacklist(outputs))):
        automaton.add_word(f" {' '.join(gram)} ", at)
    automaton.make_automaton()
    kept = [f" {' '.join(reference.tokenize(fact))} " for fact in facts]
    return lambda: [len({at for _, at in automaton.iter(text)}) for text in kept]


def datasketch_peer(outputs: Sequence[str], facts: Sequence[str]) -> Callable[[], list[float]]:
    """Estimated Jaccard similarity of each fact with the blacklist, over signatures that are kept."""
    from datasketch import MinHash

    def signature(grams: set[tuple[str, ...]]) -> Any:
        made = MinHash(num_perm=128)
        made.update_batch([" ".join(gram).encode() for gram in grams])
        return made

    blacklist = signature(reference_blacklist(outputs))
    kept = [signature(reference.ngrams(reference.tokenize(fact), N)) for fact in facts]
    return lambda: [made.jaccard(blacklist) for made in kept]


def peers(outputs: Sequence[str], facts: Sequence[str], expected: list[int]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, make in (
        ("Python, nothing kept", plain_peer),
        ("Python, tokens kept", tuples_peer),
        ("numpy, hashes kept", numpy_peer),
        ("pyahocorasick, texts kept", ahocorasick_peer),
    ):
        try:
            count = make(outputs, facts)
        except ImportError:
            rows.append({"name": name, "note": "not installed"})
            continue
        identical = count() == expected
        row: dict[str, object] = {"name": name, "identical": identical}
        rows.append({**row, "window_ms": median_ms(count, 3)} if identical else row)
    some = facts[:DATASKETCH_FACTS]
    try:
        ms = median_ms(datasketch_peer(outputs, some), 3) * len(facts) / max(1, len(some))
        note = "estimates a similarity, cannot count: not the same job"
        rows.append({"name": "datasketch", "window_ms": ms, "extrapolated": len(some) < len(facts), "note": note})
    except ImportError:
        rows.append({"name": "datasketch", "note": "not installed"})
    return rows


def commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def measure(count: int, window_facts: int) -> dict[str, object]:
    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(f"making {count} facts")
    facts, outputs = corpus(count)
    size = sum(map(len, facts))
    hasher = TokenHasher()
    ingest_ms = median_ms(lambda: hasher.rows(facts), 3)
    tokens = hasher.rows(facts)
    rows = np.sort(np.random.default_rng(2).choice(count, min(window_facts, count), replace=False))
    qualified = [facts[row] for row in rows.tolist()]

    before = NGramGuard(N)
    for output in outputs[:-1]:
        before.update(output)
    guard = before.copy()
    guard.update(outputs[-1])

    say("checking against the reference")
    start = time.perf_counter()
    expected = reference_window(outputs, qualified)
    reference_ms = (time.perf_counter() - start) * 1e3
    everything = guard.overlap_rows(tokens)
    hit = np.flatnonzero(everything)[:5000].tolist()
    blacklist = reference_blacklist(outputs)
    since = guard.overlap_since(before.generation, tokens, rows)
    identical = (
        guard.overlap_rows(tokens, rows).tolist() == everything[rows].tolist() == expected
        and since is not None
        and (before.overlap_rows(tokens, rows) + since).tolist() == expected
        and [reference.count_matching_ngrams(facts[row], blacklist, N) for row in hit] == everything[hit].tolist()
        and len(guard) == len(blacklist)
    )
    say("identical" if identical else "NOT identical: no times")
    result: dict[str, object] = {
        "bench": "ngram",
        "identical": identical,
        "n": N,
        "facts": count,
        "tokens": tokens.tokens,
        "window_facts": len(rows),
        "facts_with_hits": int(np.count_nonzero(everything)),
        "blacklist_ngrams": len(guard),
        "bytes_per_token": tokens.nbytes / max(1, tokens.tokens),
        "tokens_mb": tokens.nbytes / 1e6,
        "texts_mb": size / 1e6,
        "guard_bytes": guard.nbytes,
        "threads": _C.threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "commit": commit(),
    }
    if not identical:
        return result

    def window() -> None:
        own = before.copy()
        own.update(outputs[-1])
        own.overlap_rows(tokens, rows)

    def next_window() -> None:
        own = before.copy()
        own.update(outputs[-1])
        own.overlap_since(before.generation, tokens, rows)

    window_ms, all_ms = median_ms(window, 31), median_ms(lambda: guard.overlap_rows(tokens), 11)
    reference_all = reference_ms * count / max(1, len(rows))
    say("measuring others")
    return {
        **result,
        "ingest_facts_per_s": count / ingest_ms * 1e3,
        "ingest_mb_per_s": size / ingest_ms / 1e3,
        "window_ms": window_ms,
        "window_since_ms": median_ms(next_window, 31),
        "window_all_qualified_ms": all_ms,
        "reference_window_ms": reference_ms,
        "reference_all_ms": reference_all,
        "reference_all_extrapolated": len(rows) < count,
        "window_speedup": reference_ms / window_ms,
        "all_speedup": reference_all / all_ms,
        "peers": peers(outputs, qualified, expected),
    }


def show(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if name != "peers":
            print(f"{name:28} {value:,.2f}" if isinstance(value, float) else f"{name:28} {value}")
    for row in result.get("peers", ()):
        time_ = f"{row['window_ms']:10,.2f} ms" if "window_ms" in row else ""
        notes = ["checked" if row.get("identical") else "WRONG COUNTS"] if "identical" in row else []
        notes += ["extrapolated"] if row.get("extrapolated") else []
        notes += [row["note"]] if "note" in row else []
        print(f"  {row['name']:26} {time_} ({', '.join(notes)})")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench ngram", description=__doc__.splitlines()[0])
    parser.add_argument("--facts", type=int, default=1_000_000, help="facts in the store")
    parser.add_argument("--window-facts", type=int, default=15_000, help="facts that qualify in a window")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    if options.facts < 1 or options.window_facts < 1:
        parser.error("expected at least one fact")
    result = measure(options.facts, options.window_facts)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0 if result["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
