"""The specification's own numbers, and for each reading the case that tells it from the other one."""

from __future__ import annotations

import copy
import functools
import math
import operator
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdr_kernel.spec.constants import Depth
from cdr_kernel.spec.reference import (
    Entry,
    Exit,
    Fact,
    ReferenceSession,
    Report,
    Scored,
    SubQuery,
    assemble,
    band,
    cdr_rank,
    cdr_score,
    check_fits,
    cosine,
    count_matching_ngrams,
    coverage_score,
    depth_from_words,
    dot,
    guarantee_holds,
    guard_alert,
    has_ended,
    headers,
    min_novelty,
    newest_of,
    ngram_penalty,
    ngrams,
    novelty,
    novelty_ratio,
    residual_pull,
    residual_task_anchor,
    scaled,
    should_stop,
    tokenize,
    update_session_after_window,
)

E1, E2, E3 = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
SIX = "alpha beta gamma delta epsilon zeta"


def sub_query(name: str, embedding=E1, *, marginal=False) -> SubQuery:
    return SubQuery(id=name, label=name.upper(), text=f"about {name}", embedding=embedding, marginal=marginal)


def scored(relevance=0.8, novelty=1.0, overlap=0, importance=1.0) -> Scored:
    """A ranked fact without coverage or pull."""
    penalty = min(0.8, overlap * 0.15)
    base = importance * relevance * novelty
    return Scored(
        fact=Fact(E1, "", importance),
        relevance=relevance,
        coverage=1.0 - novelty,
        residual_pull=0.0,
        novelty=novelty,
        ngram_overlap=overlap,
        ngram_penalty=penalty,
        score_without_guard=base,
        score=base * (1.0 - penalty),
    )


def session_abc(**options) -> ReferenceSession:
    return ReferenceSession([sub_query("a", E1), sub_query("b", E2), sub_query("c", E3)], **options)


def unit(m: int, i: int) -> list[float]:
    return [float(i == j) for j in range(m)]


def flat(angle_cosine: float) -> tuple[float, float, float]:
    """A unit vector at that cosine to E1, in the plane of E1 and E2."""
    return (angle_cosine, math.sqrt(1.0 - angle_cosine**2), 0.0)


# Exact arithmetic

law = settings(derandomize=True, database=None, deadline=None)
numbers = st.integers(-10_000, 10_000).map(float)
vectors = st.lists(numbers, min_size=5, max_size=5).filter(any)


@law
@given(vectors, vectors)
def test_cosine_is_within_one_and_symmetric(a, b):
    assert -1.0 <= cosine(a, b) <= 1.0
    assert cosine(a, b) == cosine(b, a)


@law
@given(vectors, vectors, st.integers(-900, 900), st.integers(-900, 900))
def test_cosine_ignores_powers_of_two_to_the_bit(a, b, i, j):
    assert cosine([math.ldexp(x, i) for x in a], [math.ldexp(x, j) for x in b]) == cosine(a, b)


@law
@given(vectors, vectors, st.permutations(range(5)))
def test_cosine_ignores_the_order_of_the_dimensions(a, b, order):
    assert cosine([a[i] for i in order], [b[i] for i in order]) == cosine(a, b)


@law
@given(vectors, vectors)
def test_cosine_is_the_rational_truth_within_rounding(a, b):
    ab, aa, bb = (sum(Fraction(x) * Fraction(y) for x, y in zip(*p, strict=True)) for p in ((a, b), (a, a), (b, b)))
    value = cosine(a, b)
    assert abs(float(ab * ab / (aa * bb)) - value**2) < 4e-16
    assert (value > 0) == (ab > 0)


def test_cosine_is_clamped_where_rounding_would_pass_one():
    a, b = [1.0, 2.0], [0.7, 1.4]
    assert dot(a, b) / math.sqrt(dot(a, a) * dot(b, b)) > 1.0
    assert cosine(a, b) == 1.0
    assert cosine(a, [-x for x in b]) == -1.0


def test_dot_is_correctly_rounded_where_a_running_sum_is_not():
    a = [2.0**60, 1.0, -(2.0**60), 2.0**-30]
    assert dot(a, [1.0] * 4) == 1.0 + 2.0**-30
    assert functools.reduce(operator.add, a) != 1.0 + 2.0**-30  # from Python 3.12 on sum() is not a running sum


def test_dot_needs_equal_dimensions():
    with pytest.raises(ValueError, match="got 3 and 2"):
        dot(E1, [1.0, 0.0])


@pytest.mark.parametrize("size", [3e38, 1e-38, 1e-45, 2.0**390, 2.0**-390, 1e308, 5e-324])
def test_cosine_of_huge_and_tiny_vectors_is_one(size):
    assert cosine([size, size], [1.0, 1.0]) == 1.0
    assert cosine([size, size], [size, size]) == 1.0


