"""The ledger's rules: what is granted, refused, counted, given back, forgotten; what is kept and what is not."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from entroprefill_rag.errors import ConfigError, LedgerError
from entroprefill_rag.ledger import Grant, Refused, ReuseLedger, reuse


@pytest.fixture(params=["memory", "file"])
def ledger(request, tmp_path):
    with ReuseLedger() if request.param == "memory" else ReuseLedger.open(tmp_path / "ledger.db") as made:
        yield made


def ask(ledger, seed, *, prompt="p", configuration="c", fresh=False):
    return ledger.reserve(prompt, configuration, seed, fresh=fresh)


def use(ledger, seed, **more):
    grant = ask(ledger, seed, **more)
    assert isinstance(grant, Grant), grant
    grant.spend()
    return grant


def test_attempts_at_a_prompt_are_counted_and_other_prompts_are_not(ledger):
    assert [use(ledger, seed).attempt for seed in range(4)] == [1, 2, 3, 4]
    assert use(ledger, 0, prompt="other").attempt == 1
    assert ledger.remembered == 2


def test_the_same_seed_and_configuration_is_a_replay_that_counts_as_nothing(ledger):
    first = use(ledger, 7)
    again = [use(ledger, 7) for _ in range(3)]
    assert not first.replay
    assert [(grant.replay, grant.attempt) for grant in again] == [(True, 1)] * 3
    assert ask(ledger, 8).attempt == 2


def test_a_seed_that_was_seen_is_refused_with_anything_else_changed(ledger):
    use(ledger, 1)
    use(ledger, 7)
    assert ask(ledger, 7, configuration="d") == Refused("changed", 2)
    assert isinstance(ask(ledger, 7), Grant)


def test_an_attempt_whose_draws_were_not_read_is_given_back(ledger):
    ask(ledger, 7).release()
    assert ledger.remembered == 0
    grant = use(ledger, 7, configuration="d")
    assert (grant.attempt, grant.replay) == (1, False)
    grant.release()
    assert ask(ledger, 7, configuration="c") == Refused("changed", 1)


def test_an_attempt_that_is_lost_is_given_back(ledger):
    grant = ask(ledger, 7)
    assert ask(ledger, 7, configuration="d") == Refused("under_way", 1)
    del grant
    gc.collect()
    assert ask(ledger, 7, configuration="d").attempt == 1


def test_a_grant_is_spent_or_given_back_once(ledger):
    one, twin = ask(ledger, 7), ask(ledger, 7)
    one.release()
    one.release()
    twin.spend()
    twin.spend()
    twin.release()
    assert ask(ledger, 7, configuration="d") == Refused("changed", 1)


def test_runs_at_the_same_time_with_one_seed_and_configuration_are_one_attempt(ledger):
    one, twin = ask(ledger, 7), ask(ledger, 7)
    assert (one.attempt, twin.attempt) == (1, 1)
    one.spend()
    twin.release()
    assert ask(ledger, 8).attempt == 2


def test_a_number_is_never_below_that_of_an_attempt_that_counts(ledger):
    first, second = ask(ledger, 1), ask(ledger, 2)
    second.spend()
    first.release()
    # 1 is free, but one attempt has been made: the next is no first attempt.
    assert ask(ledger, 3).attempt == 3


def test_threads_get_different_attempts(ledger):
    with ThreadPoolExecutor(8) as pool:
        grants = list(pool.map(lambda seed: ask(ledger, seed), range(80)))
        list(pool.map(lambda grant: grant.spend() if grant.attempt % 2 else grant.release(), grants))
    assert sorted(grant.attempt for grant in grants) == list(range(1, 81))
    assert ask(ledger, 99).attempt == 80


def test_the_prompt_used_longest_ago_is_forgotten_first():
    ledger = ReuseLedger(prompts=3)
    for prompt in ("a", "b", "c"):
        use(ledger, 7, prompt=prompt)
    use(ledger, 7, prompt="a")
    use(ledger, 7, prompt="d")
    assert ledger.remembered == 3
    assert ask(ledger, 7, prompt="a", configuration="x") == Refused("changed", 1)
    assert ask(ledger, 7, prompt="c", configuration="x") == Refused("changed", 1)
    assert ask(ledger, 7, prompt="b", configuration="x").attempt == 1


def test_a_prompt_with_a_run_under_way_is_not_forgotten():
    ledger = ReuseLedger(prompts=2)
    grant = ask(ledger, 7, prompt="a")
    for index in range(5):
        use(ledger, 7, prompt=f"p{index}")
    grant.spend()
    assert ask(ledger, 7, prompt="a", configuration="x") == Refused("changed", 1)
    assert ledger.remembered == 2


def test_of_one_prompt_the_last_seeds_are_kept_and_all_attempts_counted(ledger, monkeypatch):
    monkeypatch.setattr(reuse, "SEEDS_PER_PROMPT", 5)
    for seed in range(12):
        use(ledger, seed, fresh=True)
    assert [type(ask(ledger, seed, configuration="d")) for seed in range(7, 12)] == [Refused] * 5
    # Whether an older seed, or one never used, was seen can no longer be told apart. A fresh one was not.
    assert ask(ledger, 3) == Refused("forgotten", 13)
    assert ask(ledger, 1000) == Refused("forgotten", 13)
    assert ask(ledger, 1000, fresh=True).attempt == 13
    assert ask(ledger, 11).replay


def test_a_reservation_of_a_process_that_died_expires_and_cannot_be_spent_then(ledger, monkeypatch):
    late = ask(ledger, 7)
    now = reuse.time.time()
    monkeypatch.setattr(reuse.time, "time", lambda: now + 25 * 3600)
    assert ask(ledger, 7, configuration="d").attempt == 1
    with pytest.raises(LedgerError, match="run again"):
        late.spend()


def test_a_closed_ledger_says_so(ledger):
    grant = ask(ledger, 7)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ask(ledger, 7)
    with pytest.raises(LedgerError, match="closed"):
        grant.spend()
    grant.release()


def test_a_ledger_remembers_at_least_one_prompt():
    with pytest.raises(ConfigError, match="prompts=0"):
        ReuseLedger(prompts=0)


def test_a_step_that_fails_changes_nothing(ledger):
    lost = ask(ledger, 1)
    lost.release()
    note = ask(ledger, 2)

    def fail():
        with ledger._transaction() as sql:
            sql.execute("DELETE FROM uses")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    note.spend()
    assert ask(ledger, 2).replay


class Model(RuleBasedStateMachine):
    """The ledger against its rules, written as a dictionary."""

    grants = Bundle("grants")

    def __init__(self):
        super().__init__()
        self.ledger = ReuseLedger()
        self.spent = {}  # prompt -> seed -> (configuration, attempt)
        self.open = {}  # prompt -> seed -> [configuration, attempt, holders]

    @rule(target=grants, prompt=st.sampled_from("pq"), configuration=st.sampled_from("cd"), seed=st.integers(0, 5))
    def reserve(self, prompt, configuration, seed):
        spent, open_ = self.spent.setdefault(prompt, {}), self.open.setdefault(prompt, {})
        answer = ask(self.ledger, seed, prompt=prompt, configuration=configuration)
        known = spent.get(seed) or open_.get(seed)
        if known is None:
            attempt = 1 + max([one[1] for one in (*spent.values(), *open_.values())], default=0)
            assert (answer.attempt, answer.replay) == (attempt, False)
            open_[seed] = [configuration, attempt, 1]
        elif known[0] != configuration:
            assert answer == Refused("changed" if seed in spent else "under_way", known[1])
            return multiple()
        else:
            assert (answer.attempt, answer.replay) == (known[1], seed in spent)
            if seed in open_:
                open_[seed][2] += 1
        return (prompt, seed, answer)

    @rule(held=consumes(grants), read=st.booleans())
    def end(self, held, read):
        prompt, seed, grant = held
        if read:
            grant.spend()
            if seed in self.open[prompt]:
                configuration, attempt, _ = self.open[prompt].pop(seed)
                self.spent[prompt][seed] = (configuration, attempt)
        else:
            grant.release()
            if seed in self.open[prompt]:
                self.open[prompt][seed][2] -= 1
                if not self.open[prompt][seed][2]:
                    del self.open[prompt][seed]

    @invariant()
    def no_two_seeds_share_an_attempt(self):
        for prompt, spent in self.spent.items():
            numbers = [one[1] for one in (*spent.values(), *self.open[prompt].values())]
            assert len(set(numbers)) == len(numbers)

    def teardown(self):
        self.ledger.close()


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_the_ledger_follows_its_rules = Model.TestCase
