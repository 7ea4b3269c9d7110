"""Texts that are hard to cut into tokens, for the tests of tokens, their hashes and the n-gram guard."""

from __future__ import annotations

import random

from hypothesis import strategies as st

SECRET = bytes(range(16))

SNIPPETS = [
    "Every pod gets its own IP address.",
    "kube-proxy",
    "snake_case v1.21",
    "Straße ǅ ﬁne ΐ",
    "cafe\u0301 café ｃａｆé",
    "東京都に住んでいます。",
    "ラーメン カﾞ ㌔",
    "中文分詞〇々 葛\U000e0100",
    "สวัสดีครับ น้ำ ๑๒",
    "ສະບາຍດີ",
    "ខ្មែរ ភាសា",
    "မြန်မာ ဘာသာ",
    "བོད་ཡིག",
    "السَّلامُ عليكم ١٢٣",
    "हिन्दी क्षत्रिय ४५",
    "👩‍👩‍👧‍👦 ❤️ 1️⃣ 🇦🇺 👍🏽",
    "\U00010400\U0001d7d8 \U00020000\U00030000",
    "\x00",
    "\ud83d",
    "\udc00x",
    "²½Ⅷ\u0345\u200d\u00ad\ufe0f",
    "“it’s” — a… ←\u0338 ¨ \xa0",
]
anything = st.text(st.characters(exclude_categories=()))  # lone surrogates too
few_words = st.lists(st.sampled_from(["a", "b", "c", "D", "é", "東", "ก"]), max_size=30).map(" ".join)
texts = st.lists(st.one_of(anything, st.sampled_from(SNIPPETS)), max_size=8).map("".join) | few_words


class Whitespace:
    """Tokens of any content: empty ones, spaces, surrogates."""

    name = "one-space"

    def __call__(self, text: str) -> list[str]:
        return text.split(" ")


def some_texts(count: int, seed: int = 0, words: int = 12, length: int = 30) -> list[str]:
    draw = random.Random(seed)
    known = [f"w{i}" for i in range(words)]
    return [" ".join(draw.choices(known, k=draw.randrange(length))) for _ in range(count)]