def test_scaled_changes_nothing_inside_2_to_the_200():
    for edge in (2.0**200, 2.0**-200, -(2.0**200), 1.0):
        assert scaled([edge, 0.0]) == [edge, 0.0]


def test_scaled_brings_the_largest_magnitude_into_one_to_two():
    assert scaled([-3.0 * 2.0**500, 2.0**500]) == [-1.5, 0.5]
    assert scaled([3.0 * 2.0**-500, 2.0**-1000]) == [1.5, 2.0**-501]


@pytest.mark.parametrize("bad", [[0.0, 0.0], [-0.0], [], [math.nan, 1.0], [math.inf, 1.0], [-math.inf]])
def test_a_vector_has_a_direction(bad):
    with pytest.raises(ValueError, match="expected a vector"):
        scaled(bad)


# The gate


def test_r4_a_cosine_of_exactly_the_gate_is_kept():
    fact = [11.0, 15.0, 7.0, 2.0, 1.0]
    query = [1.0, 0.0, 0.0, 0.0, 0.0]
    assert cosine(fact, query) == 0.55
    assert len(cdr_rank([Fact(fact)], query, ReferenceSession())) == 1
    just_above = ReferenceSession(min_relevance=math.nextafter(0.55, 1))
    assert cdr_rank([Fact(fact)], query, just_above) == []


def test_r4_every_vector_passes_a_gate_of_one_against_itself():
    rng = random.Random(4)
    session = ReferenceSession(min_relevance=1.0)
    for _ in range(1000):
        vector = [rng.gauss(0, 1) for _ in range(8)]
        assert len(cdr_rank([Fact(vector)], vector, session)) == 1


def test_r21_pull_does_not_rescue_from_the_gate():
    session = ReferenceSession(residual_set=[sub_query("left", (0.8, 0.6, 0.0))], coverage_set=[Entry(E3, 1.0)])
    fact = Fact(flat(0.5))
    assert residual_pull(fact, session.remaining, session.coverage_set) > 0.9
    assert cdr_rank([fact], E1, session) == []


def test_a_gate_of_zero_is_honoured():
    assert len(cdr_rank([Fact(E2)], E1, ReferenceSession(min_relevance=0.0))) == 1


# Coverage and novelty


@pytest.mark.parametrize(("m", "expected"), [(1, 0.20), (2, 0.50), (5, 0.80), (10, 0.90), (20, 0.95)])
def test_r22_orthogonal_covered_topics_dilute_each_other(m, expected):
    entries = [Entry(unit(m, i), 0.9) for i in range(m)]
    assert novelty(coverage_score(Fact(unit(m, 0)), entries)) == pytest.approx(expected, abs=1e-15)


def test_section_2_3_coverage_is_a_weighted_mean_and_not_a_maximum():
    entries = [Entry(E1, 0.9), Entry(E2, 0.3)]
    assert coverage_score(Fact(E1), entries) == pytest.approx(0.75, abs=1e-15)
    assert coverage_score(Fact(E2), entries) == pytest.approx(0.25, abs=1e-15)
    assert coverage_score(Fact((3.0, 4.0, 0.0)), entries) == pytest.approx(0.65, abs=1e-15)


def test_section_2_7_no_coverage_is_full_novelty():
    assert coverage_score(Fact(E1), []) == 0.0
    assert novelty(0.0) == 1.0


def test_r5_entries_of_depth_zero_cover_nothing():
    assert novelty(coverage_score(Fact(E1), [Entry(E1, 0.0)])) == 1.0


def test_tiny_depths_weigh_like_large_ones():
    entries = [Entry(E1, 5e-324), Entry(E2, 5e-324)]
    assert coverage_score(Fact(E1), entries) == 0.5


