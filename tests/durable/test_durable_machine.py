"""A durable store against a plain dict: two writers, reopening, refreshing, snapshots and compaction in between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

pytest.importorskip("lance", reason="needs the extra store")

from cdr_kernel.durable import DurableStore
from cdr_kernel.store import _expiry

DIM, MODEL = 4, "toy"
IDS = st.lists(st.sampled_from([f"f{i}" for i in range(8)]), min_size=1, max_size=4, unique=True)
WHO = st.integers(0, 1)
DAY = 86400 * 10**6
EXPIRES = st.sampled_from([None, None, -20, 0, 5, 30])  # days from now


class Facts(RuleBasedStateMachine):
    """model: {id: [text, tenant, quarantined, expires]}, in the order of sequence numbers for facts in rankings.

    numbers: by id, the sequence number that each fact was added with. days: what all clocks say; they may go back.
    looks: when an expiry looked at the clock.
    """

    @initialize()
    def begin(self):
        self.home = Path(tempfile.mkdtemp())
        self.path = self.home / "store"
        self.stores = [DurableStore.create(self.path, DIM, embedding_model=MODEL), DurableStore.open(self.path)]
        self.model, self.turn, self.days, self.looks = {}, 0, 100, []
        self.numbers = {}
        self.real_clock, _expiry.now = _expiry.now, lambda: self.days * DAY

    def past(self, id):
        """Whether a fact is past its time."""
        moment = self.model[id][3]
        return moment is not None and moment <= self.days

    def there(self, id):
        """Whether a fact counts as in the store."""
        return id in self.model and (self.model[id][2] or not self.past(id))

    def expired(self, grace):
        """How many facts an expiry deletes now."""
        self.looks = [look for look in self.looks if look <= self.days]
        sure = [self.days] if grace == 0 else [look for look in self.looks if look <= self.days - 7]
        if grace:
            self.looks.append(self.days)
        gone = [i for i, (*_, moment) in self.model.items() if moment is not None and sure and moment <= max(sure)]
        for i in gone:
            del self.model[i]
        return len(gone)

    def teardown(self):
        _expiry.now = getattr(self, "real_clock", _expiry.now)
        for store in getattr(self, "stores", ()):
            store.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def put(self, verb, who, ids, tenant, expires):
        self.turn += 1
        texts = [f"{i} in turn {self.turn}" for i in ids]
        rows = np.arange(1, 1 + DIM * len(ids)).reshape(-1, DIM) + self.turn
        moment = self.days + expires if expires is not None else None
        getattr(self.stores[who], verb)(
            ids,
            texts,
            rows,
            attributes={"tenant": [tenant] * len(ids)},
            expires_at=[None if moment is None else moment * 86400] * len(ids),
        )
        for i, text in zip(ids, texts, strict=True):
            held = self.model.pop(i, [None, None, False])[2]  # one that is past its time is replaced whole
            self.model[i] = [text, tenant, held, moment]

    @rule(who=WHO, ids=IDS, tenant=st.sampled_from(["x", "y", None]), expires=EXPIRES)
    def add(self, who, ids, tenant, expires):
        if any(map(self.there, ids)):
            with pytest.raises(ValueError, match="in the store already"):
                self.put("add", who, ids, tenant, expires)
        else:
            self.put("add", who, ids, tenant, expires)

    @rule(who=WHO, ids=IDS, tenant=st.sampled_from(["x", "y", None]), expires=EXPIRES)
    def upsert(self, who, ids, tenant, expires):
        self.put("upsert", who, ids, tenant, expires)

    @rule(who=WHO, ids=IDS)
    def remove(self, who, ids):
        if all(i in self.model for i in ids):
            assert self.stores[who].remove(ids) == len(ids)
        else:
            with pytest.raises(KeyError):
                self.stores[who].remove(ids)
            assert self.stores[who].remove(ids, missing="ignore") == sum(i in self.model for i in ids)
        for i in ids:
            self.model.pop(i, None)

    @rule(who=WHO, ids=IDS)
    def quarantine(self, who, ids):
        if any(i not in self.model for i in ids):
            with pytest.raises(KeyError):
                self.stores[who].quarantine(ids)
            return
        self.stores[who].quarantine(ids)
        for i in ids:
            self.model[i][2] = True

    @rule(who=WHO, ids=IDS)
    def release(self, who, ids):
        if any(i not in self.model or not self.model[i][2] for i in ids):
            with pytest.raises(KeyError):
                self.stores[who].release(ids)
            return
        self.stores[who].release(ids)
        for i in ids:
            text, tenant, _, moment = self.model.pop(i)
            self.model[i] = [text, tenant, False, moment]

    @rule(days=st.integers(-40, 40))
    def clocks_jump(self, days):
        self.days = max(1, self.days + days)

    @rule(who=WHO, later=st.integers(0, 9), grace=st.sampled_from([None, None, 0]))
    def expire(self, who, later, grace):
        self.days += later
        found = self.stores[who].expire() if grace is None else self.stores[who].expire(grace=grace)
        assert found == self.expired(grace is None)

    @rule(who=WHO)
    def reopen(self, who):
        self.stores[who].close()
        self.stores[who] = DurableStore.open(self.path, verify=True)
        assert self.stores[who].verify() is None

    @rule(who=WHO)
    def reopen_without_a_snapshot(self, who):
        self.stores[who].close()
        shutil.rmtree(self.path / "snapshot", ignore_errors=True)
        self.stores[who] = DurableStore.open(self.path)

    @rule(who=WHO)
    def snapshot(self, who):
        self.stores[who].snapshot()

    @rule(who=WHO)
    def compact(self, who):
        self.stores[who].compact()
        self.expired(True)

    @rule(who=WHO)
    def carry_over(self, who):
        """Through one file into another folder, which takes the place of the first."""
        self.stores[who].refresh()
        self.stores[who].export(self.home / "facts.safetensors")
        for store in self.stores:
            store.close()
        shutil.rmtree(self.path)
        self.stores = [DurableStore.from_export(self.home / "facts.safetensors", self.path)]
        self.stores.append(DurableStore.open(self.path))
        self.looks = []

    @invariant()
    def both_hold_what_was_acknowledged(self):
        live = [(i, *row[:2]) for i, row in self.model.items() if not row[2] and not self.past(i)]
        held = {i for i, row in self.model.items() if row[2]}
        for store in self.stores:
            store.refresh()
            facts = store.facts.get(store.facts.ids)
            assert [(fact.id, fact.text, fact.attributes.get("tenant")) for fact in facts] == live
            assert set(store.quarantined()) == held
            assert set(store.facts.withheld) == {i for i in self.model if i not in held and self.past(i)}
            assert all("_expires_at" not in fact.attributes for fact in facts)
            ids = list(self.model)
            numbers = store.facts.numbers_of(ids)
            assert store.facts.ids_of(numbers) == ids
            self.numbers = {i: self.numbers.get(i, n) for i, n in zip(ids, numbers.tolist(), strict=True)}
            assert list(self.numbers.values()) == numbers.tolist()  # upsert, quarantine and release keep them
        assert self.stores[0].version == self.stores[1].version
        first, second = (store.facts.view() for store in self.stores)
        np.testing.assert_array_equal(first.sequence[first.alive], second.sequence[second.alive])
        np.testing.assert_array_equal(first.embeddings[first.alive], second.embeddings[second.alive])


checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
Facts.TestCase.settings = settings(
    max_examples=12, stateful_step_count=20, deadline=None, suppress_health_check=checks, derandomize=True
)
TestFacts = Facts.TestCase


@pytest.mark.slow
def test_many_more_histories():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Facts, settings=settings(Facts.TestCase.settings, max_examples=300, stateful_step_count=40)
    )
