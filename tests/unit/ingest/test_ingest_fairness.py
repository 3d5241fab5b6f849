"""Release: who goes first, how much of each, and when nothing does."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ingest_log import MemoryLog

from polar_common.events import PolicyActivated, PolicyPublished, TrainerConsumed, TrainerDemanded
from polar_ingest.domain import Rules, release
from polar_ingest.fairness import FairQueue, weight


def filled(runs: dict[str, tuple[int, int]], tasks: int = 1) -> FairQueue:
    """Run → (sessions, priority); each run's sessions are spread over `tasks` tasks."""
    queue = FairQueue()
    for order, (run, (count, priority)) in enumerate(runs.items()):
        for i in range(count):
            number = i * tasks // count
            queue.push(run, f"{run}-{number}", f"{run}-{number}-{i}", priority=priority, order=order * 1000 + number)
    return queue


def runs_of(sessions: list[str]) -> Counter[str]:
    return Counter(s.partition("-")[0] for s in sessions)


def everybody(_: str) -> bool:
    return True


def test_equal_runs_share_equally_whatever_their_size() -> None:
    queue = filled({"big": (1000, 0), "small": (30, 0), "late": (30, 0)})
    assert runs_of(queue.take(60, is_waiting=everybody)) == {"big": 20, "small": 20, "late": 20}


def test_ten_steps_of_priority_are_twice_the_share() -> None:
    assert weight(10) == 2 * weight(0)
    queue = filled({"a": (1000, 10), "b": (1000, 0), "c": (1000, -10)})
    assert runs_of(queue.take(70, is_waiting=everybody)) == {"a": 40, "b": 20, "c": 10}


def test_shares_hold_over_many_small_helpings() -> None:
    queue = filled({"a": (500, 10), "b": (500, 0)})
    taken = [s for _ in range(90) for s in queue.take(1, is_waiting=everybody)]
    assert runs_of(taken) == {"a": 60, "b": 30}


def test_an_idle_run_saves_no_credit() -> None:
    queue = filled({"a": (10, 0), "b": (1000, 0)})
    queue.take(500, is_waiting=everybody)
    for i in range(100):
        queue.push("a", "a-9", f"a-9-{i}", priority=0, order=9)
    assert runs_of(queue.take(20, is_waiting=everybody)) == {"a": 10, "b": 10}


def test_a_fraction_of_a_share_isnt_lost() -> None:
    """Five steps of priority are 1.41 times the share."""
    queue = filled({"a": (500, 5), "b": (500, 0)})
    assert runs_of(queue.take(241, is_waiting=everybody)) in ({"a": 141, "b": 100}, {"a": 142, "b": 99})


def test_newcomers_dont_overtake_who_waits() -> None:
    queue = filled({"a": (100, 0)})
    taken: list[str] = []
    for i in range(20):
        queue.push(f"new{i}", f"new{i}-0", f"new{i}-0-0", priority=0, order=1000 + i)
        taken += queue.take(1, is_waiting=everybody)
    assert [n for n, session in enumerate(taken) if session.startswith("a-")] == [0, 2, 5, 9, 14]


def test_runs_that_have_nothing_to_give_hold_up_no_other() -> None:
    """Neither those whose sessions are all gone nor those whose groups may not open, wherever they stand."""
    for many in (1, 3):
        queue = FairQueue()
        for i in range(many):
            queue.push(f"gone{i}", f"gone{i}-0", f"gone{i}-0-0", priority=0, order=i)
        for i in range(many):
            queue.push(f"held{i}", f"held{i}-0", f"held{i}-0-0", priority=0, order=10 + i)
        for i in range(10):
            queue.push("a", "a-0", f"a-0-{i}", priority=0, order=99)
        some = queue.take(10, is_waiting=lambda s: "gone" not in s, may_open=lambda task: "held" not in task)
        assert runs_of(some) == {"a": 10}


