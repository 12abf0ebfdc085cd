"""Each alarm fires on a series with its fault, once, and never on a healthy run."""

import json
import random

import pytest

from grpo_jax import monitor
from grpo_jax.alarms import GAP
from grpo_jax.monitor import Monitor
from grpo_jax.tool_alarms import verdict

TRAJECTORIES = 64


def healthy(step, noise):
    """A run that learns: reward up, calls slightly down, as a sound one may go."""
    return {
        "reward": 0.2 + 0.002 * step + noise.gauss(0, 0.03),
        "frac_reward_zero_std": min(max(0.15 + noise.gauss(0, 0.1), 0), 1),
        "frac_advantage_zero": 0.1,
        "grad_norm": 0.4 * noise.lognormvariate(0, 0.5),
        "update/skipped": 0.0,
        "nonfinite_tokens": 0.0,
        "tools/call_rate": min(0.85 - 0.0002 * step + noise.gauss(0, 0.04), 1),
        "tools/malformed_frequency": abs(noise.gauss(0.04, 0.03)),
        "tools/invalid_frequency": abs(noise.gauss(0.02, 0.02)),
        GAP: abs(noise.gauss(0.008, 0.002)),
        "entropy": 0.6 + noise.gauss(0, 0.05),
        "reward_gap": max(noise.gauss(0.0, 0.05), 0.0),
        "frac_reward_best": 0.3,
        "frac_group_identical": 0.05,
        "tools/in_prompt": 1.0,
        "interaction/call_rate": min(0.9 + noise.gauss(0, 0.04), 1),
        "lld/nll_correct_by_turn/1": 0.5 + noise.gauss(0, 0.05),
        "lld/nll_correct_by_turn/2": 0.6 + noise.gauss(0, 0.05),
        "lld/nll_correct_by_turn/3": 0.6 + noise.gauss(0, 0.08),
        "ratio/max_by_position/1": 1.3 + abs(noise.gauss(0, 0.2)),
        "ratio/max_by_position/1024": 2.5 + abs(noise.gauss(0, 0.5)),
        "category/easy": 0.6 + 0.001 * step + noise.gauss(0, 0.1),
        "category/hard": 0.2 + 0.001 * step + noise.gauss(0, 0.1),
        "eval/confusion": {"python": {"none": 3}},
    }


def series(length, **faults):
    """Healthy rows; a fault is name=function(step), or None to leave the name out."""
    noise, rows = random.Random(0), []
    for step in range(1, length + 1):
        row = {"step": step} | healthy(step, noise)
        for name, fault in faults.items():
            row[name] = fault(step)
        rows.append({k: v for k, v in row.items() if v is not None})
    return rows


def fired(rows, watcher=None):
    """[(step, name)] of every alarm that was reported."""
    watcher = watcher or Monitor("warn", TRAJECTORIES)
    return [(r["step"], a.name) for r in rows for a in watcher.check(r["step"], r)]


@pytest.mark.parametrize("trajectories", [16, 64, 1024])
def test_silent_on_a_healthy_run(trajectories):
    assert fired(series(400), Monitor("warn", trajectories)) == []


def test_silent_on_chance_in_small_batches():
    # Eight trajectories a step at a steady rate of a half, reward up slowly.
    for seed in range(20):
        chance = random.Random(seed)
        rows = [
            {
                "step": step,
                "reward": 0.3 + step / 1000,
                "tools/call_rate": sum(chance.random() < 0.5 for _ in range(8)) / 8,
            }
            for step in range(1, 201)
        ]
        names = {name for _, name in fired(rows, Monitor("warn", 8))}
        assert not names & {"tool_collapse", "call_rate_falling"}


def test_silent_without_tools_and_without_data():
    rows = series(50, **{"tools/call_rate": lambda _: None, "reward": lambda _: None})
    assert fired(rows) == []
    assert fired([{"step": step} for step in range(1, 51)]) == []


def each_10(value):
    """A held-out score, evaluated every tenth step."""
    return lambda step: value(step) if step % 10 == 0 else None


