"""Random trajectories, and the tiny model with adapters that do something."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import models
from grpo_jax.models import lora
from grpo_jax.training import update
from grpo_jax.training.batching import Example, collate
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import Task

VOCABULARY = models.load_config("tiny").vocab_size


def tiny_parts(dropout=0.0, mesh=None, routed=False):
    """(graph, adapters, base) of the tiny model; B of the adapters is not zero."""
    adapter = models.LoraConfig(4, 8.0, models.LORA_TARGETS, dropout, routed)
    model = models.load_model("tiny", lora=adapter, mesh=mesh)
    graph, adapters, base = lora.split(model)
    rng = np.random.default_rng(7)

    def disturb(path, x):
        noise = 0.1 * rng.standard_normal(x.shape).astype(np.float32)
        if "lora_b" not in jax.tree_util.keystr(path):
            return x
        return jax.device_put(noise, x.sharding) if x.committed else jnp.asarray(noise)

    return graph, jax.tree_util.tree_map_with_path(disturb, adapters), base


def trajectory(rng, group, member, prompt, lengths):
    """Segments after the prompt alternate MODEL, TOOL, MODEL ... with these lengths."""
    segments = [Segment.given(Source.PROMPT, prompt)]
    for i, length in enumerate(lengths):
        tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
        if i % 2:
            segments.append(Segment.given(Source.TOOL, tokens))
        else:
            logprobs = -rng.exponential(3.0, length).astype(np.float32)
            segments.append(Segment(Source.MODEL, tokens, logprobs))
    task = Task(f"task{group}", [], {})
    return Trajectory(task, group, member, segments, stop="stop")


def random_examples(seed, groups=3, members=3, longest=8, turns=3):
    """Ragged trajectories of some groups, with random advantages a turn."""
    rng = np.random.default_rng(seed)
    examples = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, longest + 1))
        for member in range(members):
            count = 2 * rng.integers(1, turns + 1) - 1
            lengths = rng.integers(1, longest + 1, count)
            one = trajectory(rng, group, member, prompt, lengths)
            advantages = rng.standard_normal(count // 2 + 1).astype(np.float32)
            examples.append(Example(one, advantages, float(advantages.sum())))
    return examples


def all_tokens(one):
    """The whole conversation, and for every token whether the model sampled it."""
    tokens = np.concatenate([segment.tokens for segment in one.segments])
    sampled = [
        np.full(len(s.tokens), s.source is Source.MODEL, bool) for s in one.segments
    ]
    return tokens, np.concatenate(sampled)


def per_token(one, values):
    """One value a turn spread over the tokens that the model sampled, 0 elsewhere."""
    turns, spread = iter(values), []
    for segment in one.segments:
        value = next(turns) if segment.source is Source.MODEL else 0.0
        spread.append(np.full(len(segment.tokens), value, np.float32))
    return np.concatenate(spread)


def tiny_batches(examples, row_length, rows):
    """Packed and placed."""
    batches = collate(examples, row_length=row_length, rows=rows)
    return [update.place(batch) for batch in batches]
