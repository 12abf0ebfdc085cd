"""What the objective costs, as ratios measured in one run.

Kernel: NGRPO advantages, CTPO loss and the likelihood-displacement penalty, value and
gradient with respect to the log-probs, against the plain token-ratio GRPO loss on the
same arrays. Times are CPU seconds of this process, the least of several runs, taken in
turn, so that another load on the machine disturbs all of them alike.

Command: python -m bench.objective [--rows=64] [--length=32768] [--repeats=15]
  [--update] [--tpu]

--update also times an optimizer update of a random decoder of 40M parameters (LoRA on
all projections, float32) and divides the kernel's time a token by the update's.
--tpu compiles the kernel for a v5e:4x4 mesh instead (needs libtpu, no TPU) and counts
the collectives that move whole [B,T] arrays.
"""

import argparse
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grpo_jax import objective
from grpo_jax.models import Decoder, LoraConfig, ModelConfig, lora
from grpo_jax.training import update
from grpo_jax.training.batching import Example, collate
from grpo_jax.training.update import Loss
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import Task

GROUP = 16
# Of a compiled program's text: shapes and kind of a collective, asynchronous ones too.
COLLECTIVE = re.compile(
    r"= (.+?) (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)
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
    return seconds["packed"] / (rows * length)


def update_seconds(repeats, rows=4, length=128):
    """Least CPU seconds a token of an update of 40M parameters, scoring included."""
    shape = dict(width=512, num_layers=8, num_heads=8, num_kv_heads=2, mlp_width=1408)
    rest = dict(head_width=64, norm_eps=1e-5, rope_theta=1e5, rope_scaling=None)
    config = ModelConfig(
        **(shape | rest),
        vocab_size=32_000,
        qkv_bias=False,
        qk_norm=False,
        tied=True,
        max_positions=4096,
        architecture="llama",
    )
    model = Decoder(config, LoraConfig(16, 32.0), rngs=nnx.Rngs(0))
    graph, adapters, base = lora.split(model)
    rng = np.random.default_rng(0)
    examples = [_example(rng, config.vocab_size, i, length) for i in range(rows)]
    (batch,) = collate(examples, row_length=length, rows=rows)
    batch = update.place(batch)
    optimizer = update.make_optimizer(1e-5, warmup_steps=1, total_steps=100)
    state = update.new_state(adapters, optimizer, jax.random.key(0))
    loss, least = Loss(kind="policy"), np.inf
    for repeat in range(repeats + 1):
        start = time.process_time()
        old = update.score(graph, state.adapters, base, batch, temperature=1.0)
        state, pairs = update.minibatch(
            graph, base, state, [batch.replace(old_logprobs=old)], optimizer, loss
        )
        jax.block_until_ready((state.adapters, pairs))
        if repeat:  # the first run compiles
            least = min(least, time.process_time() - start)
    return least / (rows * length)


def _example(rng, size, group, length):
    """A prompt of an eighth of the tokens, and an answer."""
    tokens = rng.integers(0, size, length).astype(np.int32)
    prompt, answer = np.split(tokens, [length // 8])
    pieces = [Segment.given(Source.PROMPT, prompt), Segment.given(Source.MODEL, answer)]
    one = Trajectory(Task(str(group), []), group, 0, pieces)
    return Example(one, np.ones(1, np.float32), 1.0)


def compiled(inputs, rows, length, mesh):
    """The kernel on a mesh of one axis, rows over its devices; compiled, not run."""
    by_row = jax.NamedSharding(mesh, jax.P(mesh.axis_names[0]))
    shapes = [
        jax.ShapeDtypeStruct(
            (rows, length) if x.ndim == 2 else x.shape, x.dtype, sharding=by_row
        )
        for x in inputs
    ]
    return jax.jit(jax.value_and_grad(kernel)).lower(*shapes).compile()


def collectives(program):
    """(shapes, kind) of every collective of a compiled program."""
    return COLLECTIVE.findall(program.as_text())


def report_tpu(rows, length):
    """Collectives of the kernel on a v5e:4x4 mesh with rows over all its chips."""
    from jax.experimental import topologies

    chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4")
    mesh = jax.sharding.Mesh(np.array(chips.devices), ("batch",))
    arrays, packed = random_arrays(rows, 64, segments=8)
    for name, inputs in (("kernel", arrays), ("packed", packed)):
        program = compiled(inputs, rows, length, mesh)
        found = collectives(program)
        large = [shape for shape, _ in found if re.search(rf"\b{length}\b", shape)]
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
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--tpu", action="store_true")
    args = parser.parse_args()
    if args.tpu:
        report_tpu(args.rows, args.length)
        return
    kernel_s = report(args.rows, args.length, args.repeats)
    if args.update:
        update_s = update_seconds(min(args.repeats, 3))
        print(
            f"packed kernel {1e9 * kernel_s:.1f} ns a token, update of 40M parameters "
            f"{1e9 * update_s:.0f} ns a token: {kernel_s / update_s:.3%}"
        )


if __name__ == "__main__":
    main()
