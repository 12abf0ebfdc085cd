"""Scripted policies for rollouts, a room of tools, and looks at trajectories.

Only the draw is replaced: what a trajectory samples is written down beside its test,
and everything else (caches, log-probs, templates, tools, budgets) is the real thing.
"""

import contextlib
import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from grpo_jax.models.chat_template import HERMES_CHATML
from grpo_jax.rollout import sampler
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.types import Source
from tools_env.calls import format_tool_call
from tools_env.functions import FunctionEnvironment, FunctionSession
from tools_env.protocol import Task, ToolCall
from tools_env.rewards import RewardSet

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIALS += [f"<|reserved_{i}|>" for i in range(4)]


@functools.cache
def tokenizer():
    """Bytes, the merge "ab" and the turn markers: as many ids as the tiny model has."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(token_models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    marks = [AddedToken(text, normalized=False, special=True) for text in SPECIALS]
    backend.add_special_tokens(marks)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    wrapped.chat_template = HERMES_CHATML
    return wrapped


def ids(text):
    return tokenizer().encode(text, add_special_tokens=False)


END, SECOND_END = ids("<|im_end|>")[0], ids("<|reserved_0|>")[0]  # both stop a turn
A, B, AB = ids("a")[0], ids("b")[0], ids("ab")[0]


# Scripts ----------------------------------------------------------------------------

STREAMS: list[tuple[np.ndarray, list[int]]] = []  # key data, ids


@dataclasses.dataclass(frozen=True)
class Script:
    """What the trajectories of one rollout sample, in order; `key` selects it."""

    key: jax.Array
    trajectories: list[list[int]]


def script(*trajectories, end=END):
    """Each trajectory is a list of turns, texts or ids; a text gets the end id.

    Made at import: the table of all scripts is part of the one compiled program.
    """
    key = jax.random.key(len(STREAMS))
    sampled = []
    for number, turns in enumerate(trajectories):
        tokens = []
        for turn in turns:
            tokens += [*ids(turn), end] if isinstance(turn, str) else turn
        stream = jax.random.key_data(jax.random.fold_in(key, number))
        STREAMS.append((np.asarray(stream), tokens))
        sampled.append(tokens)
    return Script(key, sampled)


def call(name, **arguments):
    return format_tool_call(ToolCall(name, arguments))


@flax.struct.dataclass
class Scripted(Sampling):
    """Marks the programs whose draws are scripted."""


SCRIPTED = Scripted(temperature=0.5)


@contextlib.contextmanager
def scripted_draws():
    """Draws of a `Scripted` sampling follow the scripts; log-probs are the model's."""
    genuine = sampler.draw
    longest = max(len(tokens) for _, tokens in STREAMS)
    table = np.zeros((len(STREAMS), longest), np.int32)
    for row, (_, tokens) in zip(table, STREAMS, strict=True):
        row[: len(tokens)] = tokens
    streams = np.stack([stream for stream, _ in STREAMS])

    def draw(logits, keys, drawn, sampling):
        if not isinstance(sampling, Scripted):
            return genuine(logits, keys, drawn, sampling)
        same = jax.random.key_data(keys)[:, None] == jnp.asarray(streams)
        row = jnp.argmax(same.all(axis=-1), axis=-1)
        tokens = jnp.asarray(table)[row, jnp.minimum(drawn, longest - 1)]
        logprobs = jax.nn.log_softmax(logits / sampling.temperature)
        return tokens, jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "draw", draw)
        yield


# A room of tools --------------------------------------------------------------------


class RecordedSession(FunctionSession):
    called: list[ToolCall]
    closed: int

    def call(self, call):
        self.called.append(call)
        return super().call(call)

    def close(self):
        self.closed += 1


class Room(FunctionEnvironment):
    """An environment of typed functions that remembers its sessions."""

    def __init__(self, *functions):
        super().__init__(functions, rewards=RewardSet([]), max_result_chars=200)
        self.sessions = []

    def start(self, task):
        session = RecordedSession(self._tools, self._max_result_chars)
        session.called, session.closed = [], 0
        self.sessions.append(session)
        return session


def add(a: int, b: int) -> int:
    """Add.

    Args:
      a: One.
      b: Other.
    """
    return a + b


def div(a: int, b: int) -> float:
    """Divide.

    Args:
      a: One.
      b: Other.
    """
    return a / b


def tasks(count):
    """Prompts of different lengths."""
    texts = ["go" + "!" * number for number in range(count)]
    return [Task(text, [{"role": "user", "content": text}]) for text in texts]


# Looks at trajectories -------------------------------------------------------------


def sampled(trajectory):
    """Ids of the MODEL segments."""
    return [
        token
        for segment in trajectory.segments
        if segment.source is Source.MODEL
        for token in segment.tokens.tolist()
    ]


def sources(trajectory):
    return "".join(segment.source.value[0] for segment in trajectory.segments)


def observations(trajectory):
    """Texts of the TOOL segments."""
    return [
        tokenizer().decode(segment.tokens)
        for segment in trajectory.segments
        if segment.source is Source.TOOL
    ]


def prefill_of(trajectories):
    """Prompt tokens once a group, and the TOOL tokens."""
    prompts = {t.group: len(t.prompt) for t in trajectories}
    results = [
        len(segment.tokens)
        for trajectory in trajectories
        for segment in trajectory.segments
        if segment.source is Source.TOOL
    ]
    return sum(prompts.values()) + sum(results)
