"""The loop. `train` reads like the table of stages in the design: tasks, rollout,
reward, batch, re-score, advantage, update, metrics, save. Start here.
`main` is what run.py calls; everything a run needs is built by `setup`.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from flax import nnx
from ml_collections import ConfigDict

from grpo_jax import config as configuration
from grpo_jax import (
    devices,
    draws,
    exports,
    health,
    held_out,
    lock,
    models,
    policy,
    probe,
    report,
    setup,
    suites,
)
from grpo_jax.checkpoints import Checkpoints, Saved
from grpo_jax.cold_start import ColdStart
from grpo_jax.config import BadInput, Stopped
from grpo_jax.data import TaskStream, fingerprint
from grpo_jax.incentives import make_controller
from grpo_jax.metrics import Metrics, clean, read, write_json
from grpo_jax.models import lora
from grpo_jax.monitor import Monitor
from grpo_jax.position import Position
from grpo_jax.setup import Job
from grpo_jax.training.update import TrainState
from grpo_jax.types import Trajectory
from grpo_jax.watch import Compilations, StopSignal, timed

LOG = logging.getLogger(__name__)
ROLLOUT, EVAL, DROPOUT = range(3)  # random streams of a run, folded into its seed


def main(config: ConfigDict, workdir: Path, mode: str) -> None:
    """Run one mode in `workdir`; see run.py for the modes and exit codes."""
    configuration.check_resume(config, workdir)
    if mode == "train" and config.rollout.temperature == 0:
        raise BadInput(
            "rollout.temperature=0: a group of equal samples teaches nothing"
        )
    probe.check(config, mode)
    suites.check(config, mode)
    with contextlib.ExitStack() as held:
        if mode in ("train", "sft"):
            if jax.process_index() == 0:
                held.enter_context(lock.hold(workdir))
            keys = config.checkpoint
            store = Checkpoints(workdir / "checkpoints", keys.keep, keys.best)
            saved = store.newest()
        else:
            saved = policy.find(config, workdir)
        mesh = devices.make_mesh(config.mesh)
        held.enter_context(jax.set_mesh(mesh))
        if mode == "export":
            return exports.run(config, workdir, mesh, saved)
        job = setup.prepare(config, mesh, resuming=saved is not None)
        held.callback(getattr(job.environment, "close", lambda: None))
        held.enter_context(contextlib.closing(job.engine.pool))
        stop = StopSignal()
        match mode:
            case "train":
                Run(config, workdir, job, stop, store).train(saved)
            case "sft":
                Run(config, workdir, job, stop, store).cold_start_only(saved)
            case "eval":
                apart = config.eval.probe or config.eval.suite != ""
                key = stream_key(config, EVAL, int(apart))
                held_out.run(config, workdir, job, saved, key, stop.check)


def stream_key(config: ConfigDict, purpose: int, step: int) -> jax.Array:
    """The random stream of one purpose and step of a run."""
    key = jax.random.fold_in(jax.random.key(config.train.seed), purpose)
    return jax.random.fold_in(key, step)


class Run:
    """One training in one workdir: its state, its files, its stages."""

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        job: Job,
        stop: StopSignal,
        store: Checkpoints,
    ):
        self.config, self.workdir, self.job = config, workdir, job
        self.stop, self.store = stop, store
        self.sampling = setup.make_sampling(config)
        self.steps = setup.num_steps(config, len(job.train_tasks))
        self.learner = setup.make_learner(config, job, self.steps)
        self.anchored = setup.below_floor(config, self.learner)
        self.control = make_controller(config)
        self.stream = TaskStream(job.train_tasks, config.data.seed, config.data.shuffle)
        self.before: dict | None = None  # held-out results before RL
        self.started = time.perf_counter()
        self.fingerprint = models.base_fingerprint(config.model.source)
        self.tasks = {
            "gold": fingerprint(job.sft_tasks),
            "held_out": fingerprint(job.eval_tasks),
        }
        self.compilations = Compilations()
        self.unreported: dict = {}  # time/save since the last line of metrics

    # Modes -------------------------------------------------------------------------

    def train(self, saved: Saved | None) -> None:
        """Cold start if there is one, then RL to the last step, then the summary."""
        run = self._restore(saved)
        written = run.written if run else 0
        monitor = self._monitor(written)
        if written < self.steps:
            gold = self._gold(run, wanted=not self.config.lora.init_from)
            # Trackers open before anything takes long.
            opened = Metrics(self.workdir, self.config.trackers, resume_step=written)
            with contextlib.closing(opened) as metrics:
                run = self._take_up(run, gold)
                self._loop(run, metrics, monitor)
        if monitor.must_stop:
            LOG.warning("ended at step %d: monitor.action=stop", run.step)
        report.end(self.workdir, self.before, monitor.verdict())

    def cold_start_only(self, saved: Saved | None) -> None:
        """Mode sft: the cold start, on lora.init_from if given, and its checkpoint."""
        if not self.config.sft.num_epochs:
            raise BadInput("--mode=sft with sft.num_epochs=0: nothing to do")
        if saved is not None and saved.step:
            raise BadInput(
                f"'{self.workdir}' holds a run of {saved.step} steps; use another "
                "--workdir"
            )
        run = self._restore(saved)
        self._take_up(run, self._gold(run, wanted=True))
        report.summary(None, self.before, self.before.get("eval/confusion"))

    def _loop(self, run: Position, metrics: Metrics, monitor: Monitor) -> None:
        """Steps up to the last one; stopped by a signal, the run is saved."""
        self.rates = Metrics(self.workdir, name="pass_rates", resume_step=run.step)
        progress = report.LiveProgress("RL", self.steps, run.written)
        with contextlib.ExitStack() as held:
            for file in (self.rates, progress):
                held.enter_context(contextlib.closing(file))
            held.enter_context(self._saved_when_stopped(run))
            self._compile(run)
            while run.written < self.steps and not monitor.must_stop:
                if run.values is None:
                    self._take_step(run)
                self._finish_step(run, metrics, progress, monitor)

    def _compile(self, run: Position) -> None:
        """Every program, before the first step."""
        samplings = {self.sampling, held_out.sampling(self.config)}
        self.job.engine.warm_up(run.state.adapters, sorted(samplings, key=str))
        self.stop.check()
        self.learner.warm_up(run.state, run.reference)
        self.stop.check()
        if self.anchored is not None and self.anchored is not self.learner:
            self.anchored.warm_up(run.state, run.reference)

    # Start and resume --------------------------------------------------------------

    def _gold(self, run: Position | None, *, wanted: bool) -> ColdStart | None:
        """The cold start that begins, if it is wanted, or goes on."""
        begins = run is None and wanted and self.config.sft.num_epochs
        if begins or (run and run.cold_start is not None):
            return ColdStart(self.config, self.workdir, self.job)
        return None

    def _take_up(self, run: Position | None, gold: ColdStart | None) -> Position:
        """Where RL begins or goes on, with the held-out results before it."""
        configuration.save(self.config, self.workdir)  # only now: nothing was refused
        if run is None or gold:
            adapters = self._cold_start(run, gold) if gold else self.job.adapters
            run = self._position(self._new_state(adapters), lora.copy(adapters))
            self._save(run)
        if self.before is None:
            self._evaluate_before(run)
        return run

    def _cold_start(self, run: Position | None, gold: ColdStart) -> nnx.State:
        """Adapters after a cold start that begins or goes on."""
        if run is None:
            run = self._position(gold.begin(), self.job.adapters, cold_start=0)
        with self._saved_when_stopped(run):
            self.stop.check()
            for number, state in gold.updates(run.state, run.cold_start):
                run.cold_start, run.state, run.saved = number, state, False
                self.stop.check()
        return run.state.adapters

    def _evaluate_before(self, run: Position) -> None:
        """Held-out results that RL has to beat; kept with every checkpoint."""
        before = self._evaluate(run.state.adapters)
        held_out.check_best(self.config, before)
        self.before = before
        self._save(run, before)
        write_json(self.workdir / "eval_before.json", before)

    def _position(self, state: TrainState, reference: nnx.State, **more) -> Position:
        """Before the first step."""
        return Position(0, state, reference, self.stream.state(), **more)

    def _new_state(self, adapters) -> TrainState:
        key = stream_key(self.config, DROPOUT, 0)
        return self.learner.new_state(adapters, key)

    def _restore(self, saved: Saved | None) -> Position | None:
        """The run where a checkpoint left it, data included; None without one."""
        if saved is None:
            return None
        policy.check(self.config, saved)
        adapters, meta = self.job.adapters, saved.meta
        state = self._new_state(adapters)
        if meta["cold_start"] is not None:  # it has an optimizer of its own
            state = ColdStart(self.config, self.workdir, self.job).begin()
        arrays = self.store.restore(saved, {"state": state, "reference": adapters})
        self.stream.restore(meta["stream"])
        self.control.restore(meta["interaction"])
        if meta["cold_start"] is not None and meta["gold"] != self.tasks["gold"]:
            raise BadInput(
                "the cold start's examples changed since the checkpoint was saved; "
                "start a new --workdir or restore them"
            )
        if meta["held_out"] != self.tasks["held_out"]:
            LOG.warning("the held-out tasks are not those of the results before RL")
        self.before = meta["before"]
        LOG.info("resumed from step %d of '%s'", saved.step, self.workdir)
        return Position(
            saved.step,
            **arrays,
            cursor=meta["stream"],
            num_tokens=meta["num_tokens"],
            values=meta["unwritten"],
            cold_start=meta["cold_start"],
            saved=True,
        )

    def _save(self, run: Position, scores: dict | None = None) -> None:
        """A checkpoint of where the run stands; `scores` are its held-out results."""
        meta = {
            "stream": run.cursor,
            "before": self.before,
            "num_tokens": run.num_tokens,
            "interaction": self.control.state(),
            "unwritten": run.values,
            "cold_start": run.cold_start,
            "base": self.fingerprint,
            "alpha": self.config.lora.alpha,
            **self.tasks,
        }
        arrays = {"state": run.state, "reference": run.reference}
        score = (scores or {}).get(self.config.checkpoint.best)
        with timed(self.unreported, "save"):
            self.store.save(run.step, arrays, meta, score)
        run.saved = True

    @contextlib.contextmanager
    def _saved_when_stopped(self, run: Position) -> Iterator[None]:
        """Stopped inside, the run is saved where it stands before it ends."""
        try:
            yield
        except Stopped:
            if not run.saved:
                self._save(run)
            raise

    # Stages of a step --------------------------------------------------------------

    def _take_step(self, run: Position) -> None:
        """Stages 1-8. Stopped before the update, the step is given up.

        An update is not given up half-way: it consumes the state that it began with.
        """
        self.started = time.perf_counter()
        trajectories, values = self._rollout(run)
        self.stop.check()
        run.state, learned = self._learn(
            run.state,
            run.reference,
            trajectories,
            below_floor=self.control.take(values),
        )
        run.step, run.values = run.step + 1, clean(values | learned)
        run.cursor, run.num_tokens = self.stream.state(), values["num_tokens"]
        run.saved = False
        self.stop.check()

    def _finish_step(self, run: Position, metrics, progress, monitor) -> None:
        """Stages 9-10: evaluation, metrics, checkpoint, alarms.

        Stopped in an evaluation, the step is saved with its metrics, and the next start
        goes on here.
        """
        step, values, keys = run.step, run.values, self.config
        scores = None
        if step == self.steps or _every(keys.eval.every, step):
            with timed(values, "eval"):
                scores = self._evaluate(run.state.adapters)
            values |= scores
        values |= self.unreported
        self.unreported = {}
        values["step_time"] = time.perf_counter() - self.started
        values["compile/count"] = self.compilations.count
        metrics.write(step, values)
        progress.step(step, values)
        run.values, run.saved = None, False
        alarms = monitor.check(step, values)
        last = step == self.steps or monitor.must_stop
        if last or _every(keys.checkpoint.every, step):
            self._save(run, scores)
        for alarm in alarms:
            level = logging.WARNING if alarm.severe else logging.INFO
            LOG.log(level, "step %d: %s: %s", step, alarm.name, alarm.message)

    def _rollout(self, run: Position) -> tuple[list[Trajectory], dict]:
        """Stages 1-3: tasks, trajectories, rewards; writes the rollouts file.

        Returns the trajectories to learn from; file and metrics are of all drawn ones.
        """
        job, keys, step = self.job, self.config, run.step + 1
        rollouts = draws.Rollouts(
            job,
            run.state.adapters,
            num_generations=keys.rollout.num_generations,
            sampling=self.sampling,
            key=stream_key(keys, ROLLOUT, step),
            bonus=self.control.weight,
            check=self.stop.check,
        )
        self.stream.restore(run.cursor)
        groups, batch, values = draws.draw(
            self.stream,
            rollouts.sample,
            self.learner.estimator.teaches,
            wanted=keys.train.prompts_per_step,
            most=keys.objective.max_draws,
            by_value=keys.objective.redraw == "value",
        )
        trajectories = list(itertools.chain(*groups))
        for trajectory in trajectories:
            trajectory.policy_step = run.step
        path = self.workdir / "rollouts" / f"step_{step:06d}.jsonl"
        health.write_rollouts(path, trajectories, job.chat.decode)
        self.rates.write(step, {"pass_rates": draws.pass_rates(groups)})
        values |= rollouts.metrics(trajectories)
        values |= self.control.metrics(values)
        values["num_tokens"] = run.num_tokens + rollouts.counters.tokens
        return list(itertools.chain(*batch)), values

    def _learn(self, state: TrainState, reference, trajectories, below_floor):
        """Stages 4-7: batches, old and reference log-probs, advantages, updates.

        Below the floor `reward.floor_mode` may want more KL, or no update at all.
        """
        learner = self.anchored if below_floor else self.learner
        if learner is None:
            return state, {"interaction/rejected": 1.0}
        state, values = learner.learn(state, reference, trajectories)
        tokens = sum(t.completion_length for t in trajectories)
        values["update/tokens_per_second"] = tokens / values["time/update"]
        return state, values

    def _evaluate(self, adapters: nnx.State) -> dict:
        key = stream_key(self.config, EVAL, 0)
        return held_out.results(self.config, self.job, adapters, key, self.stop.check)

    # Files and small things ----------------------------------------------------------

    def _monitor(self, written: int) -> Monitor:
        """Alarms, brought to where a resumed run was."""
        rows = self.config.train.prompts_per_step * self.config.rollout.num_generations
        monitor = Monitor(self.config.monitor.action, rows)
        lines = read(self.workdir / "metrics.jsonl")
        monitor.replay(line for line in lines if line["step"] <= written)
        return monitor


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0
