"""Mode export: what a run learned, in the formats of those who serve it.

    export.format   written to          for
    peft            DIR/export          PEFT, and servers that take its adapters
    merged          DIR/export-merged   anything that reads Hugging Face checkpoints
    gguf            DIR/export.gguf     llama.cpp

Only the model is needed, not the run's data or tools. What was written is read back
before it takes its name: its logits must be those of the trained model.
"""

import logging
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from grpo_jax import models, policy, setup
from grpo_jax.checkpoints import Saved
from grpo_jax.config import BadInput
from grpo_jax.models import Decoder
from grpo_jax.models.blockwise import Packing

LOG = logging.getLogger(__name__)
PLACES = {"peft": "export", "merged": "export-merged", "gguf": "export.gguf"}
# Largest difference of logits, as a share of the largest logit. Merging rounds every
# weight once: to 24 bits in float32, to 8 in bfloat16. Both models also compute in it:
# 6.5 % apart in bfloat16 on the random two-layer model, where nothing averages out.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


def run(config: ConfigDict, workdir: Path, mesh: Mesh, saved: Saved | None) -> None:
    """Export a checkpoint's adapters, or without one those of lora.init_from."""
    if saved is None and not config.lora.init_from:
        raise BadInput(f"'{workdir}' holds no checkpoint to export")
    form = config.export.format
    if config.lora.routed and form != "peft":
        raise BadInput(
            f"export.format='{form}': two routed adapters (lora.routed) are not one "
            "set of weights; use 'peft'"
        )
    model = _trained(config, workdir, mesh, saved)
    place = workdir / PLACES[form]
    partial = place.with_name(f"partial-{place.name}")
    _remove(partial)
    workdir.mkdir(parents=True, exist_ok=True)
    expected, dtype = _logits(model), str(model.embed["table"].dtype)
    _write(form, partial, model, config.model.source)
    del model  # what is read back needs its room
    gap = np.abs(_logits(_read(config, partial, mesh)) - expected).max()
    largest = np.abs(expected).max()
    limit = TOLERANCE["float32" if form == "peft" else dtype] * max(largest, 1.0)
    if not gap <= limit:
        raise RuntimeError(
            f"'{partial}' read back gives other logits than the model: up to {gap:.3g} "
            f"apart, {limit:.3g} is rounding"
        )
    LOG.info("read back: logits up to %.2g apart, the largest is %.3g", gap, largest)
    _remove(place)
    os.rename(partial, place)
    print(place)


def _trained(
    config: ConfigDict, workdir: Path, mesh: Mesh, saved: Saved | None
) -> Decoder:
    model = setup.load_model(config, mesh)
    if saved is None:
        policy.start_from(config.lora.init_from, model)
        return model
    adapters = nnx.state(model, nnx.LoRAParam)
    saved, adapters = policy.read(config, workdir, saved, adapters)
    nnx.update(model, adapters)
    LOG.info("exporting %s", saved.path)
    return model


def _write(form: str, path: Path, model: Decoder, source: str) -> None:
    name = models.base_name(source)
    if form == "peft":
        models.save_peft(path, model, name)
        return
    tokenizer = models.load_tokenizer(source)
    stops = models.stop_ids(source, tokenizer)
    if form == "merged":
        models.save_merged(path, model, tokenizer, stops=stops)
    else:
        models.save_gguf(path, model, tokenizer, name=Path(name).name, stops=stops)


def _read(config: ConfigDict, path: Path, mesh: Mesh) -> Decoder:
    if config.export.format != "peft":
        return setup.load_model(config, mesh, source=path)
    model = setup.load_model(config, mesh)
    models.load_peft(path, model)
    return model


def _logits(model: Decoder) -> np.ndarray:
    """Of random tokens, [2,T,V]; routed adapters have every other position each."""
    length = min(64, model.config.max_positions)
    shape = (2, length)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, shape)
    positions = jnp.broadcast_to(jnp.arange(length), shape)
    packing = Packing.causal(*shape)
    routes = positions % 2 if model.lora and model.lora.routed else None
    graph, state = nnx.split(model)

    @jax.jit
    def forward(state, tokens):
        model = nnx.merge(graph, state)
        return model.logits(model.hidden(tokens, positions, packing, routes=routes))

    return np.asarray(forward(state, jnp.asarray(tokens, jnp.int32)), np.float32)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
