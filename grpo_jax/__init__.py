"""Reinforcement learning of tool use for small language models, in JAX.

Rooms in reading (and import) order: types, devices, models, rollout, objective,
training, data, checkpoints, metrics, monitor, report, evaluate, plan, trainer.
Tasks and tools live in the sister package `tools_env`, which imports no JAX.
"""
