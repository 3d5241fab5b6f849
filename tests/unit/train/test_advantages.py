"""One baseline value per session over trainable sessions; a trace's advantage is its own reward against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_kit import group, member, trace

from polar_train import Member, collate, group_advantages, microbatches, session_advantages


def test_the_leave_one_out_reference() -> None:
    gains = group_advantages(group(member("A", [2, 4]), member("B", [10])))
    assert gains.by_trace == {"A/0": -8.0, "A/1": -6.0, "B/0": 7.0}
    assert gains.baselines == {"A": 10.0, "B": 3.0}
    assert not gains.singleton and not gains.flat


def test_a_failed_session_takes_no_part_in_the_baseline() -> None:
    lost = member("C", [100.0], trainable=False)
    gains = group_advantages(group(member("A", [2, 4]), member("B", [10]), lost))
    assert gains.by_trace == {"A/0": -8.0, "A/1": -6.0, "B/0": 7.0}


def test_one_trainable_session_has_advantage_zero_and_is_counted() -> None:
    """T62."""
    gains = group_advantages(group(member("A", [5.0]), member("B", [1.0], trainable=False)))
    assert gains.by_trace == {"A/0": 0.0} and gains.singleton


def test_a_trainable_session_without_a_trace_still_counts_in_the_baseline() -> None:
    gains = group_advantages(group(member("A", [4.0]), member("B", [], reward=2.0)))
    assert gains.by_trace == {"A/0": 2.0}


def test_sub_agents_share_their_sessions_reward_and_baseline_unless_roles_are_groups_of_their_own() -> None:
    """Group = (run, build, task, agent_role): B never ran the helper, so A's and C's are compared with each other."""
    helpers = {s: replace(trace(s, 1, reward=r), agent_role="helper") for s, r in (("A", 8.0), ("C", 2.0))}
    members = [member("A", [8.0]), member("B", [5.0]), member("C", [2.0])]
    members = [replace(m, traces=(*m.traces, *[t for s, t in helpers.items() if s == m.session])) for m in members]
    whole = group(*members)
    shared = group_advantages(whole)
    assert shared.by_trace["A/0"] == shared.by_trace["A/1"] == 4.5
    assert whole.roles == ("main", "helper") and whole.agent_role == ""
    own = whole.of_role("helper")
    assert [(m.session, m.trainable, m.reason) for m in own.members] == [
        ("A", True, ""), ("B", False, "no_traces_of_role"), ("C", True, ""),
    ]  # fmt: skip
    assert group_advantages(own).by_trace == {"A/1": 6.0, "C/1": -6.0}
    assert group_advantages(whole.of_role("main")).by_trace == {"A/0": 4.5, "B/0": 0.0, "C/0": -4.5}
    assert (own.agent_role, own.action_tokens) == ("helper", 6)


def test_a_role_that_one_session_ran_is_a_singleton_and_counted() -> None:
    """T62."""
    helper = replace(trace("A", 1, reward=8.0), agent_role="helper")
    first = replace(member("A", [8.0]), traces=(trace("A", 0, reward=8.0), helper))
    gains = group_advantages(group(first, member("B", [0.0])).of_role("helper"))
    assert gains.by_trace == {"A/1": 0.0} and gains.singleton


def test_a_session_whose_own_agent_has_no_trace_keeps_its_reward_in_the_main_group() -> None:
    bare = Member("B", "passed", 2.0, True, "", (replace(trace("B", 0, reward=2.0), agent_role="helper"),))
    assert group_advantages(group(member("A", [4.0]), bare).of_role("main")).by_trace == {"A/0": 2.0}


def test_equal_rewards_are_flat() -> None:
    gains = group_advantages(group(member("A", [1.0]), member("B", [1.0])))
    assert gains.flat and set(gains.by_trace.values()) == {0.0}


def test_a_long_session_counts_once() -> None:
    """A hundred traces of one failed session aren't a hundred tries."""
    gains = group_advantages(group(member("A", [0.0] * 100), member("B", [1.0]), member("C", [1.0])), baseline="mean")
    assert gains.by_trace["B/0"] == pytest.approx(1 / 3)
    assert gains.by_trace["A/7"] == pytest.approx(-2 / 3)


REWARDS = st.dictionaries(
    st.sampled_from("ABCDEF"), st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=2, max_size=6
)


@given(REWARDS)
def test_session_means_of_advantages_sum_to_zero(rewards: dict[str, list[float]]) -> None:
    for baseline in ("leave_one_out", "mean"):
        found, _, _, _ = session_advantages(rewards, baseline=baseline)  # type: ignore[arg-type]
        assert sum(float(np.mean(some)) for some in found.values()) == pytest.approx(0.0, abs=1e-6)


@given(REWARDS)
def test_normalised_advantages_have_unit_spread(rewards: dict[str, list[float]]) -> None:
    found, _, _, _ = session_advantages(rewards, baseline="mean", normalise=True)
    spread = float(np.std([np.mean(some) for some in found.values()]))
    values = float(np.std([np.mean(some) for some in rewards.values()]))
    assert spread == pytest.approx(values / (values + 1e-6), abs=1e-6)


def test_every_trained_token_of_both_steps_gets_the_advantage() -> None:
    """T60: steps of different lengths."""
    traces = [trace("A", 0, mask="110011"), trace("B", 0, mask="1")]
    batch = collate(traces, {"A/0": 1.0, "B/0": 1.0}, pad_id=7, pad_to=4)
    assert batch.input_ids.shape == (2, 8)
    assert batch.input_ids[0].tolist() == [1, 2, 10, 11, 12, 13, 14, 15]
    assert batch.input_ids[1].tolist() == [1, 2, 10, 7, 7, 7, 7, 7]
    assert batch.attention_mask.sum(1).tolist() == [8, 3]
    assert batch.advantages[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert batch.advantages[1].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert (batch.advantages == batch.loss_mask).all()
    assert batch.logprobs[0].tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.5, -0.5]
    assert (batch.weights * batch.loss_mask).sum() == pytest.approx(1.0)
    assert batch.weights[0, 2] == pytest.approx(1 / 8) and batch.weights[1, 2] == pytest.approx(1 / 2)


def test_weights_may_come_from_a_larger_update() -> None:
    batch = collate([trace("A", 0)], {"A/0": 2.0}, weights=[0.25])
    assert batch.weights.tolist() == [[0, 0, 0.25, 0.25, 0.25]]
    assert collate([], {}).input_ids.shape == (0, 0)


def test_microbatches_hold_every_trace_once_within_the_bound() -> None:
    traces = [trace("A", n, response=n + 1) for n in range(20)]
    batches = microbatches(traces, 40)
    assert sorted(t.trace_id for b in batches for t in b) == sorted(t.trace_id for t in traces)
    assert all(len(b) * max(t.length for t in b) <= 40 for b in batches)
    assert [len(b) for b in microbatches([trace("A", 0, response=99)], 40)] == [1]