FAULTS = {
    "flat_groups": {"frac_reward_zero_std": lambda s: 0.6},
    "some_flat_groups": {"frac_reward_zero_std": lambda s: 0.4},
    "no_gradient": {"grad_norm": lambda s: 0.4 if s < 30 else 0.0},
    "gradient_explosion": {"grad_norm": lambda s: 25.0 if s == 40 else 0.4},
    "gradient_not_finite": {"update/skipped": lambda s: float(s == 7)},
    "nonfinite_tokens": {"nonfinite_tokens": lambda s: 1e-4 if s == 9 else 0.0},
    "no_calls": {"tools/call_rate": lambda s: 0.0},
    "malformed_calls": {"tools/malformed_frequency": lambda s: 0.05 if s < 20 else 0.4},
    "logprob_gap": {GAP: lambda s: 0.2},
    "entropy_blowup": {"entropy": lambda s: 0.6 if s < 30 else 2.5},
    "reward_ceiling": {"reward_gap": lambda s: 0.2, "frac_reward_best": lambda s: 0.6},
    "identical_samples": {"frac_group_identical": lambda s: float(s > 20)},
    "ratio_growth": {
        "ratio/max_by_position/1024": lambda s: 2.5 if s < 20 else 40.0,
    },
    "category_falls": {
        "category/easy": lambda s: 0.8 - 0.01 * s,
        "category/hard": lambda s: 0.2 + 0.01 * s,
    },
    "no_tool_schemas": {"tools/in_prompt": lambda s: 0.0},
    "likelihood_displacement": {
        "lld/nll_correct_by_turn/2": lambda s: 0.6 + 0.01 * s,
        "lld/nll_correct_by_turn/3": lambda s: 0.6 + 0.02 * s,
    },
    "tool_collapse": {
        "tools/call_rate": lambda s: max(0.85 - 0.008 * s, 0.1),
        "reward": lambda s: 0.12 + 0.004 * s,
    },
    "call_rate_falling": {
        "tools/call_rate": lambda s: max(0.85 - 0.008 * s, 0.1),
        "reward": lambda s: 0.5 - 0.003 * s,
    },
}
NOTICES = {"some_flat_groups", "call_rate_falling", "nonfinite_tokens"}
FIRST = {  # the step at which the fault is seen
    "flat_groups": 5,
    "some_flat_groups": 5,
    "no_gradient": 34,
    "gradient_explosion": 40,
    "gradient_not_finite": 7,
    "nonfinite_tokens": 9,
    "no_calls": 3,
    "malformed_calls": 23,
    "logprob_gap": 1,
    "entropy_blowup": 31,
    "reward_ceiling": 10,
    "identical_samples": 23,
    "ratio_growth": 21,
    "category_falls": 40,
    "no_tool_schemas": 1,
    "likelihood_displacement": 40,
    "tool_collapse": 31,
    "call_rate_falling": 31,
}


@pytest.mark.parametrize("name", FAULTS)
def test_fires_once_on_its_fault_and_nothing_else_does(name):
    alarms = fired(series(80, **FAULTS[name]))
    assert [other for _, other in alarms] == [name]
    assert alarms[0][0] == FIRST[name]


def test_every_alarm_says_what_why_and_what_to_do():
    for name, faults in FAULTS.items():
        watcher = Monitor("warn", TRAJECTORIES)
        rows = series(80, **faults)
        (alarm,) = [a for r in rows for a in watcher.check(r["step"], r)]
        assert alarm.name == name and len(alarm.message) > 100
        assert alarm.severe == (name not in NOTICES)


def test_collapse_names_both_rates_and_both_rewards():
    watcher = Monitor("warn", TRAJECTORIES)
    rows = series(80, **FAULTS["tool_collapse"])
    (alarm,) = [a for r in rows for a in watcher.check(r["step"], r)]
    assert "from 81% (steps 1-10) to 64%" in alarm.message
    assert "rose from 0.142 to 0.226" in alarm.message


def test_collapse_after_a_rise_is_measured_from_the_best_rate():
    rows = series(
        120,
        **{
            "tools/call_rate": lambda s: 0.4 + 0.01 * min(s, 50) - 0.01 * max(s - 70, 0)
        },
    )
    assert [name for _, name in fired(rows)] == ["tool_collapse"]


def test_an_alarm_that_cleared_fires_again():
    rows = series(60, **{GAP: lambda s: 0.2 if s in (5, 6, 30) else 0.001})
    assert fired(rows) == [(5, "logprob_gap"), (30, "logprob_gap")]


def test_flat_groups_that_grow_give_a_notice_and_then_an_alarm():
    rows = series(60, frac_reward_zero_std=lambda s: s / 60)
    assert [name for _, name in fired(rows)] == ["some_flat_groups", "flat_groups"]


def test_calls_that_no_tool_takes_count_with_those_that_cannot_be_read():
    shares = {
        "tools/malformed_frequency": lambda s: 0.17,
        "tools/invalid_frequency": lambda s: 0.1 if s < 20 else 0.2,
    }
    watcher = Monitor("warn", TRAJECTORIES)
    alarms = [a for r in series(40, **shares) for a in watcher.check(r["step"], r)]
    assert [alarm.name for alarm in alarms] == ["malformed_calls"]
    assert "17% could not be read, 14% named no tool" in alarms[0].message


def test_every_advantage_zero_is_no_signal_whatever_the_penalties_do():
    rows = series(20, frac_advantage_zero=lambda s: 1.0)
    assert fired(rows) == [(5, "no_gradient")]


def test_only_stop_and_only_a_severe_alarm_stop_a_run():
    for action, fault, stops in (
        ("warn", "no_calls", False),
        ("stop", "no_calls", True),
        ("stop", "some_flat_groups", False),
    ):
        watcher = Monitor(action, TRAJECTORIES)
        assert fired(series(20, **FAULTS[fault]), watcher)
        assert watcher.must_stop == stops


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("cut", [3, 12, 33, 60])
def test_replay_brings_a_resumed_run_to_where_it_was(name, cut):
    rows = series(80, **FAULTS[name])
    whole = fired(rows)
    resumed = Monitor("stop", TRAJECTORIES)
    resumed.replay(json.loads(json.dumps(rows[:cut])))
    assert not resumed.must_stop
    assert fired(rows[cut:], resumed) == [a for a in whole if a[0] > cut]