def test_a_run_that_may_not_go_on_saves_no_credit() -> None:
    """Beside a run of next to no weight, another's turn is long; what is left of it when it is held is lost."""
    queue = FairQueue()
    for i in range(100):
        queue.push("a", f"a-{i}", f"a-{i}-0", priority=0, order=i)
    queue.push("light", "light-0", "light-0-0", priority=-60, order=1000)
    assert queue.take(1, is_waiting=everybody, may_open=lambda task: task == "a-0") == ["a-0-0"]
    assert queue.take(1, is_waiting=everybody, may_open=lambda task: task == "light-0") == ["light-0-0"]
    for i in range(100):
        queue.push("b", f"b-{i}", f"b-{i}-0", priority=0, order=2000 + i)
    assert runs_of(queue.take(20, is_waiting=everybody)) == {"a": 10, "b": 10}


def test_what_couldnt_be_released_waits_again() -> None:
    queue = FairQueue()
    queue.push("r", "x", "x0", priority=0, order=2)
    assert queue.take(9, is_waiting=everybody) == ["x0"]
    assert queue.take(9, is_waiting=everybody) == []
    queue.push("r", "x", "x0", priority=0, order=2, opened=True)
    queue.push("r", "w", "w0", priority=0, order=1)
    assert queue.take(9, is_waiting=everybody, may_open=lambda task: task == "w") == ["x0", "w0"]


def test_an_urgent_task_goes_before_what_is_left_of_an_opened_one() -> None:
    queue = FairQueue()
    for i in range(2):
        queue.push("r", "x", f"x{i}", priority=0, order=1)
    assert queue.take(1, is_waiting=everybody) == ["x0"]
    queue.push("r", "y", "y0", priority=1, order=2)
    assert queue.take(2, is_waiting=everybody) == ["y0", "x1"]


def test_within_a_run_urgent_tasks_first_and_opened_groups_are_finished() -> None:
    queue = FairQueue()
    for task, priority, order in (("x", 0, 1), ("y", 0, 2), ("z", 5, 3)):
        for i in range(2):
            queue.push("r", task, f"{task}{i}", priority=priority, order=order)
    assert queue.take(3, is_waiting=everybody) == ["z0", "z1", "x0"]
    queue.push("r", "w", "w0", priority=0, order=0)
    assert queue.take(9, is_waiting=everybody) == ["x1", "w0", "y0", "y1"]


def test_a_group_that_may_not_open_doesnt_hold_up_an_opened_one() -> None:
    queue = FairQueue()
    queue.push("r", "low", "low0", priority=0, order=1)
    queue.push("r", "low", "low1", priority=0, order=1)
    assert queue.take(1, is_waiting=everybody) == ["low0"]
    queue.push("r", "high", "high0", priority=9, order=2)
    assert queue.take(9, is_waiting=everybody, may_open=lambda _: False) == ["low1"]
    assert queue.take(9, is_waiting=everybody) == ["high0"]


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 30), st.integers(-100, 100)), min_size=1),
    st.lists(st.integers(1, 20), max_size=20),
    st.sets(st.integers(0, 29)),
)
def test_everyone_is_released_once(runs: dict[str, tuple[int, int]], helpings: list[int], gone: set[int]) -> None:
    queue = filled(runs, tasks=3)

    def waiting(session: str) -> bool:
        return int(session.rpartition("-")[2]) not in gone

    taken: list[str] = []
    for count in [*helpings, 10_000]:
        some = queue.take(count, is_waiting=waiting)
        assert len(some) <= count
        taken += some
    expected = Counter({r: sum(i not in gone for i in range(n)) for r, (n, _) in runs.items()})
    assert runs_of(taken) == +expected
    assert len(set(taken)) == len(taken)
    assert queue.take(1, is_waiting=waiting) == []


# -- the scheduler's gates


def released(log: MemoryLog) -> list[str]:
    found = release(log.world, log.rules)
    for session in found:
        log.queue(log.world.sessions[session])
    return found


def test_no_more_than_release_ahead_are_unclaimed_in_a_class() -> None:
    log = MemoryLog(Rules(release_ahead=4))
    here = log.accept("a", samples=10)
    log.accept("b", samples=10, runtime={"kind": "docker"})
    assert len(released(log)) == 8
    assert released(log) == []
    log.claim(log.session(here))
    assert len(released(log)) == 1