def test_r19_the_same_topic_twice_weighs_twice():
    assert coverage_score(Fact(E1), [Entry(E1, 0.5), Entry(E1, 0.5), Entry(E2, 0.5)]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("depth", [-0.1, 1.1, math.nan, math.inf])
def test_r6_a_depth_is_between_zero_and_one(depth):
    with pytest.raises(ValueError, match="depth weight"):
        coverage_score(Fact(E1), [Entry(E1, depth)])


@pytest.mark.parametrize(("coverage", "expected"), [(0.0, 1.0), (0.26, 0.74), (0.80, 0.20), (0.95, 0.20), (1.0, 0.20)])
def test_section_2_4_novelty_is_capped_and_has_a_floor(coverage, expected):
    assert novelty(coverage) == expected


@law
@given(st.floats(-1.0, 1.0), st.booleans())
def test_section_2_4_novelty_is_never_below_the_floor(coverage, clamp):
    assert 0.20 <= novelty(coverage, clamp_novelty=clamp) <= (1.0 if clamp else 2.0)


def test_r3_an_opposite_entry_gives_novelty_two_and_header_one():
    session = ReferenceSession(coverage_set=[Entry((-1.0, 0.0, 0.0), 0.9)])
    ranking = cdr_rank([Fact(E1)], E1, session)
    assert ranking[0].novelty == 2.0
    assert ranking[0].score == 2.0
    assert headers(ranking, ranking, coverage_depth=1)["CRP-Context-Coverage-Score"] == "1.00"
    assert cdr_rank([Fact(E1)], E1, replace(session, clamp_novelty=True))[0].score == 1.0


# Residual pull


def test_r1_no_pull_while_the_coverage_set_is_empty():
    session = ReferenceSession(residual_set=[sub_query("b", E2)])
    fact = Fact(flat(0.60))
    literal, pulled = (cdr_rank([fact], E1, replace(session, first_window_pull=flag))[0] for flag in (False, True))
    assert (literal.score, literal.residual_pull) == pytest.approx((0.60, 0.0), abs=1e-15)
    assert (pulled.score, pulled.residual_pull) == pytest.approx((0.80, 0.80), abs=1e-15)


def test_r1_is_keyed_on_the_coverage_set_and_not_on_the_window():
    session = ReferenceSession(residual_set=[sub_query("b", E2)], window_count=3)
    assert cdr_rank([Fact(flat(0.60))], E1, session)[0].residual_pull == 0.0
    covered = replace(session, window_count=0, coverage_set=[Entry(E3, 0.0)])
    assert cdr_rank([Fact(flat(0.60))], E1, covered)[0].score == pytest.approx(0.80, abs=1e-15)


def test_section_2_2_pull_is_the_maximum_over_what_remains():
    residual = [sub_query("a", E1), sub_query("b", E2), sub_query("c", E3)]
    assert residual_pull(Fact((2.0, 3.0, 6.0)), residual, [Entry(E1, 1.0)]) == 6 / 7
    assert residual_pull(Fact((-1.0, -1.0, 0.0)), residual[:1], [Entry(E1, 1.0)]) < 0.0
    assert residual_pull(Fact(E1), [], [Entry(E1, 1.0)]) == 0.0


# The score


def test_section_2_2_score_is_the_product_with_the_larger_of_relevance_and_pull():
    assert cdr_score(0.5, 0.75, 0.5, importance_weight=2.0) == 0.75
    assert cdr_score(0.75, 0.5, 0.5, importance_weight=2.0) == 0.75
    assert cdr_score(0.75, 0.5, 0.5, importance_weight=2.0, multiplier=0.5) == 0.375
    assert cdr_score(0.75, 0.5, 0.5, importance_weight=0.0) == 0.0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["importance_weight", "multiplier"])
def test_r28_importance_is_finite_and_not_negative(name, value):
    with pytest.raises(ValueError, match=name):
        cdr_rank([replace(Fact(E1), **{name: value})], E1, ReferenceSession())


def test_section_2_7_first_window_is_importance_times_relevance():
    session = session_abc()
    facts = [Fact(flat(c), importance_weight=w) for c, w in ((0.94, 1.0), (0.65, 2.0), (0.75, 0.5))]
    ranking = cdr_rank(facts, E1, session)
    assert [r.score for r in ranking] == pytest.approx([1.30, 0.94, 0.375])
    assert all(r.score == r.fact.importance_weight * r.relevance for r in ranking)


def test_golden_second_window():
    """Every cosine is rational: query (1,0,0), covered (1,0,0) at .75 and (0,1,0) at .25, left (0,0,1)."""
    session = ReferenceSession(
        coverage_set=[Entry(E1, 0.75), Entry(E2, 0.25)],
        residual_set=[sub_query("c", E3)],
        ngram_blacklist=ngrams(SIX.split()),
    )
    facts = [
        Fact((3.0, 4.0, 0.0), id="p"),  # 3/5 x (1 - 13/20)
        Fact((4.0, 0.0, 3.0), id="q", importance_weight=2.0),  # 2 x 4/5 x (1 - 3/5)
        Fact((6.0, 2.0, 3.0), id="r", multiplier=0.5),  # 1/2 x 6/7 x (1 - 5/7)
        Fact((4.0, 0.0, 3.0), SIX, id="s"),  # 4/5 x (1 - 3/5) x (1 - 3/20)
        Fact((2.0, 3.0, 6.0), id="gated"),
        Fact((3.0, 0.0, 4.0), id="pulled"),  # 4/5 x (1 - 9/20)
    ]
    ranking = cdr_rank(facts, E1, session)
    assert [r.fact.id for r in ranking] == ["q", "pulled", "s", "p", "r"]
    assert [r.score for r in ranking] == pytest.approx([0.64, 0.44, 0.272, 0.21, 6 / 49], abs=1e-15)
    assert [r.coverage for r in ranking] == pytest.approx([0.6, 0.45, 0.6, 0.65, 5 / 7], abs=1e-15)
    assert [r.residual_pull for r in ranking] == pytest.approx([0.6, 0.8, 0.6, 0.0, 3 / 7], abs=1e-15)
    assert [r.ngram_overlap for r in ranking] == [0, 0, 1, 0, 0]


