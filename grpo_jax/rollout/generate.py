"""Plain generation from a model: prompts of ids in, sampled ids and log-probs out.

The sampler's programs without tools or chats, for users, notebooks and checks. Random
streams and log-probs are those of `rollout.sampler`.
"""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.models import lora
from grpo_jax.models.decoder import Decoder
from grpo_jax.rollout import sampler
from grpo_jax.rollout.sampler import RUNNING, STOPPED, Sampling

FEW, MANY = 8, 32  # rows decoded at a time: two sizes, so that little is compiled
CHUNK = 64  # prompt tokens a row of one `extend`
STEPS = 64  # decode steps of one program

Generated = tuple[list[int], list[float], str]


def generate(
    model: Decoder,
    prompts: Sequence[ArrayLike],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
) -> list[Generated]:
    """Sample a continuation of every prompt: (tokens, logprobs, stop) a prompt.

    Row i draws from stream fold_in(key(seed), i), whatever the other prompts are.
    Log-probs are natural, of log_softmax(logits / temperature) over the full
    vocabulary (temperature 0: argmax, and those of the raw logits). A sampled stop id
    is included and gives "stop"; max_new_tokens without one give "length".

    Raises ValueError naming the prompt or the setting that is out of range.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    sampling = _sampling(temperature, top_k, top_p)
    rows = [
        _checked(i, prompt, model.config.vocab_size) for i, prompt in enumerate(prompts)
    ]
    key, stops = jax.random.key(seed), np.asarray(sorted(stop_ids), np.int32)
    results: list[Generated] = []
    size = FEW if len(rows) <= FEW else MANY
    for start in range(0, len(rows), size):
        streams = start + np.arange(size)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, streams)
        part = rows[start : start + size]
        results += _batch(model, part, keys, max_new_tokens, sampling, stops)
    return results


def _batch(
    model: Decoder,
    prompts: list[np.ndarray],
    keys: jax.Array,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: np.ndarray,
) -> list[Generated]:
    """Generate from up to len(keys) prompts, one a slot; key i is row i's stream."""
    parts, slots = lora.split(model), len(keys)
    decoder = lora.for_decoding(*parts)
    longest = max(len(prompt) for prompt in prompts)
    length = -(-(longest + max_new_tokens) // 64) * 64
    dtype = model.norm.scale[...].dtype
    state = sampler.empty_state(model.config, slots, length, dtype).replace(keys=keys)
    shape = dict(rows=slots, chunk=CHUNK, live=length)
    state = sampler.append(*parts, state, range(len(prompts)), prompts, **shape)
    left = np.where(np.arange(slots) < len(prompts), max_new_tokens, 0)
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    stops = ["length"] * len(prompts)
    while left.any():
        state, burst = sampler.decode(
            *decoder,
            state,
            None,
            left.astype(np.int32),
            stop_ids,
            sampling=sampling,
            steps=STEPS,
            live=length,
        )
        burst = jax.device_get(burst)
        for row in np.flatnonzero(left):
            tokens[row] += burst.tokens[row, : burst.counts[row]].tolist()
            logprobs[row] += burst.logprobs[row, : burst.counts[row]].tolist()
            if burst.status[row] == STOPPED:
                stops[row] = "stop"
        left = np.where(burst.status == RUNNING, left - burst.counts, 0)
    return list(zip(tokens, logprobs, stops, strict=True))


def _sampling(temperature: float, top_k: int, top_p: float) -> Sampling:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be finite and >= 0, not {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be >= 0 (0 is off), not {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], not {top_p}")
    return Sampling(float(temperature), int(top_k), float(top_p))


def _checked(index: int, prompt: ArrayLike, size: int) -> np.ndarray:
    """The ids of a prompt, or ValueError saying what is wrong with which."""
    ids = np.asarray(prompt)
    if not ids.size:
        raise ValueError(f"prompt {index} is empty")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompt {index} is not a list of ids: {prompt!r:.80}")
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.size:
        raise ValueError(
            f"prompt {index} has id {outside[0]}, outside the vocabulary of {size}"
        )
    return ids.astype(np.int32)
