"""Seconds of this project's rollouts and updates, the machine's peak beside them.

    python bench/run.py --model M2 --only W1,W2 --rounds 5

Each round times the matrix peak and then every workload once, so that a noisy moment
hits all of them; printed are medians and ranges. float32, LoRA of rank 16 on all seven
projections, random weights and prompts, no stop ids: every trajectory has its full
length. M1 is 512 wide with 8 layers and 32,000 words; M2 has SmolLM2-135M's shape.

No figures of it stand in the documents yet: it has not been run to its end.

W1  decode: 32 distinct prompts of 96 tokens, 128 new ones each
W2  update: 32 x (96 + 128) tokens, reference KL, micro-batches of 8
W3  four turns in kept caches: 32 new tokens, then 24 of a result, 32 trajectories
W4  a whole step: 8 prompts x 4, shapes of W1 and W2
W5  a step with long prompts: 4 x 1,024 tokens, groups of 8, 96 new, KL weight .04
"""

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_jax.models import Decoder, LoraConfig, ModelConfig, lora
from grpo_jax.rollout import sampler
from grpo_jax.rollout.generate import generate
from grpo_jax.rollout.sampler import Sampling
from grpo_jax.training import update
from grpo_jax.training.batching import Example, collate
from grpo_jax.training.update import Loss
from grpo_jax.types import Segment, Source, Trajectory
from tools_env.protocol import Task, Turn

SHAPES = {
    "M1": dict(width=512, num_layers=8, num_heads=8, num_kv_heads=2, mlp_width=1408),
    "M2": dict(width=576, num_layers=30, num_heads=9, num_kv_heads=3, mlp_width=1536),
}
VOCABULARY = {"M1": 32_000, "M2": 49_152}
NO_STOP = np.array([-1], np.int32)


def build(name: str) -> Decoder:
    """A decoder with random weights and adapters."""
    config = ModelConfig(
        vocab_size=VOCABULARY[name],
        head_width=64,
        norm_eps=1e-5,
        rope_theta=1e5,
        rope_scaling=None,
        qkv_bias=False,
        qk_norm=False,
        tied=True,
        max_positions=4096,
        architecture="llama",
        **SHAPES[name],
    )
    return Decoder(config, LoraConfig(16, 32.0), rngs=nnx.Rngs(0))