def test_r2_score_is_the_adjusted_score_and_the_other_one_is_kept():
    session = ReferenceSession(ngram_blacklist=ngrams(SIX.split()))
    (only,) = cdr_rank([Fact(E1, SIX)], E1, session)
    assert (only.score_without_guard, only.ngram_penalty) == (1.0, 0.15)
    assert only.score == 1.0 * (1.0 - 0.15)


def test_section_1_1_a_fresh_fact_overtakes_a_covered_one():
    session = session_abc(min_relevance=0.5)
    facts = [Fact(flat(0.94), id="covered"), Fact((0.7, 0.0, math.sqrt(0.51)), id="fresh")]
    assert [r.fact.id for r in cdr_rank(facts, E1, session)] == ["covered", "fresh"]
    update_session_after_window(session, Report(0.5, ["a", "b"], {"a": 0.9, "b": 0.9}), "")
    assert [r.fact.id for r in cdr_rank(facts, E1, session)] == ["fresh", "covered"]


# Order and k


@pytest.mark.parametrize("k", [1, 3, 10, None])
def test_r26_equal_scores_keep_the_order_of_the_facts(k):
    facts = [Fact(E1, id=str(i)) for i in range(1000)]
    assert [r.fact.id for r in cdr_rank(facts, E1, ReferenceSession(), k=k)] == [str(i) for i in range(1000)][:k]


def test_r26_a_sequence_number_goes_before_the_position():
    facts = [Fact(E1, id="late", sequence=9), Fact(E1, id="early", sequence=2), Fact(flat(0.9), sequence=0)]
    assert [r.fact.sequence for r in cdr_rank(facts, E1, ReferenceSession())] == [2, 9, 0]


@pytest.mark.parametrize(("k", "length"), [(10, 3), (2, 2), (0, 0), (None, 3)])
def test_k_against_the_number_of_facts(k, length):
    assert len(cdr_rank([Fact(E1)] * 3, E1, ReferenceSession(), k=k)) == length
    assert cdr_rank([], E1, ReferenceSession(), k=k) == []


def test_a_negative_k_is_an_error():
    with pytest.raises(ValueError, match="got -1"):
        cdr_rank([Fact(E1)], E1, ReferenceSession(), k=-1)


@law
@given(st.lists(vectors, min_size=2, max_size=6), vectors, vectors, vectors, st.randoms(use_true_random=False))
def test_permuting_the_facts_keeps_the_scores(rows, query, covered, left, rng):
    facts = [Fact(row, sequence=i) for i, row in enumerate(rows)]
    session = ReferenceSession(
        coverage_set=[Entry(covered, 0.4)], residual_set=[sub_query("left", left)], min_relevance=-1.0
    )
    ranking = cdr_rank(facts, query, session)
    rng.shuffle(facts)
    assert cdr_rank(facts, query, session) == ranking


@law
@given(vectors, vectors, st.floats(0.0, 1.0, exclude_min=True))
def test_one_entry_weighs_the_same_at_any_depth(row, covered, depth):
    assert coverage_score(Fact(row), [Entry(covered, depth)]) == cosine(row, covered)


# Tokens and n-grams


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        (" ,.!\n\t", []),
        ("Pod-to-pod, v1.30", ["pod", "to", "pod", "v1", "30"]),
        ("Straße ﬁne ＡＢ²", ["strasse", "fine", "ab2"]),
        ("e\u0301tat n\u0303", ["état", "ñ"]),
        ("q\u0323x", ["q\u0323x"]),
        ("हिन्दी लिपि", ["हिन्दी", "लिपि"]),
        ("東京 2025年", ["東", "京", "2025", "年"]),
        ("Kubernetesの網", ["kubernetes", "の", "網"]),
        ("ﾀﾜｰ", ["タ", "ワ", "ー"]),
        ("か\u3099さ\u309a", ["が", "さ\u309a"]),
        ("ภาษา", ["ภ", "า", "ษ", "า"]),
        ("กี่ที่", ["กี่", "ที่"]),
        ("ພາສາ", ["ພ", "າ", "ສ", "າ"]),
        ("ខ្មែរ", ["ខ្", "មែ", "រ"]),
        ("မြန်မာ", ["မြ", "န်", "မာ"]),
        ("བོད་ཡིག", ["བོ", "ད", "ཡི", "ག"]),
        ("한국어 텍스트", ["한국어", "텍스트"]),
        ("x東\u0301y", ["x", "東\u0301", "y"]),
        ("\u0301a", ["\u0301a"]),
        ("๑๒ 〇 𠀀𠀁", ["๑", "๒", "〇", "𠀀", "𠀁"]),
        ("a_b'c", ["a", "b", "c"]),
        ("مرحبا بالعالم", ["مرحبا", "بالعالم"]),
    ],
)
def test_r23_tokens(text, tokens):
    assert tokenize(text) == tokens


