"""Scans along the last axis that restart at marked positions.

Every row-level or segment-level quantity of the objective is one of these, so packed
rows cost O(B*T) memory, whatever the number of segments. A `starts` mask marks the
first position of each segment; None means that each row is one segment. Scans rather
than scatter-adds: they are deterministic on a GPU and need no collective when the
batch axis is sharded. Long rows are scanned in blocks of 8, which takes half the time
and a fraction of the memory of one `lax.associative_scan` over pairs
(bench/objective.py); what is left of them goes through that.

    x              .1  .2  .3 -.1  .4
    starts          1   0   1   0   0
    running_sum    .1  .3  .3  .2  .6
    segment_sum    .3  .3  .6  .6  .6
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

BLOCK = 8
START = 1 << 30  # marks a start in a count, which is below it


def changes(ids: Int[Array, "*R T"]) -> Bool[Array, "*R T"]:
    """True where an id differs from the one before it, and at the first position."""
    first = jnp.ones_like(ids[..., :1], bool)
    return jnp.concatenate([first, ids[..., 1:] != ids[..., :-1]], axis=-1)


def segment_starts(
    segment_ids: Int[Array, "*R T"] | None,
) -> Bool[Array, "*R T"] | None:
    """Starts of packed segments (contiguous ids); None for unpacked rows."""
    return None if segment_ids is None else changes(segment_ids)


def run_starts(
    mask: Bool[Array, "*R T"], starts: Bool[Array, "*R T"] | None
) -> Bool[Array, "*R T"]:
    """Starts of maximal runs of True that do not cross a segment.

    Masked positions belong to the run before them, where they must add nothing.
    """
    begins = mask & changes(mask.astype(jnp.int32))
    return begins if starts is None else begins | starts


def turn_starts(
    turn_ids: Int[Array, "*R T"],
    mask: Bool[Array, "*R T"],
    starts: Bool[Array, "*R T"] | None,
) -> Bool[Array, "*R T"]:
    """Starts of turns; a masked token inside a turn does not cut it in two."""
    known = jnp.where(mask, turn_ids, -1)
    filled = lax.associative_scan(
        lambda left, right: jnp.where(right >= 0, right, left), known, axis=-1
    )
    return changes(filled) if starts is None else changes(filled) | starts


def running_sum(
    x: Num[Array, "*R T"], starts: Bool[Array, "*R T"] | None = None
) -> Num[Array, "*R T"]:
    """Inclusive sums since the last start."""
    if starts is None:
        return _scan(lambda left, right: (left[0] + right[0],), (x,))[0]

    def combine(left, right):
        return left[0] | right[0], jnp.where(right[0], right[1], left[1] + right[1])

    return _scan(combine, (starts, x))[1]


def running_count(
    mask: Bool[Array, "*R T"], starts: Bool[Array, "*R T"] | None = None
) -> Int[Array, "*R T"]:
    """How many positions are True since the last start, this one included.

    As `running_sum`, with the starts as a bit of the counts: one array to scan.
    """
    counts = mask.astype(jnp.int32)
    if starts is None:
        return running_sum(counts)
    return _scan(_since_start, (counts + START * starts,))[0] & (START - 1)


def running_sum_and_count(
    x: Float[Array, "*R T"],
    mask: Bool[Array, "*R T"],
    starts: Bool[Array, "*R T"] | None = None,
) -> tuple[Float[Array, "*R T"], Int[Array, "*R T"]]:
    """`running_sum` of x and `running_count` of the mask in one scan of two arrays.

    Under one jit a `running_count` of the same mask costs nothing more: its operations
    are among these.
    """
    counts = mask.astype(jnp.int32)
    if starts is None:
        return running_sum(x), running_sum(counts)
    marked, sums = _scan(_since_start, (counts + START * starts, x))
    return sums, marked & (START - 1)


def _since_start(left: tuple, right: tuple) -> tuple:
    """Sums that begin anew at a start, which the first of them, a count, marks."""
    anew = right[0] >= START
    return tuple(jnp.where(anew, b, a + b) for a, b in zip(left, right, strict=True))


def segment_count(
    mask: Bool[Array, "*R T"], starts: Bool[Array, "*R T"] | None = None
) -> Int[Array, "*R T"]:
    """How many positions of the whole segment are True, the same at all of them.

    As `segment_sum`, at half of its cost where `running_count` of the mask is at
    hand: a count says by itself, as one more than it is, that there is one.
    """
    if starts is None:
        return segment_sum(mask.astype(jnp.int32))
    ends = jnp.where(_ends(starts), running_count(mask, starts) + 1, 0)
    nearest = _scan(
        lambda later, earlier: (jnp.where(earlier[0] > 0, earlier[0], later[0]),),
        (ends,),
        reverse=True,
    )
    return nearest[0] - 1


def segment_sum(
    x: Num[Array, "*R T"], starts: Bool[Array, "*R T"] | None = None
) -> Num[Array, "*R T"]:
    """The sum over a position's whole segment, the same value at all its positions."""
    if starts is None:
        return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)

    def latest(later, earlier):  # reverse scan: the first operand is later in time
        value = jnp.where(earlier[0], earlier[1], later[1])
        return later[0] | earlier[0], value

    sums = running_sum(x, starts)
    return _scan(latest, (_ends(starts), sums), reverse=True)[1]


def _ends(starts: Bool[Array, "*R T"]) -> Bool[Array, "*R T"]:
    """Last positions of the segments that begin at `starts`."""
    return jnp.concatenate([starts[..., 1:], jnp.ones_like(starts[..., :1])], axis=-1)


def _scan(
    combine: Callable, elements: tuple[jax.Array, ...], reverse: bool = False
) -> tuple[jax.Array, ...]:
    """`lax.associative_scan` along the last axis; zeros must be combine's identity.

    A block of neighbours is scanned one after the other, for all blocks at a time; the
    blocks' totals, an eighth as many, are scanned in the same way.
    """
    axis, length = elements[0].ndim - 1, elements[0].shape[-1]
    if length <= BLOCK or length % BLOCK:
        scanned = lax.associative_scan(combine, elements, reverse=reverse, axis=axis)
        return tuple(scanned)
    order = range(BLOCK)[::-1] if reverse else range(BLOCK)
    columns = [tuple(x[..., k::BLOCK] for x in elements) for k in order]
    within = list(itertools.accumulate(columns, combine))
    before = tuple(_shift(x, reverse) for x in _scan(combine, within[-1], reverse))
    done = [combine(before, column) for column in within]
    done = done[::-1] if reverse else done
    return tuple(
        jnp.stack(column, axis=-1).reshape(x.shape)
        for column, x in zip(zip(*done, strict=True), elements, strict=True)
    )


def _shift(x: jax.Array, reverse: bool) -> jax.Array:
    """Each position's value at its neighbour, zeros where it has none."""
    fill = jnp.zeros_like(x[..., :1])
    parts = (x[..., 1:], fill) if reverse else (fill, x[..., :-1])
    return jnp.concatenate(parts, axis=-1)


def discounted_sum(
    x: Float[Array, "*R M"], decay: Float[Array, "*R M"]
) -> Float[Array, "*R M"]:
    """y_k = x_k + decay_k * y_{k+1}, from the last position back."""

    def combine(later, earlier):
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    return lax.associative_scan(combine, (decay, x), reverse=True, axis=x.ndim - 1)[1]
