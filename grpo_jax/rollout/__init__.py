"""Rollouts: chat templates as token suffixes, the device sampler, the host engine."""

from grpo_jax.rollout.generate import generate

__all__ = ["generate"]