@law
@given(st.text())
def test_r23_tokens_are_not_empty_and_separators_never_matter(text):
    tokens = tokenize(text)
    assert all(tokens)
    assert tokenize(f" ...{text}!\n") == tokens


def test_section_5_1_six_grams():
    tokens = SIX.split()
    assert ngrams(tokens[:5]) == set()
    assert ngrams(tokens) == {tuple(tokens)}
    assert ngrams([*tokens, "eta"]) == {tuple(tokens), (*tokens[1:], "eta")}


def test_r24_a_listed_ngram_counts_once_however_often_it_stands_there():
    blacklist = ngrams(SIX.split())
    assert count_matching_ngrams(f"{SIX}. {SIX}; {SIX}!", blacklist) == 1
    assert count_matching_ngrams(SIX.upper(), blacklist) == 1
    assert count_matching_ngrams("alpha beta gamma delta epsilon", blacklist) == 0


@pytest.mark.parametrize(("overlap", "expected"), [(0, 0.0), (1, 0.15), (2, 0.30), (5, 0.75), (6, 0.80), (100, 0.80)])
def test_section_5_2_penalty(overlap, expected):
    assert ngram_penalty(overlap) == expected


def test_r25_guard_alert_is_strictly_above_a_fifth_of_the_qualified():
    clean, hit = scored(), scored(overlap=1)
    assert not guard_alert([])
    assert not guard_alert([hit] * 2 + [clean] * 8)
    assert guard_alert([hit] * 3 + [clean] * 8)


# Depth and the update


@pytest.mark.parametrize(
    ("actual", "expected", "depth"),
    [(280, 300, 0.90), (60, 300, 0.20), (0, 300, 0.0), (900, 300, 0.90), (50, 0, 0.5), (50, -1, 0.5)],
)
def test_r7_depth_from_words(actual, expected, depth):
    assert depth_from_words(actual, expected) == depth


@pytest.mark.parametrize(("actual", "expected"), [(-1, 300), (math.nan, 300), (1, math.inf)])
def test_r7_counts_are_counts(actual, expected):
    with pytest.raises(ValueError, match="word counts"):
        depth_from_words(actual, expected)


def test_section_3_2_depth_names():
    assert [d.value for d in (Depth.THOROUGH, Depth.ADEQUATE, Depth.PARTIAL, Depth.MARGINAL)] == [
        0.9,
        0.7,
        0.4,
        0.15,
    ]


def test_r8_what_was_addressed_does_not_come_back():
    session = session_abc()
    update_session_after_window(session, Report(0.3, ["a"]), "")
    update_session_after_window(session, Report(0.6, ["b"]), "")
    assert [s.id for s in session.remaining] == ["c"]


def test_r15_r19_r33_entries_have_their_window_their_depth_and_stand_twice():
    session = session_abc()
    update_session_after_window(session, Report(0.3, ["a"], {"a": 0.0}), SIX)
    update_session_after_window(session, Report(0.4, ["b", "a"], {"b": 0.9}), "")
    assert [(tuple(e.embedding), e.depth_weight, e.window_number) for e in session.coverage_set] == [
        (E1, 0.0, 1),
        (E2, 0.9, 2),
        (E1, 0.5, 2),
    ]
    assert (session.window_count, session.completeness) == (2, 0.4)
    assert session.ngram_blacklist == {tuple(SIX.split())}


@pytest.mark.parametrize(
    "report",
    [
        Report(0.5, ["a", "nobody"]),
        Report(0.5, ["a"], {"nobody": 0.5}),
        Report(0.5, ["a"], {"a": 1.5}),
        Report(0.5, ["a"], {"a": math.nan}),
        Report(math.nan, ["a"]),
        Report(1.1, ["a"]),
    ],
)
def test_r6_a_bad_report_leaves_the_session_as_it_was(report):
    session = session_abc()
    update_session_after_window(session, Report(0.3, ["b"]), SIX)
    before = copy.deepcopy(session)
    with pytest.raises(ValueError, match=r"sub-query|depth|completeness"):
        update_session_after_window(session, report, "one two three four five six seven")
    assert session == before


