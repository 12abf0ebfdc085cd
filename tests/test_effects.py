"""What each method is for, on a policy of a few numbers and two updates a batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import objective

# A right answer and three wrong ones of the same tokens.
TOKENS = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 1], [1, 0, 1]])
MASK = np.ones(TOKENS.shape, bool)


def logprobs(logits, tokens=TOKENS):
    """Log-probs of tokens drawn independently of each other."""
    return jax.nn.log_softmax(logits)[tokens]


@functools.partial(jax.jit, static_argnames="lld")
def updated(logits, old, advantages, lld):
    """One step of gradient descent on the policy loss and the LLD penalty."""

    def loss(logits):
        new = logprobs(logits)
        policy = objective.policy_loss(new, old, advantages, MASK).loss
        total, weight = objective.lld_penalty(new, old, advantages, MASK)
        return policy + lld * total / jnp.maximum(weight, 1.0)

    return logits - 0.5 * jax.grad(loss)(logits)


def drop_of_good_row(lld, updates):
    """Log-likelihood that the right answer lost to its wrong peers, nats."""
    advantages = jnp.array([0.3, -0.8, -0.8, -0.8])
    logits = jnp.zeros(8).at[:2].set(2.0)
    old = logprobs(logits)
    for _ in range(updates):
        logits = updated(logits, old, advantages, lld)
    return float((old - logprobs(logits))[0].sum())


def test_llds_lowers_the_likelihood_drop_of_correct_rows():
    """What they share falls with the wrong rows, and the right one with it."""
    without, with_penalty = drop_of_good_row(0.0, 4), drop_of_good_row(1.0, 4)
    assert without > 0.2 and with_penalty < 0.5 * without
    # Inert in the first update, in which the policy is still the old one.
    assert drop_of_good_row(1.0, 1) == drop_of_good_row(0.0, 1)


def test_ngrpo_learns_from_an_all_wrong_group_and_grpo_does_not():
    rewards, logits = jnp.zeros((1, 4)), jnp.zeros(8)

    def slope(**options):
        advantages = objective.group_advantages(rewards, **options).reshape(-1)

        def loss(logits):
            new = logprobs(logits)
            old = jax.lax.stop_gradient(new)
            return objective.policy_loss(new, old, advantages, MASK).loss

        return jax.grad(loss)(logits)

    assert (slope() == 0).all()
    down = slope(virtual_reward=1.0)
    assert (down[:2] > 0.05).all() and (
        down[2:] < 0
    ).all()  # away from what was sampled


def test_gtpo_credits_a_good_late_turn_above_a_bad_early_one():
    """One trajectory: a malformed call, a useful one, the right answer; another fails.
    GRPO gives the first call the answer's full credit."""
    rewards = np.array([[[-0.1, 0.0, 1.0], [0.0, 0.0, 0.0]]])
    turns = objective.turn_advantages(rewards, np.ones((1, 2, 3), bool), gamma=0.9)
    assert turns[0, 0, 0] < turns[0, 0, 1] < turns[0, 0, 2]
    assert turns[0, 0, 2] - turns[0, 0, 0] > 0.3


def test_gtpo_without_a_discount_still_credits_what_a_turn_earned():
    """gamma 1: the malformed call counts against the turns up to its own alone, and
    equal successes of any length are worth nothing, where .9 would rank their turns."""
    mask = np.ones((1, 2, 3), bool)
    rewards = np.array([[[-0.1, 0.0, 1.0], [0.0, 0.0, 0.0]]])
    turns = objective.turn_advantages(rewards, mask, gamma=1.0)
    assert turns[0, 0, 0] < turns[0, 0, 1] == turns[0, 0, 2]
    equal = np.array([[[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
    mask[0, 1, 2] = False
    assert (objective.turn_advantages(equal, mask, gamma=1.0) == 0).all()
    assert (objective.turn_advantages(equal, mask, gamma=0.9) != 0).any()
