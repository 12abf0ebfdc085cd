"""The host half of a rollout: slots, tools and trajectories.

`Engine.collect` turns tasks into trajectories, not yet rewarded. One loop: give free
slots to waiting trajectories, append the tool results that have arrived, decode a
burst, close the turns that ended. A slot whose tools run sits out of the bursts while
the others decode on. A group's prompt is prefilled once and copied to its members.

A trajectory ends for one of five reasons: "stop" (a turn without calls that the model
ended, or a stop tool's call), "fault" (a tool's infrastructure failed), "length"
(max_completion_length is used up, or a turn's results do not fit into what is left of
it), "turn_length" (max_turn_length) and "max_calls" (a turn with calls after
max_tool_calling_iterations such turns). The cache has room for both budgets, so it
never ends one.

Whatever a tool does becomes an observation; only the main thread calls JAX.
"""

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np
from flax import nnx

from grpo_jax.models import lora
from grpo_jax.models.decoder import Decoder
from grpo_jax.rollout import sampler
from grpo_jax.rollout.chat import Chat
from grpo_jax.rollout.roles import RoleTable
from grpo_jax.rollout.sampler import RUNNING, STOPPED, Burst, SamplerState, Sampling
from grpo_jax.rollout.turns import Limits, Ongoing
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.calls import parse_tool_calls
from tools_env.pool import Ticket, ToolPool
from tools_env.protocol import Environment, Task, ToolCall, ToolResult

# Rows and most tokens a row of one `extend`: tool results are short, one by one.
PROMPTS = (8, 64)
RESULTS = (4, 64)
FEW = 4  # no more than slots / FEW trajectories are decoded packed together
LOOK_S = 0.5  # longest wait for a tool between two calls of `check`


@dataclasses.dataclass
class Counters:
    """What a rollout cost.

    Attributes:
      prefill_tokens: prompt tokens once a group, and TOOL tokens.
      sampled_tokens: MODEL tokens.
      waited_s: seconds in which every slot waited for its tools.
      bursts: calls of `decode`.
    """

    prefill_tokens: int = 0
    sampled_tokens: int = 0
    waited_s: float = 0.0
    bursts: int = 0

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.sampled_tokens

    def add(self, other: "Counters") -> None:
        self.prefill_tokens += other.prefill_tokens
        self.sampled_tokens += other.sampled_tokens
        self.bursts += other.bursts
        self.waited_s += other.waited_s