def test_a_retry_counts_as_unclaimed() -> None:
    log = MemoryLog(Rules(release_ahead=2, retry_delay_s=0))
    task = log.accept("a", samples=5)
    released(log)
    for session in (log.session(task, 0), log.session(task, 1)):
        log.claim(session)
        log.lose(session)
        log.end(session)
    assert released(log) == []


def test_full_postrun_stops_release_and_infra_faults_dont_count() -> None:
    log = MemoryLog(Rules(release_ahead=100, postrun_bound=2, retry_delay_s=5))
    task = log.accept("a", samples=4)
    first, second, third, _ = (log.session(task, i) for i in range(4))
    released(log)
    log.accept("b", samples=2)
    for session in (first, second, third):
        log.claim(session)
    log.exit(third, fault="infra")
    log.exit(first)
    assert len(released(log)) == 2
    log.accept("c", samples=2)
    log.exit(second)
    assert released(log) == []
    log.evaluate(first)
    log.end(first)
    assert len(released(log)) == 2


def test_a_tasks_priority_counts_among_runs_and_within_one() -> None:
    log = MemoryLog(Rules(release_ahead=6))
    log.accept("calm", run="a", samples=9)
    urgent = log.accept("urgent", run="a", samples=2, priority=10)
    log.accept("other", run="b", samples=9)
    some = released(log)
    assert some[:2] == list(urgent.sessions)
    assert Counter(log.world.tasks[log.world.sessions[s].task].run for s in some) == {"a": 4, "b": 2}


def test_a_session_that_was_cancelled_or_poisoned_is_never_released() -> None:
    log = MemoryLog()
    task = log.accept("a", samples=3)
    log.cancel(log.session(task, 0))
    log.world.poison(task.sessions[1], "a hole")
    assert released(log) == [task.sessions[2]]


def test_a_group_opened_before_a_restart_isnt_held_up_by_one_that_may_not_open() -> None:
    """A scheduler that folds the log, or follows another's decisions, knows which groups are open."""
    log = MemoryLog(Rules(obey_demand=True, release_ahead=1))
    low = log.accept("low", samples=3)
    demand(log, 0, 1)
    assert released(log) == [low.sessions[0]]
    log.accept("high", priority=9)
    log.claim(log.session(low))
    again = MemoryLog(log.rules)
    for event in log.events:
        again.put(event)
    assert released(again) == [low.sessions[1]]
    again.claim(again.session(low, 1))
    [last] = release(again.world, again.rules)
    # It couldn't be published.
    again.world.wait(again.world.sessions[last])
    assert released(again) == [low.sessions[2]]


def demand(log: MemoryLog, number: int, groups: int, trainer: str = "t", run: str = "", staleness: int = 1) -> None:
    log.put(
        TrainerDemanded(
            segment="s1", run=run, trainer=trainer, epoch=0, number=number, groups=groups, staleness=staleness
        )
    )


def finish(log: MemoryLog, task_id: str) -> None:
    task = log.world.tasks[task_id]
    for name in task.sessions:
        session = log.world.sessions[name]
        log.claim(session)
        log.exit(session)
        log.evaluate(session)
        log.end(session)
        log.build(session)
    log.close(task)


def test_demand_bounds_the_groups_in_flight() -> None:
    log = MemoryLog(Rules(obey_demand=True))
    tasks = [log.accept(f"t{i}", samples=2).id for i in range(6)]
    assert released(log) == []
    demand(log, 0, 2)
    assert len(released(log)) == 4
    assert log.world.open_groups == 2
    finish(log, tasks[0])
    assert released(log) == [], "closed, and neither consumed nor asked for anew"
    log.put(
        TrainerConsumed(
            segment="s1", trainer="t", epoch=0, step=0, build="live", policy_version="v", policy_seq=0,
            groups=(tasks[0],), traces=(),
        )
    )  # fmt: skip
    assert len(released(log)) == 2
    finish(log, tasks[1])
    assert released(log) == []
    demand(log, 1, 2)
    assert len(released(log)) == 2