def test_r17_reset_is_the_state_before_the_first_window():
    session = session_abc(max_windows=7)
    update_session_after_window(session, Report(0.3, ["b"]), SIX)
    session.reset()
    assert session == session_abc(max_windows=7)


@pytest.mark.parametrize("max_windows", [0, 21, -1])
def test_r16_max_windows_is_one_to_twenty(max_windows):
    with pytest.raises(ValueError, match="1 to 20"):
        ReferenceSession(max_windows=max_windows)


# The anchor


def test_section_4_2_anchor():
    assert residual_task_anchor(session_abc().remaining) == "Remaining sections to complete: A, B, C"


def test_r31_nothing_left_is_the_empty_string():
    assert residual_task_anchor([]) == residual_task_anchor([], 5) == ""


@pytest.mark.parametrize(
    ("max_chars", "expected"),
    [
        (39, "A, B, C"),
        (38, "(+3 more)"),
        (500, "A, B, C"),
        (1, "(+3 more)"),
    ],
)
def test_r31_short_anchor(max_chars, expected):
    assert residual_task_anchor(session_abc().remaining, max_chars) == f"Remaining sections to complete: {expected}"


def test_r31_anchor_keeps_as_many_labels_as_fit():
    remaining = [sub_query(f"section-{i}") for i in range(12)]
    opening = "Remaining sections to complete: "
    three = opening + "SECTION-0, SECTION-1, SECTION-2 (+9 more)"
    assert residual_task_anchor(remaining, len(three)) == three
    assert residual_task_anchor(remaining, len(three) - 1) == opening + "SECTION-0, SECTION-1 (+10 more)"
    least = len(opening + "(+12 more)")
    assert all(len(residual_task_anchor(remaining, n)) <= n for n in range(least, 200))


def test_r31_max_chars_is_positive():
    with pytest.raises(ValueError, match="max_chars"):
        residual_task_anchor([], 0)


# The exits


def exit_of(session=None, report=None, envelope=None, **options) -> Exit:
    return should_stop(session or ReferenceSession(**options), report, envelope)


def test_exit_1_needs_completeness_and_nothing_left():
    assert exit_of(report=Report(0.92)).reason == "task-complete"
    assert exit_of(report=Report(0.9199)).reason is None
    assert exit_of(session_abc(), Report(0.99)).reason is None
    assert exit_of(report=Report(0.80), completion_threshold=0.80).reason == "task-complete"


def test_r9_what_is_marked_marginal_may_stay():
    marginal = sub_query("m", marginal=True)
    assert exit_of(report=Report(0.95), residual_set=[marginal]).reason == "task-complete"
    assert exit_of(report=Report(0.95), residual_set=[marginal, sub_query("a")]).reason is None


def test_exit_2_is_the_ceiling():
    assert exit_of(window_count=4).reason is None
    assert exit_of(window_count=5).reason == "limit-reached"


def test_r15_five_windows_are_five():
    session = session_abc()
    windows = 0
    while not should_stop(session).stop:
        windows += 1
        update_session_after_window(session, Report(0.1, ["a"]), "")
    assert windows == 5
    assert session.coverage_set[-1].window_number == 5


def test_r11_floor_and_two_ngram_matches_exhaust():
    result = exit_of(envelope=[scored(novelty=0.20, overlap=2)] * 20)
    assert result.reason == "ckf-exhausted"
    assert result.novelty_ratio == pytest.approx(0.14)
    assert "0.140" in result.detail
    assert exit_of(envelope=[scored(novelty=0.20, overlap=1)] * 20).reason is None


def test_r11_floor_alone_never_exhausts():
    assert exit_of(envelope=[scored(novelty=0.20)] * 20).reason is None


def test_r11_importance_ends_the_loop_only_in_the_literal_form():
    envelope = [scored(importance=0.1)] * 3
    assert exit_of(envelope=envelope).reason == "ckf-exhausted"
    free = exit_of(envelope=envelope, exhaustion="novelty")
    assert (free.reason, free.novelty_ratio) == (None, 1.0)
    both = [scored(novelty=0.20, overlap=2, importance=5.0)]
    assert exit_of(envelope=both).reason is None
    assert exit_of(envelope=both, exhaustion="novelty").reason == "ckf-exhausted"


def test_r11_ratio_is_over_query_relevance_and_a_mean():
    pulled = replace(scored(relevance=0.6), residual_pull=0.9, score=0.9)
    assert novelty_ratio([pulled]) == pytest.approx(1.5)
    assert novelty_ratio([scored(novelty=0.2), scored(novelty=1.0)]) == pytest.approx(0.6)


