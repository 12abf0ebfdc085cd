"""Log-probs of given tokens without a [B,T,V] array.

The vocabulary is visited a chunk of positions at a time, action tokens first, and
chunks without any are skipped. The backward pass needs no second visit: the forward
pass leaves behind how each log-prob moves its hidden state.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.devices import shard
from grpo_jax.models.blockwise import Packing
from grpo_jax.models.decoder import Decoder
from grpo_jax.types import TrajectoryBatch

CHUNK = 128  # positions of a row whose logits exist at one time


def adapter_routes(batch: TrajectoryBatch) -> Int[Array, "B T"]:
    """Which routed adapter processes each token: the role of what it predicts.

    A prompt's last token predicts the first one of every member, whose role is 0.
    """

    def row(previous, roles):
        return jnp.zeros_like(roles).at[previous].max(roles)

    return jax.vmap(row)(batch.previous, batch.roles)


def predicting_hidden(
    model: Decoder, batch: TrajectoryBatch, *, dropout_key=None, remat: bool = False
) -> Float[Array, "B T D"]:
    """For every token the hidden state that predicts it.

    The one place where predictions are shifted to the tokens they predict.
    """
    hidden = model.hidden(
        batch.tokens,
        batch.positions,
        Packing(batch.segment_ids, batch.prefix_ids),
        routes=adapter_routes(batch),
        dropout_key=dropout_key,
        remat=remat,
    )
    return jnp.take_along_axis(hidden, batch.previous[:, :, None], axis=1)


def batch_logprobs(
    model: Decoder,
    batch: TrajectoryBatch,
    temperature: float,
    *,
    dropout_key=None,
    remat: bool = False,
    entropy_slope: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(token | what it follows) and the entropy there, 0 off action tokens.

    Natural log of softmax(logits / temperature) (temperature 0: of the raw logits),
    float32. The entropy carries a gradient only with `entropy_slope`: a second product
    with the head.
    """
    predicting = predicting_hidden(model, batch, dropout_key=dropout_key, remat=remat)
    tied = model.config.tied
    # Gathered once, not for every chunk.
    if tied:
        head = shard(model.embed["table"][...], "vocab", None)
    else:
        head = shard(model.head["kernel"][...], None, "vocab")
    predicting = shard(predicting, "batch", None, None)
    return token_logprobs(
        *(predicting, head, batch.tokens, batch.action_mask, temperature or 1.0),
        tied=tied,
        entropy_slope=entropy_slope,
    )


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "X Y"],
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    temperature: float,
    tied: bool = False,
    entropy_slope: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probs and entropies where the mask is True; differentiable in `hidden`.

    Of the entropies only with `entropy_slope`. The head is [D,V], or [V,D] if `tied`:
    an embedding table is never transposed.
    """
    order = jnp.argsort(~mask, axis=1, stable=True)
    back = jnp.argsort(order, axis=1)
    size = min(CHUNK, tokens.shape[1])
    pad = -tokens.shape[1] % size

    def chunks(x):
        x = jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), 1)
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)

    def step(_, inputs):
        piece, ids, live = inputs
        form = {"tied": tied, "entropy_slope": entropy_slope}
        chosen = functools.partial(_chunk, temperature=temperature, **form)
        return None, jax.lax.cond(jnp.any(live), chosen, _nothing, piece, head, ids)

    inputs = (chunks(hidden), chunks(tokens), chunks(mask))
    _, (logprobs, entropies) = jax.lax.scan(step, None, inputs)

    def rows(x):
        x = x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, : tokens.shape[1]]
        return jnp.where(mask, jnp.take_along_axis(x, back, axis=1), 0.0)

    return rows(logprobs), rows(entropies)


def _nothing(hidden, head, tokens):
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    return zeros, zeros


@functools.partial(
    jax.custom_vjp, nondiff_argnames=("temperature", "tied", "entropy_slope")
)
def _chunk(hidden, head, tokens, temperature, tied, entropy_slope):
    exps, total, shift, chosen = _softmax(hidden, head, tokens, temperature, tied)
    # sum_v p_v logit_v without a second array of this size: exp's argument is at hand.
    logs = jnp.where(exps > 0, jnp.log(exps), 0.0)
    entropies = jnp.log(total) - jnp.sum(exps * logs, axis=-1) / total
    return chosen - (shift + jnp.log(total)), entropies


def _softmax(hidden, head, tokens, temperature, tied):
    """exp(logits - shift) [B,C,V], its sums, the shift and the tokens' logits [B,C]."""
    form = "btd,vd->btv" if tied else "btd,dv->btv"
    logits = jnp.einsum(form, hidden, head, preferred_element_type=jnp.float32)
    logits = logits / temperature
    shift = jnp.max(logits, axis=-1)
    exps = jnp.exp(logits - shift[..., None])
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return exps, jnp.sum(exps, axis=-1), shift, chosen


def _chunk_forward(hidden, head, tokens, temperature, tied, entropy_slope):
    exps, total, shift, chosen = _softmax(hidden, head, tokens, temperature, tied)
    # d logprob / d hidden = (head of the token - sum_v p_v head_v) / temperature
    expected = _head_rows(exps, head, tied) / total[..., None]
    own = head[tokens] if tied else head.T[tokens]
    direction = (own.astype(jnp.float32) - expected) / temperature
    # The mean logit is that of the mean head row.
    mean = jnp.sum(hidden.astype(jnp.float32) * expected, axis=-1) / temperature
    log_total = shift + jnp.log(total)
    outputs = (chosen - log_total, jnp.maximum(log_total - mean, 0.0))
    spread = None
    if entropy_slope:
        # d entropy / d hidden = -sum_v p_v (logit_v - mean logit) head_v / temperature
        logs = jnp.where(exps > 0, jnp.log(exps), 0.0) + (shift - mean)[..., None]
        moved = _head_rows(exps * logs, head, tied)
        spread = -moved / (total[..., None] * temperature)
    return outputs, (direction, spread, jnp.zeros((), hidden.dtype))


def _head_rows(weights, head, tied):
    """Sum of the head's rows, one a token of the vocabulary, by weight: [B,C,D]."""
    form = "btv,vd->btd" if tied else "btv,dv->btd"
    weights = weights.astype(head.dtype)
    return jnp.einsum(form, weights, head, preferred_element_type=jnp.float32)


def _chunk_backward(temperature, tied, entropy_slope, residuals, cotangents):
    direction, spread, like = residuals
    gradient = _along(direction, cotangents[0])
    if entropy_slope:
        gradient += _along(spread, cotangents[1])
    return gradient.astype(like.dtype), None, None


def _along(direction, cotangent):
    """Their product, 0 where nothing is asked for: a token that is not finite, which
    the loss has masked, must not make NaN * 0 of the whole gradient."""
    cotangent = cotangent[..., None]
    return jnp.where(cotangent == 0, 0.0, direction * cotangent)


_chunk.defvjp(_chunk_forward, _chunk_backward)