class Engine:
    """Rollouts of one model; `collect` may be called any number of times.

    The graph and the base weights stay; adapters come with every call. `table` tells
    routed adapters apart.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        base: nnx.State,
        model: Decoder,
        chat: Chat,
        environment: Environment,
        pool: ToolPool,
        limits: Limits,
        table: RoleTable | None = None,
    ):
        self.graph, self.base = graph, base
        self.chat, self.environment, self.pool = chat, environment, pool
        self.limits = limits
        self.model_config = model.config
        self.dtype = model.norm.scale[...].dtype
        self.executes_tools = bool(environment.tools())
        self.stop_ids = np.asarray(sorted(chat.stop_ids), np.int32)
        self.live_buckets = _buckets(256, limits.cache_length)
        self.table = table

    def collect(
        self,
        adapters: nnx.State,
        tasks: Sequence[Task],
        *,
        num_generations: int,
        sampling: Sampling,
        key: jax.Array,
        first: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[list[Trajectory], Counters]:
        """Roll out num_generations trajectories of every task, in order.

        Trajectory number i (task-major, counted from `first`) draws from
        fold_in(key, i). `check` is called between bursts and may raise to abandon the
        rollout. Sessions are closed in any case. Raises ValueError for a prompt longer
        than its limit, before anything starts.
        """
        with contextlib.ExitStack() as sessions:
            run = _Run(self, adapters, sampling, key)
            run.enlist(tasks, num_generations, first, sessions)
            while run.unfinished:
                check()
                run.advance()
            return run.trajectories, run.counters

    def warm_up(self, adapters: nnx.State, samplings: Sequence[Sampling]) -> None:
        """Compile every program that `collect` can need, on empty slots."""
        for sampling in {(s.top_k, s.top_p): s for s in samplings}.values():
            _Run(self, adapters, sampling, jax.random.key(0)).warm_up()

    def empty_state(self, slots: int, length: int) -> SamplerState:
        return sampler.empty_state(self.model_config, slots, length, self.dtype)


class _Run:
    """The state of one `collect`."""

    def __init__(
        self, engine: Engine, adapters: nnx.State, sampling: Sampling, key: jax.Array
    ):
        self.engine, self.sampling, self.key = engine, sampling, key
        self.model = (engine.graph, adapters, engine.base)
        self.decoder = lora.for_decoding(*self.model)
        self.limits = engine.limits
        self.counters = Counters()
        self.state = engine.empty_state(self.limits.slots, self.limits.cache_length)
        # Slots of a sharded state stay where they are: to pack them would move caches.
        alone = jax.sharding.get_abstract_mesh().size <= 1
        self.few = self.limits.slots // FEW if alone else 0
        self.lengths = [0] * self.limits.slots  # mirrors state.lengths
        self.slots: list[Ongoing | None] = [None] * self.limits.slots
        self.trajectories: list[Trajectory] = []
        self.prompts: list[np.ndarray] = []  # of every group
        self.prefilled: tuple[int, SamplerState] | None = None  # first group, prompts
        self.waiting: deque[Ongoing] = deque()
        self.tickets: dict[Ticket, Ongoing] = {}
        self.answered: deque[tuple[Ongoing, np.ndarray]] = deque()
        self.finished = 0

    @property
    def unfinished(self) -> bool:
        return self.finished < len(self.trajectories)

    def enlist(
        self,
        tasks: Sequence[Task],
        num_generations: int,
        first: int,
        sessions: contextlib.ExitStack,
    ) -> None:
        """Queue the trajectories; their sessions are closed with `sessions`."""
        self.prompts = [self._prompt(task) for task in tasks]
        for group, task in enumerate(tasks):
            prompt = Segment.given(Source.PROMPT, self.prompts[group])
            for member in range(num_generations):
                session = self.engine.environment.start(task)
                sessions.callback(session.close)
                trajectory = Trajectory(task, group, member, [prompt])
                number = first + len(self.trajectories)
                self.trajectories.append(trajectory)
                self.waiting.append(Ongoing(trajectory, session, number))

    def _prompt(self, task: Task) -> np.ndarray:
        chat = self.engine.chat.offering(task.columns.get("tools"))
        tokens = np.asarray(chat.prompt(task.prompt), np.int32)
        if len(tokens) > self.limits.max_prompt_length:
            raise ValueError(
                f"the prompt of task {task.id} has {len(tokens)} tokens, "
                f"max_prompt_length is {self.limits.max_prompt_length}"
            )
        return tokens

    def advance(self) -> None:
        """One round of the loop."""
        self._admit()
        self._take_results()
        self._append_results()
        self._decode()

    def warm_up(self) -> None:
        """Run every program once with nothing to do."""
        prompts = self._prefill([])
        self.state = sampler.place(self.state, prompts, 0, 0, self.key, 0)
        for live in self.engine.live_buckets:
            if self.engine.executes_tools:
                self._extend([], [], live)
            self._burst(None, np.zeros(self.limits.slots, np.int32), live)
            if self.few:
                nobody = np.full(self.few, self.limits.slots, np.int32)
                self._burst(nobody, np.zeros(self.few, np.int32), live)

    # Prompts -----------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting trajectories."""
        free = [slot for slot, one in enumerate(self.slots) if one is None]
        for slot in free[: len(self.waiting)]:
            one = self.waiting.popleft()
            one.slot, self.slots[slot] = slot, one
            self.lengths[slot] = len(one.trajectory.prompt)
            prompts, row = self._prefilled(one.trajectory.group)
            self.state = sampler.place(
                self.state, prompts, row, slot, self.key, one.number
            )
        if not self.waiting:
            self.prefilled = None

    def _prefilled(self, group: int) -> tuple[SamplerState, int]:
        """The group's prompt; prompts are prefilled several groups at a time."""
        rows, _ = PROMPTS
        first = group - group % rows
        if self.prefilled is None or self.prefilled[0] != first:
            prompts = self.prompts[first : first + rows]
            self.prefilled = first, self._prefill(prompts)
            self.counters.prefill_tokens += sum(map(len, prompts))
        return self.prefilled[1], group - first

    def _prefill(self, prompts: list[np.ndarray]) -> SamplerState:
        """A state of its own with one prompt a row."""
        (rows, most), length = PROMPTS, self.limits.prompt_length
        empty = self.engine.empty_state(rows, length)
        shape = dict(rows=rows, chunk=self.limits.prompt_chunk(most), live=length)
        return sampler.append(*self.model, empty, range(len(prompts)), prompts, **shape)

    # Tools -------------------------------------------------------------------------

    def _take_results(self) -> None:
        """Collect what the tools have returned; wait only when nothing else can run."""
        pool = self.engine.pool
        occupied = sum(one is not None for one in self.slots)
        idle = self.tickets and len(self.tickets) == occupied
        started = time.perf_counter()
        finished = pool.wait(LOOK_S) if idle else pool.ready()
        self.counters.waited_s += time.perf_counter() - started
        for ticket in finished:
            one = self.tickets.pop(ticket, None)
            if one is not None:  # else of a rollout that was abandoned
                self._observe(one, ticket.results)

    def _observe(self, one: Ongoing, answers: Sequence[ToolResult]) -> None:
        """Record a turn's results and queue their text, if it fits the budget."""
        texts = one.record(answers)
        if one.ended:
            self._finish(one, one.ended)
            return
        observation = self.engine.chat.observation(texts, one.pending)
        # One sampled token at least must fit behind it.
        if len(observation) >= one.room(self.limits):
            self._finish(one, "length")
            return
        tokens = np.asarray(observation, np.int32)
        one.observe(tokens)
        self.answered.append((one, tokens))

    def _append_results(self) -> None:
        """Extend kept caches by the pending tokens and the results' tokens."""
        rows, _ = RESULTS
        while self.answered:
            part = list(itertools.islice(self.answered, rows))
            texts = [np.append(np.int32(one.pending), text) for one, text in part]
            slots = [one.slot for one, _ in part]
            for slot, text in zip(slots, texts, strict=True):
                self.lengths[slot] += len(text)
            longest = max(self.lengths[slot] for slot in slots)
            self._extend(slots, texts, self._live(longest))
            for one, text in part:
                self.answered.popleft()
                one.pending = None
                self.counters.prefill_tokens += len(text)

    def _extend(
        self, slots: Sequence[int], texts: Sequence[np.ndarray], live: int
    ) -> None:
        rows, chunk = RESULTS
        self.state = sampler.append(
            *self.model, self.state, slots, texts, rows=rows, chunk=chunk, live=live
        )

    # Decoding ----------------------------------------------------------------------

    def _decode(self) -> None:
        """One burst over the slots whose turn is open, then close ended turns."""
        in_tools = set(self.tickets.values())
        active = [one for one in self.slots if one and one not in in_tools]
        if not active:
            return
        slots, rows = self._rows(active)
        budgets = np.zeros(self.limits.slots if slots is None else len(slots), np.int32)
        for row, one in rows.items():
            budgets[row] = one.budget(self.limits)
        longest = max(self.lengths[one.slot] for one in active)
        burst = self._burst(slots, budgets, self._live(longest + self.limits.burst))
        self.counters.bursts += 1
        self.counters.sampled_tokens += int(burst.counts.sum())
        for row, one in rows.items():
            count, status = int(burst.counts[row]), burst.status[row]
            one.take(burst.tokens[row, :count], burst.logprobs[row, :count])
            self.lengths[one.slot] += count if status == RUNNING else count - 1
            if status != RUNNING:
                self._close_turn(one, stopped=bool(status == STOPPED))

    def _rows(
        self, active: list[Ongoing]
    ) -> tuple[np.ndarray | None, dict[int, Ongoing]]:
        """Which slots to decode (None: all), and who is in which row of the burst."""
        if len(active) > self.few:
            return None, {one.slot: one for one in active}
        slots = np.full(self.few, self.limits.slots, np.int32)  # beyond the last: none
        slots[: len(active)] = [one.slot for one in active]
        return slots, dict(enumerate(active))

    def _burst(self, slots: np.ndarray | None, budgets: np.ndarray, live: int) -> Burst:
        self.state, burst = sampler.decode(
            *self.decoder,
            self.state,
            slots,
            budgets,
            self.engine.stop_ids,
            sampling=self.sampling,
            steps=self.limits.burst,
            live=live,
            table=self.engine.table,
        )
        return jax.device_get(burst)

    def _live(self, needed: int) -> int:
        """The smallest bucket of cache entries that covers `needed`."""
        buckets = self.engine.live_buckets
        return next((b for b in buckets if b >= needed), buckets[-1])

    def _close_turn(self, one: Ongoing, stopped: bool) -> None:
        """End a turn, then run its calls or end the trajectory.

        A turn cut by a budget is not searched for calls.
        """
        text = one.close_turn(self.engine.chat)
        if not stopped:
            self._finish(one, "turn_length" if one.room(self.limits) else "length")
            return
        protocol = self.engine.chat.protocol
        calls = parse_tool_calls(text, protocol) if self.engine.executes_tools else []
        if not calls:
            self._finish(one, "stop")
        elif one.iterations >= self.limits.max_tool_calling_iterations:
            self._finish(one, "max_calls")
        else:
            self._submit(one, one.accept(calls, self.limits.max_calls_per_turn))

    def _submit(self, one: Ongoing, runnable: list[ToolCall]) -> None:
        """Send calls to the workers."""
        if runnable:
            ticket = self.engine.pool.submit_turn(
                one.session.call,
                runnable,
                getattr(one.session, "deadline_s", None),
                parallel=getattr(one.session, "parallel", False),
            )
            self.tickets[ticket] = one
        else:
            self._observe(one, [])

    def _finish(self, one: Ongoing, stop: str) -> None:
        one.finish(stop)
        self.slots[one.slot] = None
        self.finished += 1


def _buckets(first: int, last: int) -> tuple[int, ...]:
    """Doubling sizes up to `last`, which is always one of them."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)