class Workloads:
    """Each method does one workload's whole work once."""

    def __init__(self, model: Decoder):
        self.model, self.size = model, model.config.vocab_size
        self.parts = lora.split(model)
        self.optimizer = update.make_optimizer(1e-5, warmup_steps=1, total_steps=100)
        self.prompts = self._prompts(32, 96)
        self.long_prompts = self._prompts(4, 1024)

    def W1(self) -> None:
        self._generate(self.prompts, 128)

    def W2(self) -> None:
        completions = self._prompts(32, 128)
        self._update(list(range(32)), self.prompts, completions, 224, 8, beta=0.04)

    def W3(self) -> None:
        parts, slots = self.parts, 32
        decoder = lora.for_decoding(*parts)
        length = 96 + 4 * (32 + 24)
        length += -length % 64
        state = sampler.empty_state(self.model.config, slots, length, jnp.float32)
        texts = self.prompts
        for _ in range(4):
            shape = dict(rows=slots, chunk=32, live=length)
            state = sampler.append(*parts, state, range(slots), texts, **shape)
            budgets = np.full(slots, 32, np.int32)
            options = dict(sampling=Sampling(), steps=32, live=length)
            state, burst = sampler.decode(
                *decoder, state, None, budgets, NO_STOP, **options
            )
            last = np.asarray(burst.tokens)[:, -1:]  # sampled, not in the cache yet
            texts = np.concatenate([last, self._prompts(slots, 24)], axis=1)

    def W4(self) -> None:
        groups = np.repeat(np.arange(8), 4)
        prompts = self.prompts[groups]
        completions = self._generate(prompts, 128)
        self._update(groups, prompts, completions, 96 + 4 * 128, 2, beta=0.04)

    def W5(self) -> None:
        groups = np.repeat(np.arange(4), 8)
        prompts = self.long_prompts[groups]
        completions = self._shared(self.long_prompts, 8, 96)
        self._update(groups, prompts, completions, 1024 + 8 * 96, 1, beta=0.04)

    def _prompts(self, rows: int, length: int) -> np.ndarray:
        generator = np.random.default_rng(rows * length)
        return generator.integers(0, self.size, (rows, length)).astype(np.int32)

    def _generate(self, prompts: np.ndarray, count: int) -> np.ndarray:
        results = generate(self.model, prompts, max_new_tokens=count)
        return np.array([tokens for tokens, _, _ in results], np.int32)

    def _shared(self, prompts: np.ndarray, members: int, count: int) -> np.ndarray:
        """Sample groups whose prompt is computed once and copied."""
        parts, rows = self.parts, len(prompts)
        decoder, key = lora.for_decoding(*parts), jax.random.key(0)
        length = prompts.shape[1] + count
        length += -length % 64
        filled = sampler.empty_state(self.model.config, rows, length, jnp.float32)
        shape = dict(rows=rows, chunk=256, live=prompts.shape[1])
        filled = sampler.append(*parts, filled, range(rows), prompts, **shape)
        slots = rows * members
        state = sampler.empty_state(self.model.config, slots, length, jnp.float32)
        for slot in range(slots):
            state = sampler.place(state, filled, slot // members, slot, key, slot)
        budgets = np.full(slots, count, np.int32)
        options = dict(sampling=Sampling(), steps=count, live=length)
        _, burst = sampler.decode(*decoder, state, None, budgets, NO_STOP, **options)
        return np.asarray(burst.tokens)

    def _update(self, groups, prompts, completions, row_length, rows, *, beta) -> None:
        """Reference log-probs, gradients and one AdamW step."""
        graph, adapters, base = self.parts
        batches = [
            update.place(batch)
            for batch in collate(
                [
                    _example(*row)
                    for row in zip(groups, prompts, completions, strict=True)
                ],
                row_length=row_length,
                rows=rows,
            )
        ]
        loss = Loss("policy", beta=beta, on_policy=True)
        batches = [
            b.replace(
                ref_logprobs=update.score(graph, adapters, base, b, temperature=1.0)
            )
            for b in batches
        ]
        state = update.new_state(lora.copy(adapters), self.optimizer, jax.random.key(0))
        state, metrics = update.minibatch(
            graph, base, state, batches, self.optimizer, loss
        )
        update.read([metrics])


def _example(group: int, prompt: np.ndarray, completion: np.ndarray) -> Example:
    segments = [
        Segment.given(Source.PROMPT, prompt),
        Segment(Source.MODEL, completion, np.zeros(len(completion), np.float32)),
    ]
    task = Task(str(group), [], {})
    trajectory = Trajectory(task, int(group), 0, segments, turns=[Turn("")])
    return Example(trajectory, np.ones(1, np.float32), 1.0)


def peak() -> float:
    """GFLOP/s of a float32 product in training's shape."""
    x, w = jnp.ones((1792, 512)), jnp.ones((512, 1408))
    product = jax.jit(jnp.matmul)
    product(x, w).block_until_ready()
    best = 0.0
    for _ in range(20):
        start = time.perf_counter()
        product(x, w).block_until_ready()
        best = max(best, 2 * x.size * w.shape[1] / (time.perf_counter() - start))
    return best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="M1")
    parser.add_argument("--only", default="W1,W2,W3,W4,W5")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    workloads, names = Workloads(build(arguments.model)), arguments.only.split(",")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks = []
    for number in range(arguments.rounds + 1):
        peaks.append(peak())
        for name in names:
            start = time.perf_counter()
            getattr(workloads, name)()
            if number:  # the first round compiles
                seconds[name].append(time.perf_counter() - start)
    print(f"matrix peak {statistics.median(peaks):.0f} GFLOP/s ", end="")
    print(f"[{min(peaks):.0f}, {max(peaks):.0f}]")
    for name, values in seconds.items():
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"{arguments.model} {name}: {median:.2f} s [{low:.2f}, {high:.2f}]")
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak RSS of the process {rss:.2f} GiB (run one workload for its own)")


if __name__ == "__main__":
    main()