def test_a_trainers_last_demand_counts_and_trainers_add_up() -> None:
    """Last in the log: one that starts anew, or returns to a checkpoint, may number its demands from 0 again."""
    log = MemoryLog(Rules(obey_demand=True))
    for i in range(9):
        log.accept(f"t{i}")
    demand(log, 5, 9)
    demand(log, 0, 2)
    demand(log, 0, 1, trainer="other")
    demand(log, 0, -1, trainer="odd")
    assert len(released(log)) == 3


def test_a_trainer_that_stops_reading_neither_fills_the_log_nor_holds_up_another_run() -> None:
    log = MemoryLog(Rules(obey_demand=True))
    for run in ("a", "b"):
        for i in range(20):
            log.accept(f"t{i}", run=run)
        demand(log, 0, 2, trainer=run, run=run)
    opened: Counter[str] = Counter()
    for step in range(6):
        for session in released(log):
            task = log.world.sessions[session].task
            opened[log.world.tasks[task].run] += 1
            finish(log, task)
        # `b` has demanded once and reads nothing.
        demand(log, step + 1, 2, trainer="a", run="a")
    assert opened == {"a": 12, "b": 2}


def test_a_trainer_of_all_runs_shares_what_it_wants() -> None:
    log = MemoryLog(Rules(obey_demand=True))
    for run in ("a", "b"):
        for i in range(9):
            log.accept(f"t{i}", run=run)
    demand(log, 0, 3, trainer="a", run="a")
    demand(log, 0, 2, trainer="all")
    assert len(released(log)) == 5


def publish(log: MemoryLog, number: int, trainer: str = "t") -> None:
    version = f"{trainer}-{number}"
    log.put(PolicyPublished(segment="s1", version=version, policy_seq=number, model="m", weights="w", trainer=trainer))


def activate(log: MemoryLog, number: int, trainer: str = "t", replica: str = "r0") -> None:
    log.put(PolicyActivated(segment="s1", version=f"{trainer}-{number}", policy_seq=number, replica=replica))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_nothing_opens_while_the_engines_lag_further_behind_than_a_trainer_bears(staleness: int) -> None:
    """What opened then would be too old from its first token on. One engine that keeps up is enough."""
    log = MemoryLog(Rules(obey_demand=True))
    for i in range(9):
        log.accept(f"t{i}", samples=2)
    demand(log, 0, 1, staleness=staleness)
    for number in range(1, staleness + 1):
        publish(log, number)
    assert len(released(log)) == 2
    demand(log, 1, 2, staleness=staleness)
    publish(log, staleness + 1)
    assert released(log) == []
    activate(log, 1)
    assert len(released(log)) == 2
    publish(log, staleness + 2)
    activate(log, 1, replica="r1")
    demand(log, 2, 3, staleness=staleness)
    assert released(log) == []
    demand(log, 3, 3, staleness=staleness + 1)
    assert len(released(log)) == 2


def test_engines_that_lag_behind_one_trainer_hold_up_no_other_and_no_group_that_is_open() -> None:
    log = MemoryLog(Rules(obey_demand=True, release_ahead=3))
    big, *_ = [log.accept(f"t{i}", run="a", samples=5) for i in range(2)]
    demand(log, 0, 1, trainer="a", run="a")
    for session in released(log):
        log.claim(log.world.sessions[session])
    publish(log, 5, trainer="a")
    assert {log.world.sessions[s].task for s in released(log)} == {big.id}
    demand(log, 1, 9, trainer="a", run="a")
    other = log.accept("other", run="b")
    demand(log, 0, 1, trainer="b", run="b")
    activate(log, 5, trainer="nobody")
    assert released(log) == list(other.sessions)


@pytest.mark.parametrize("obey", [False, True])
def test_demand_is_obeyed_only_if_asked(obey: bool) -> None:
    log = MemoryLog(Rules(obey_demand=obey))
    log.accept("a", samples=3)
    assert len(released(log)) == (0 if obey else 3)
