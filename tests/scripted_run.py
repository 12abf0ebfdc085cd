"""A command of run.py whose trajectories sample written answers; run as a script.

    python scripted_run.py ANSWERS.json [the command's flags ...]

ANSWERS.json holds `purpose` (the random stream: 0 rollouts of training, 1 evaluation),
`step` (which of them) and `answers`: trajectory i takes number i, modulo their count,
each a list of turns. Only the draw is replaced. The process has one device, so that no
program waits for another on a busy machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import compile_cache

ROOT = Path(__file__).resolve().parent.parent


def run(folder, answers, flags, *, purpose=0, step=1):
    """For a test: run the command to its end, with `folder` on the module path."""
    path = folder / "answers.json"
    written = {"purpose": purpose, "step": step, "answers": answers}
    path.write_text(json.dumps(written))
    command = [sys.executable, __file__, str(path), *flags]
    environ = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


def main(path: str, flags: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", compile_cache.folder())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    from grpo_jax import models
    from grpo_jax.rollout import sampler
    from run import main as run_main

    script = json.loads(Path(path).read_text())
    encode = models.load_tokenizer("tiny").encode
    texts = [
        encode("".join(f"{turn}<|im_end|>" for turn in turns), add_special_tokens=False)
        for turns in script["answers"]
    ]
    table = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = text
    key = jax.random.fold_in(jax.random.key(0), script["purpose"])
    key = jax.random.fold_in(key, script["step"])
    streams = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(4096))
    streams = np.asarray(jax.random.key_data(streams))

    def draw(logits, keys, drawn, sampling):
        same = jax.random.key_data(keys)[:, None] == jnp.asarray(streams)
        row = jnp.argmax(same.all(axis=-1), axis=-1) % len(texts)
        column = jnp.minimum(drawn, table.shape[1] - 1)
        tokens = jnp.asarray(table)[row, column]
        logprobs = jax.nn.log_softmax(logits)
        return tokens, jnp.take_along_axis(logprobs, tokens[:, None], 1)[:, 0]

    sampler.draw = draw
    return run_main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
