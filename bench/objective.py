"""What the objective costs, as ratios measured in one run.

Kernel: NGRPO advantages, CTPO loss and the likelihood-displacement penalty, value and
gradient with respect to the log-probs, against the plain token-ratio GRPO loss on the
same arrays. Times are CPU seconds of this process, the least of several runs, taken in
turn, so that another load on the machine disturbs all of them alike.

Command: python -m bench.objective [--rows=64] [--length=32768] [--repeats=15] [--tpu]

--tpu compiles the kernel for a v5e:4x4 mesh instead (needs libtpu, no TPU) and counts
the collectives that move whole [B,T] arrays.
"""

import argparse
import re
import time

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import objective

GROUP = 16
CTPO = {
    "ratio": "cumulative",
    "clip": "sqrt_log",
    "epsilon": 0.025,
    "epsilon_high": 0.05,
    "aggregation": "seq_mean_token_mean",
}


def plain(new, old, rewards, mask, segment_ids=None):
    """GRPO: group advantages and the token ratio."""
    advantages = _advantages(rewards, segment_ids)
    loss = objective.policy_loss(new, old, advantages, mask, segment_ids=segment_ids)
    return loss.loss


def kernel(new, old, rewards, mask, segment_ids=None):
    """NGRPO, CTPO and LLDS."""
    advantages = _advantages(rewards, segment_ids, virtual_reward=1.0)
    policy = objective.policy_loss(
        new, old, advantages, mask, segment_ids=segment_ids, **CTPO
    )
    total, weight = objective.lld_penalty(
        new, old, advantages, mask, segment_ids=segment_ids
    )
    return policy.loss + 0.2 * total / jnp.maximum(weight, 1.0)


def _advantages(rewards, segment_ids, **options):
    """[B], or of the packed segment's trajectory [B,T]: `rewards` has B or B * S."""
    groups = rewards.reshape(-1, GROUP)
    advantages = objective.group_advantages(groups, **options).reshape(-1)
    if segment_ids is None:
        return advantages
    # On the host in training (batching.collate); here by equal segments.
    rows, length = segment_ids.shape
    return jnp.repeat(advantages, rows * length // advantages.size).reshape(rows, -1)


def random_arrays(rows, length, segments):
    """Log-probs, rewards and masks with a tool result in every 4096 tokens."""
    rng = np.random.default_rng(0)
    new, old = 0.04 * rng.standard_normal((2, rows, length), np.float32) - 1.0
    mask = np.arange(length) % 4096 < 3072
    mask = np.broadcast_to(mask, (rows, length))
    if length % segments:
        raise SystemExit(f"--length={length} is not a multiple of {segments} segments")
    ids = np.repeat(np.arange(1, segments + 1), length // segments)
    ids = np.broadcast_to(ids, (rows, length))
    rewards = rng.integers(0, 2, (2, rows * segments)).astype(np.float32)
    arrays = new, old, rewards[0, :rows], mask
    packed = new, old, rewards[1], mask, ids.astype(np.int32)
    return jax.device_put(arrays), jax.device_put(packed)


def measure(cases, repeats):
    """Least CPU seconds and bytes of each compiled case, run in turn."""
    programs = {
        name: (jax.jit(jax.value_and_grad(function)).lower(*arrays).compile(), arrays)
        for name, (function, arrays) in cases.items()
    }
    seconds = dict.fromkeys(programs, np.inf)
    for repeat in range(repeats + 1):
        for name, (program, arrays) in programs.items():
            start = time.process_time()
            jax.block_until_ready(program(*arrays))
            if repeat:  # the first run is a warm-up
                seconds[name] = min(seconds[name], time.process_time() - start)
    sizes = {}
    for name, (program, _) in programs.items():
        memory = program.memory_analysis()
        sizes[name] = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return seconds, sizes


def report(rows, length, repeats):
    arrays, packed = random_arrays(rows, length, segments=8)
    scan = (lambda x, *_: jnp.sum(jax.lax.associative_scan(jnp.add, x, axis=1)), arrays)
    cases = {
        "plain": (plain, arrays),
        "kernel": (kernel, arrays),
        "packed": (kernel, packed),
        "scan": scan,
    }
    seconds, sizes = measure(cases, repeats)
    array = 4 * rows * length
    print(f"{rows} x {length} float32 tokens, {array / 2**20:.0f} MiB an array")
    for name in cases:
        print(
            f"{name:<8} {1e3 * seconds[name]:8.1f} ms  "
            f"{seconds[name] / seconds['plain']:5.1f} x plain  "
            f"{sizes[name] / array:5.1f} arrays beside the inputs"
        )
    print(f"packed / unpacked: {seconds['packed'] / seconds['kernel']:.2f}")


def report_tpu(rows, length):
    """Collectives of the kernel on a v5e:4x4 mesh with rows over all its chips."""
    from jax.experimental import topologies

    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
    mesh = jax.sharding.Mesh(np.array(chips.devices), ("batch",))
    by_row = jax.NamedSharding(mesh, jax.P("batch"))
    arrays, packed = random_arrays(rows, 64, segments=8)
    for name, inputs in (("kernel", arrays), ("packed", packed)):
        shapes = [
            jax.ShapeDtypeStruct(
                (rows, length) if x.ndim == 2 else x.shape, x.dtype, sharding=by_row
            )
            for x in inputs
        ]
        program = jax.jit(jax.value_and_grad(kernel)).lower(*shapes).compile()
        found = re.findall(
            r"= *(\S+) (all-gather|all-to-all|all-reduce|collective-permute)",
            program.as_text(),
        )
        large = [shape for shape, _ in found if str(length) in shape]
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        print(
            f"{name}: {len(found)} collectives, {len(large)} of whole arrays, "
            f"{memory:.0f} MiB a chip"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tpu", action="store_true")
    args = parser.parse_args()
    if args.tpu:
        report_tpu(args.rows, args.length)
    else:
        report(args.rows, args.length, args.repeats)


if __name__ == "__main__":
    main()