def test_r11_exhaustion_is_one_of_two_words():
    with pytest.raises(ValueError, match="exhaustion"):
        novelty_ratio([], "mean")


def test_r12_an_empty_envelope_is_exhausted():
    session = ReferenceSession(min_relevance=0.99)
    result = should_stop(session, None, cdr_rank([Fact(flat(0.98))], E1, session))
    assert (result.reason, result.novelty_ratio) == ("ckf-exhausted", 0.0)
    assert result.detail == "no fact passed the relevance gate"


def test_r27_facts_of_no_relevance_are_left_out_of_the_ratio():
    assert novelty_ratio([scored(novelty=0.5), scored(relevance=0.0), scored(relevance=-0.5)]) == 0.5
    result = exit_of(envelope=[scored(relevance=0.0)])
    assert (result.reason, result.novelty_ratio) == ("ckf-exhausted", 0.0)
    assert "relevance above zero" in result.detail


def test_exit_4_is_the_safety_budget():
    assert exit_of(safety_budget=0.11).reason is None
    assert exit_of(safety_budget=0.10).reason == "safety-budget-depleted"


def test_r10_first_reason_wins_the_others_are_named_and_safety_escalates():
    result = exit_of(window_count=5, safety_budget=0.05)
    assert (result.reason, result.also) == ("limit-reached", ("safety-budget-depleted",))
    assert result.escalate
    every = exit_of(report=Report(1.0), envelope=[], window_count=5, safety_budget=0.0)
    assert every.reason == "task-complete"
    assert every.also == ("limit-reached", "ckf-exhausted", "safety-budget-depleted")
    assert not exit_of(window_count=5).escalate


def test_r10_rounding_does_not_decide_an_exit():
    budget = 1.0 - 0.35 - 0.35 - 0.15 - 0.05
    assert budget > 0.10
    assert exit_of(safety_budget=budget).reason == "safety-budget-depleted"
    assert exit_of(report=Report(math.nextafter(0.92, 0))).reason == "task-complete"
    barely = [replace(scored(relevance=1.0), score=math.nextafter(0.15, 0))]
    assert novelty_ratio(barely) < 0.15
    assert exit_of(envelope=barely).reason is None


def test_r37_a_session_that_has_ended_says_so_without_a_report_at_hand():
    session = session_abc()
    update_session_after_window(session, Report(0.95, ["a", "b", "c"]), "")
    assert should_stop(session).reason == "task-complete"
    assert has_ended(session)
    session.task_sub_queries = [*session.task_sub_queries, sub_query("d", E1)]
    session.residual_set = [session.task_sub_queries[-1]]
    assert not has_ended(session)
    session.reset()
    assert not has_ended(session)
    assert not has_ended(ReferenceSession(safety_budget=0.0)), "nothing was begun"


def test_r37_an_exhausted_store_stays_so_until_facts_come():
    session = session_abc()
    facts = [Fact(E1), Fact(E2, sequence=7)]
    assert newest_of(facts) == 7
    assert newest_of([]) == -1
    update_session_after_window(session, Report(0.2, ["a"]), "", [scored(novelty=0.2, overlap=2)], 7)
    assert should_stop(session).novelty_ratio == pytest.approx(0.14)
    assert should_stop(session, None, [scored()], 7).reason == "ckf-exhausted"
    assert should_stop(session, None, [scored()], 8).reason is None
    assert has_ended(session, 7)
    assert not has_ended(session, 8)
    session.safety_budget = 0.1
    assert has_ended(session, 8)
    update_session_after_window(session, Report(0.2, ["a"]), "", [scored()], 8)
    session.safety_budget = 1.0
    assert not has_ended(session)


def test_r36_what_is_addressed_in_part_may_remain():
    for depth, remain in ((0.0, ["c"]), (0.4, ["c"]), (0.7, ["a", "c"])):
        session = session_abc(residual_depth=depth)
        update_session_after_window(session, Report(0.3, ["a", "b"], {"a": 0.4, "b": 0.7}), "")
        assert [s.id for s in session.remaining] == remain
    assert residual_task_anchor(session.remaining) == "Remaining sections to complete: A, C"
    assert residual_pull(Fact(E1), session.remaining, session.coverage_set) == 1.0
    update_session_after_window(session, Report(0.5, ["a"], {"a": 0.3}), "")
    assert [s.id for s in session.remaining] == ["c"]
    with pytest.raises(ValueError, match="residual_depth"):
        session_abc(residual_depth=1.1)