def test_what_the_metrics_file_leaves_out_is_left_out_here_too():
    rows = series(30)
    odd = [row | {"grad_norm": float("nan"), "entropy": float("inf")} for row in rows]
    bare = [
        {k: v for k, v in row.items() if k not in ("grad_norm", "entropy")}
        for row in rows
    ]
    assert fired(odd) == fired(bare) == []


def test_every_watched_name_is_used():
    names = set(monitor.WATCHED)
    used = {name for faults in FAULTS.values() for name in faults}
    own_tests = {
        "frac_advantage_zero",
        "tools/invalid_frequency",
        "interaction/rejected",
        "interaction/call_rate",
        "rewards/outcome/mean",
    }
    assert names - used == own_tests
    for prefix in monitor.WATCHED_PREFIXES:
        own = prefix == "eval/score/"
        assert own or any(name.startswith(prefix) for name in used), prefix


def test_batches_rejected_below_the_floor_teach_nothing():
    rows = series(20, **{"interaction/rejected": lambda s: float(s > 10)})
    assert fired(rows) == [(15, "no_gradient")]


def test_a_ceiling_needs_ties_and_a_best_that_does_not_move():
    moving = {"reward_gap": lambda s: 0.2 + s / 500, "frac_reward_best": lambda s: 0.6}
    apart = {"reward_gap": lambda s: 0.2, "frac_reward_best": lambda s: 0.05}
    reached = {"reward_gap": lambda s: 0.0, "frac_reward_best": lambda s: 0.9}
    for faults in (moving, apart, reached):
        assert fired(series(60, **faults)) == []


def test_a_policy_that_becomes_less_certain_everywhere_displaces_no_likelihood():
    names = [f"lld/nll_correct_by_turn/{turn}" for turn in (1, 2, 3)]
    rows = series(80, **dict.fromkeys(names, lambda s: 0.5 + 0.01 * s))
    assert fired(rows) == []


def test_categories_that_fall_together_are_no_trade():
    both = {"category/easy": lambda s: 0.8 - s / 100, "category/hard": lambda s: 0.5}
    assert fired(series(80, **both)) == []


def test_held_out_categories_count_before_those_in_training():
    rows = series(
        80,
        **{
            "eval/score/combo": each_10(lambda s: 0.3 + s / 100),
            "eval/score/transfer": each_10(lambda s: 0.9 - s / 100),
            "eval/score/all": each_10(lambda s: 0.6),
        },
    )
    watcher = Monitor("warn", TRAJECTORIES)
    alarms = [(r["step"], a) for r in rows for a in watcher.check(r["step"], r)]
    ((step, alarm),) = alarms
    assert (step, alarm.name) == (40, "category_falls")
    assert "'transfer' fell by 0.20 while that of 'combo' rose by 0.20" in alarm.message


def test_a_bonus_that_pays_for_calls_does_not_count_as_a_rising_reward():
    rows = series(
        80,
        **FAULTS["tool_collapse"],
        **{"rewards/outcome/mean": lambda s: 0.5 - 0.003 * s},
    )
    assert [name for _, name in fired(rows)] == ["call_rate_falling"]


def judged(rates, trajectories=TRAJECTORIES):
    rows = [{"step": i, "interaction/call_rate": r} for i, r in enumerate(rates, 1)]
    return verdict(rows, trajectories)


def test_verdict_on_the_incident_and_on_a_sound_run():
    """The article's run: 85 % to 12 % of the trajectories in 800 steps."""
    incident = judged([0.85 - 0.73 * step / 800 for step in range(800)])
    assert incident.collapsed and incident.steps == (1, 10)
    assert str(incident).startswith("collapsed: yes (call rate 13% at the end, 85%")
    sound = judged([0.85 - 0.1 * step / 800 for step in range(800)])
    assert not sound.collapsed and "collapsed: no" in str(sound)


def test_verdict_needs_half_of_the_best_rate_lost_and_more_than_chance():
    assert judged([0.8] * 10 + [0.4] * 10).collapsed
    assert not judged([0.8] * 10 + [0.42] * 10).collapsed
    assert not judged([0.5, 0.25], trajectories=4).collapsed
    assert judged([0.5, 0.25], trajectories=400).collapsed
    assert not judged([0.0] * 30).collapsed  # it never had any


def test_no_verdict_without_tools_or_steps():
    assert verdict([{"step": i, "reward": 0.5} for i in range(30)], 8) is None
    assert judged([]) is None and judged([0.5]) is None


def test_the_monitor_gives_the_verdict_of_a_resumed_run_too():
    rates = {"interaction/call_rate": lambda s: 0.9 if s < 40 else 0.1}
    rows = series(80, **rates)
    resumed = Monitor("warn", TRAJECTORIES)
    resumed.replay(rows[:50])
    fired(rows[50:], resumed)
    whole = Monitor("warn", TRAJECTORIES)
    fired(rows, whole)
    assert resumed.verdict() == whole.verdict() and whole.verdict().collapsed
