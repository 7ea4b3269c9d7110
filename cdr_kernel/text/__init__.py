"""Texts to tokens, token hashes, and the n-gram guard."""

from __future__ import annotations

from cdr_kernel.text._ngram_guard import NGramGuard, repetition
from cdr_kernel.text._tokenize import Tokenizer, tokenize

__all__ = ["NGramGuard", "Tokenizer", "repetition", "tokenize"]