def test_section_6_the_outputs_are_assembled_in_order():
    session = session_abc()
    for output in ("one\n", " \n", "\n  three"):
        update_session_after_window(session, Report(0.5), output)
    assert assemble(session.outputs) == "one\n\n  three"
    assert assemble([]) == ""


def test_r32_without_report_and_envelope_only_limit_and_safety_are_tested():
    result = exit_of()
    assert result == Exit(False, None, (), False, "", None)
    assert exit_of(safety_budget=0.05).reason == "safety-budget-depleted"


# Headers, bands and the guarantee


def test_section_8_headers_while_the_loop_goes_on():
    ranking = [scored(novelty=0.9), scored(novelty=0.74), scored(0.6, 0.5, overlap=1)]
    ranking += [scored(overlap=2), scored(overlap=3)]
    expected = {
        "CRP-Context-Coverage-Score": "0.74",
        "CRP-Context-Coverage-Depth": "18",
        "CRP-Context-NGram-Guard-Activations": "3",
        "CRP-Context-Continuation-Status": "in-progress",
    }
    going_on = exit_of(envelope=ranking)
    assert headers(ranking, ranking[:2], coverage_depth=18) == expected
    assert headers(ranking, ranking[:2], coverage_depth=18, exit=going_on) == expected


def test_section_6_headers_at_the_limit():
    result = headers([], [], coverage_depth=0, completeness=0.74, exit=exit_of(window_count=5))
    assert result["CRP-Context-Continuation-Status"] == "limit-reached"
    assert result["CRP-Quality-Completeness"] == "0.74"
    assert "CRP-Context-Mode" not in result


def test_section_6_headers_of_an_exhausted_store():
    envelope = [scored(novelty=0.20, overlap=2)]
    result = headers(envelope, envelope, coverage_depth=4, completeness=0.5, exit=exit_of(envelope=envelope))
    assert result == {
        "CRP-Context-Coverage-Score": "0.20",
        "CRP-Context-Coverage-Depth": "4",
        "CRP-Context-NGram-Guard-Activations": "1",
        "CRP-Context-Continuation-Status": "ckf-exhausted",
        "CRP-Context-Mode": "ckf-exhausted",
        "CRP-Onboarding-Hint": "ingest-more-documents-for-continued-quality",
    }


@pytest.mark.parametrize(
    ("options", "status"),
    [({"report": Report(1.0)}, "task-complete"), ({"safety_budget": 0.0}, "safety-budget-depleted")],
)
def test_section_8_4_other_exits_have_only_their_status(options, status):
    assert headers([], [], coverage_depth=2, exit=exit_of(**options)) == {
        "CRP-Context-Coverage-Score": "0.00",
        "CRP-Context-Coverage-Depth": "2",
        "CRP-Context-NGram-Guard-Activations": "0",
        "CRP-Context-Continuation-Status": status,
    }


def test_r39_exhaustion_is_told_whatever_else_is_true():
    also = exit_of(window_count=5, envelope=[])
    assert (also.reason, also.also) == ("limit-reached", ("ckf-exhausted",))
    result = headers([], [], coverage_depth=2, completeness=0.5, exit=also)
    assert result == {
        "CRP-Context-Coverage-Score": "0.00",
        "CRP-Context-Coverage-Depth": "2",
        "CRP-Context-NGram-Guard-Activations": "0",
        "CRP-Context-Continuation-Status": "limit-reached",
        "CRP-Quality-Completeness": "0.50",
        "CRP-Context-Mode": "ckf-exhausted",
        "CRP-Onboarding-Hint": "ingest-more-documents-for-continued-quality",
    }


def test_r39_an_envelope_that_nothing_fits_into_is_an_error():
    ranking = [scored(), scored()]
    with pytest.raises(ValueError, match="no fact fits into the envelope, 2 passed the gate"):
        check_fits(ranking, [])
    check_fits(ranking, ranking[:1])
    check_fits([], [])


def test_section_8_1_coverage_score_is_the_minimum_of_facts():
    assert min_novelty([scored(novelty=0.9), scored(novelty=0.3), scored(novelty=2.0)]) == 0.3
    assert min_novelty([scored(novelty=2.0)]) == 1.0
    assert min_novelty([]) is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1.0, "healthy"),
        (0.71, "healthy"),
        (0.70, "moderate"),
        (0.40, "moderate"),
        (0.39, "low"),
        (0.20, "low"),
    ],
)
def test_section_8_1_bands(value, name):
    assert band(value) == name


def test_r35_guarantee_holds_above_forty_percent_and_never_without_facts():
    assert guarantee_holds([scored(novelty=0.41)])
    assert not guarantee_holds([scored(novelty=0.40)])
    assert not guarantee_holds([scored(), scored(novelty=0.2)])
    assert not guarantee_holds([])
