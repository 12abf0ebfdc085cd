"""A toy environment, its data and rewards, for runs of the tiny model in seconds.

Named by dotted path in configs: the folder of the tests must be importable.
"""

import json

import numpy as np

from tools_env.protocol import Reward

ANSWER = "aeiou"


class ToyEnvironment:
    """No tools; the reward is the share of vowels among the answer's characters."""

    max_reward = 1.0

    def __init__(self, config=None):
        self.config = config

    def tools(self):
        return []

    def start(self, task):
        return self

    def call(self, call):
        raise AssertionError("there is no tool to call")

    def close(self):
        pass

    def reward(self, task, trajectory):
        share = vowels(trajectory.answer)
        return Reward(share, {"vowels": share})

    def demonstration(self, task):
        return [{"role": "assistant", "content": ANSWER}]

    def prediction(self, task, trajectory):
        answer = trajectory.answer[:1] or None
        return {
            "expected": None,
            "called": None,
            "correct": answer in ANSWER if answer else False,
            "answer": answer,
        }


def vowels(text: str) -> float:
    """Share of vowels.

    Args:
        text: any text.
    """
    return sum(c in ANSWER for c in text) / max(len(text), 1)


def write_tasks(path, number=12):
    """A JSONL file of tasks with short prompts."""
    rows = [{"prompt": f"say {i}", "goal": ANSWER} for i in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def vowel_reward(completions, **kwargs):
    return [vowels(completion[-1]["content"]) for completion in completions]


def sometimes_abstains(completions, trajectories, **kwargs):
    """None, NaN and an exception, each now and then."""
    found = []
    for i, completion in enumerate(completions):
        value = vowels(completion[-1]["content"])
        found.append([None, float("nan"), value, value][i % 4])
    return found


def never_scores(completions, **kwargs):
    return [None] * len(completions)


def by_score(completions, score=None, **kwargs):
    return score or never_scores(completions)


def flat_or_vowels(completions, flat, **kwargs):
    """The same for all answers to a task whose column `flat` is true."""
    return [
        1.0 if equal else vowels(completion[-1]["content"])
        for completion, equal in zip(completions, flat, strict=True)
    ]


def every_other(completions, **kwargs):
    """1 and 0 in turn: some of every group succeed, whatever they say."""
    return [float(i % 2) for i in range(len(completions))]


def first_group_flat(completions, **kwargs):
    """The same, but the first four of a rollout all succeed."""
    return [1.0 if i < 4 else float(i % 2) for i in range(len(completions))]


def constant(completions, **kwargs):
    return [0.5] * len(completions)


def one_too_many(completions, **kwargs):
    return [1.0] * (len(completions) + 1)


def one_too_many_later(completions, **kwargs):
    """Right for the single trajectory of the start-up call."""
    return [1.0] * (len(completions) + (len(completions) > 1))


def fails(completions, **kwargs):
    raise RuntimeError("no such column")


def command(folder, workdir, *more):
    """Arguments of a run of seconds: short prompts, short answers, four steps."""
    tasks = folder / "tasks.jsonl"
    if not tasks.exists():
        write_tasks(tasks)
    settings = {
        "tools.environment": "toy.ToyEnvironment",
        "data.source": str(tasks),
        "data.num_eval_tasks": 2,
        "rollout.max_prompt_length": 64,
        "rollout.max_completion_length": 24,
        "rollout.max_turn_length": 24,
        "rollout.burst": 8,
        "objective.beta": 0.05,
        "train.num_steps": 4,
        "train.micro_batch_size": 8,
    }
    return [
        "--config=configs/tir.py:tiny",
        f"--workdir={workdir}",
        *[f"--config.{key}={value}" for key, value in settings.items()],
        *more,
    ]


def same_metrics(path):
    """The lines of a metrics file without what depends on the machine's speed."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not _timing(k)} for row in rows]


def assert_same_run(workdir, finished):
    """Two runs of one command: every metric, timings aside, and every trajectory."""
    for name in ("metrics.jsonl", "sft_metrics.jsonl"):
        assert same_metrics(workdir / name) == same_metrics(finished / name)
    for path in sorted((finished / "rollouts").iterdir()):
        assert (workdir / "rollouts" / path.name).read_bytes() == path.read_bytes()


def assert_same_step(workdir, expected, step, names):
    """Step `step` of two runs whose devices differ: the same tasks, draws and numbers.

    Other devices add in another order, and a draw that lies at a boundary falls the
    other way then. So a few answers may part from each other; up to there tokens and
    log-probs are compared, and the metrics `names` only where no answer parted.
    """
    pairs = list(zip(_rollouts(workdir, step), _rollouts(expected, step), strict=True))
    parted = 0
    for one, two in pairs:
        assert (one["task_id"], one["group"]) == (two["task_id"], two["group"])
        (prompt, answer), (same_prompt, other) = one["segments"], two["segments"]
        assert prompt == same_prompt
        shared = common_prefix(answer["tokens"], other["tokens"])
        np.testing.assert_allclose(
            answer["logprobs"][:shared], other["logprobs"][:shared], atol=1e-4
        )
        parted += answer["tokens"] != other["tokens"]
    assert parted <= len(pairs) // 4
    if parted:
        return
    got, wanted = (
        same_metrics(w / "metrics.jsonl")[step - 1] for w in (workdir, expected)
    )
    assert got.keys() == wanted.keys()
    for name in names:
        np.testing.assert_allclose(got[name], wanted[name], atol=1e-4, err_msg=name)


def common_prefix(one, two):
    """Length of what two lists begin with alike."""
    different = (i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y)
    return next(different, min(len(one), len(two)))


def _rollouts(workdir, step):
    lines = (workdir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _timing(name):
    return name in ("step_time", "compile/count") or (
        name.startswith("time/") or name.endswith("tokens_per_second")
    )
