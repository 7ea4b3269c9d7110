"""Hashes of tokens: SipHash-1-3 under a key, seven bytes a token, as in plain Python."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from python_ngrams import sip_hash
from texts import some_texts

from cdr_kernel import _C
from cdr_kernel.text import NGramGuard
from cdr_kernel.text._token_hashes import PROJECT_KEY, TOKEN_BYTES, TokenHasher, TokenRows, take_tokens


@pytest.mark.skipif(sys.hash_info.algorithm != "siphash13", reason="this Python hashes bytes another way")
def test_token_hash_is_siphash_1_3() -> None:
    """Without a seed Python's own hash of bytes is SipHash-1-3 with the all-zero key."""
    tokens = [bytes((7 * i + size) % 256 for i in range(size)) for size in range(1, 70)] + [b"x" * 300]
    script = f"print([hash(t) % 2**64 for t in {tokens!r}])"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, check=True, text=True,
    )  # fmt: skip
    expected = [int(h) for h in run.stdout.strip(" []\n").split(",")]
    assert [sip_hash(token, (0, 0)) for token in tokens] == expected
    for bits in (1, 8, 55, 56):
        assert words_of(_C.hash_tokens(tokens, key=(0, 0), bits=bits)) == [h % 2**bits for h in expected]
    assert words_of(_C.hash_tokens(tokens, key=PROJECT_KEY, bits=56)) != [h % 2**56 for h in expected]


def words_of(tokens: np.ndarray) -> list[int]:
    raw = tokens.tobytes()
    return [int.from_bytes(raw[i : i + TOKEN_BYTES], "little") for i in range(0, len(raw), TOKEN_BYTES)]


def test_token_hash_depends_on_both_halves_of_the_key() -> None:
    keys = [(0, 0), (1, 0), (0, 1), PROJECT_KEY, (2**64 - 1, 2**63)]
    ours = [words_of(_C.hash_tokens(["pod"], key=key, bits=56))[0] for key in keys]
    assert ours == [sip_hash(b"pod", key) % 2**56 for key in keys]
    assert len(set(ours)) == len(keys)


class TestTokenRows:
    def test_a_token_takes_seven_bytes_and_its_row_eight(self) -> None:
        texts = some_texts(100)
        rows = TokenHasher().rows(texts)
        tokens = sum(len(text.split()) for text in texts)
        assert (len(rows), rows.tokens, rows.nbytes) == (100, tokens, 7 * tokens + 8 * 101)
        empty = TokenHasher().rows([])
        assert (len(empty), empty.tokens) == (0, 0)
        assert NGramGuard().overlap_rows(empty).tolist() == []

    def test_one_hashing_serves_every_n(self) -> None:
        texts = some_texts(50)
        rows = TokenHasher().rows(texts)
        for n in range(1, 33):
            guard = NGramGuard(n)
            guard.update(" ".join(texts[:5]))
            assert guard.overlap_rows(rows).tolist() == guard.overlap(texts).tolist()

    def test_blocks_are_read_one_after_the_other(self) -> None:
        texts = some_texts(30)
        hasher = TokenHasher()
        parts = (texts[:11], [], texts[11:12], texts[12:])
        rows = TokenRows(
            tuple(hasher.hashed(part) for part in parts), texts, hasher.tokenizer_name, hasher.key_fingerprint
        )
        guard = NGramGuard(2)
        guard.update(texts[3] + texts[20])
        expected = guard.overlap(texts)
        assert guard.overlap_rows(rows).tolist() == expected.tolist()
        order = np.random.default_rng(0).permutation(30)
        assert guard.overlap_rows(rows, order).tolist() == expected[order].tolist()
        taken = take_tokens(rows.blocks, order)
        again = hasher.hashed([texts[i] for i in order])
        assert [list(a) for a in taken] == [list(a) for a in again]

    def test_threads_change_nothing(self) -> None:
        texts = [*some_texts(3000), *some_texts(3, seed=1, length=40_000)]
        expected = None
        for threads in (1, 2, 7):
            _C.set_threads(threads)
            try:
                guard = NGramGuard(2)
                rows = guard.token_rows(texts)
                guard.update(texts[1000])
                found = (bytes(rows.blocks[0][0]), bytes(rows.blocks[0][1]), guard.overlap_rows(rows).tolist())
            finally:
                _C.set_threads(0)
            expected = expected or found
            assert found == expected

    def test_a_replaced_tokenizer_is_asked_once_for_each_text(self) -> None:
        asked = []

        def counting(text: str) -> list[str]:
            asked.append(text)
            return text.split()

        texts = some_texts(5000)
        rows = TokenHasher(counting).rows(texts)
        assert asked == texts
        twin = TokenHasher().rows(texts)
        assert [bytes(a) for a in rows.blocks[0]] == [bytes(a) for a in twin.blocks[0]]
