"""The cold start of a run: supervised epochs on gold trajectories before RL.

Writes sft_metrics.jsonl and shows its progress; the training itself is `training.sft`.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from grpo_jax import report, setup
from grpo_jax.metrics import Metrics
from grpo_jax.setup import Job
from grpo_jax.training import sft, update
from grpo_jax.training.choices import make_sft_loss
from grpo_jax.training.update import TrainState

LOG = logging.getLogger(__name__)


class ColdStart:
    """The updates of one cold start; BadInput if there is nothing to learn from."""

    def __init__(self, config: ConfigDict, workdir: Path, job: Job):
        keys = config.sft
        self.config, self.workdir, self.job = config, workdir, job
        self.examples = setup.gold_examples(config, job)
        calls = [len(example.trajectory.calls) for example in self.examples]
        LOG.info(
            "cold start: %d gold trajectories, %.1f tool calls each (%d to %d)",
            *(len(calls), sum(calls) / len(calls), min(calls), max(calls)),
        )
        self.total = sft.total_steps(len(calls), keys.batch_size, keys.num_epochs)
        self.optimizer = update.make_optimizer(
            keys.learning_rate,
            warmup_steps=keys.warmup_steps,
            total_steps=self.total + 1,  # the last update has a rate above 0
            schedule="linear",
            max_grad_norm=config.train.max_grad_norm,
        )

    def begin(self) -> TrainState:
        """Before the first update: the run's starting adapters."""
        return sft.new_state(self.job.adapters, self.optimizer, self.config.train.seed)

    def updates(self, state: TrainState, done: int) -> Iterator[tuple[int, TrainState]]:
        """Every update after the `done` ones that led to `state`: number and state."""
        metrics = Metrics(self.workdir, name="sft_metrics", resume_step=done)
        progress = report.LiveProgress("cold start", self.total, done)
        rest = sft.updates(
            self.job.graph,
            self.job.base,
            state,
            self.examples,
            self.optimizer,
            loss=make_sft_loss(self.config),
            num_epochs=self.config.sft.num_epochs,
            batch_size=self.config.sft.batch_size,
            row_length=setup.row_length(self.config),
            rows=self.config.train.micro_batch_size,
            seed=self.config.train.seed,
            done=done,
            router=self.job.router,
        )
        with contextlib.closing(metrics), contextlib.closing(progress):
            for number, (state, values) in enumerate(rest, done + 1):
                metrics.write(number, values)
                progress.step(number, values)
                yield number, state
