"""Decoders from checkpoints: tensor by tensor into the stacked, sharded parameters.

The decoder is built abstractly (shapes only), its names and shapes are compared with
the checkpoint's headers, and then each parameter is read shard by shard. At no time
does the host hold more than the shards of one parameter (of a GGUF file: all of it)
beside the model itself.
"""

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from grpo_jax import devices
from grpo_jax.config import BadInput
from grpo_jax.models import tiny
from grpo_jax.models.config import LORA_TARGETS, LoraConfig, ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.gguf_file import GGUFFile
from grpo_jax.models.hf_format import HFFolder, folder_config, tensor_name, tensor_shape
from grpo_jax.models.sources import TINY, locate

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
# Buffers that some checkpoints carry and no decoder needs.
IGNORED = "rotary_emb.inv_freq"
MAX_LISTED = 5
BASE = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))  # LoRAParam is a Param too

ParameterPath = tuple[str, ...]
Shape = tuple[int, ...]
Index = tuple[slice, ...]
# read(path, shape) -> piece(index), the values of one shard of that parameter
Read = Callable[[ParameterPath, Shape], Callable[[Index], np.ndarray]]


def load_model(
    source: str | Path,
    dtype: str = "float32",
    *,
    lora: LoraConfig | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
) -> Decoder:
    """A decoder with its weights, sharded over `mesh` when there is one.

    `source` is a Hugging Face folder, a .gguf file, a hub id, "smollm2-135m" or
    "tiny". With `lora`, fresh adapters from `seed` (A normal, B zero) that leave the
    model as it is. Raises BadInput naming the tensor, its file, and the expected and
    found shapes, before anything is compiled.
    """
    if dtype not in DTYPES:
        raise BadInput(f"model.dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if lora and (lora.rank < 1 or set(lora.targets) - set(LORA_TARGETS)):
        known = ", ".join(LORA_TARGETS)
        raise BadInput(f"{lora}: rank must be positive, targets among {known}")
    if source == TINY:
        model = abstract_model(tiny.CONFIG, dtype, lora)
        base = partial(_whole, tiny.parameter)
    else:
        path = locate(source)
        tensors = GGUFFile(path) if path.is_file() else HFFolder(path)
        model = abstract_model(tensors.config, dtype, lora)
        check_tensors(model, tensors)
        base = partial(_stacked, tensors)
        if isinstance(tensors, GGUFFile):  # blocks dequantise whole: do that once
            base = partial(_whole, partial(_stacked_whole, tensors))
    _fill(model, base, mesh, BASE)
    _fill(
        model, partial(_whole, partial(fresh_adapter, seed=seed)), mesh, nnx.LoRAParam
    )
    model.source = str(source)
    return model


def load_config(source: str | Path) -> ModelConfig:
    """The shape of a source's decoder, without its weights."""
    if source == TINY:
        return tiny.CONFIG
    path = locate(source, weights=False)
    return GGUFFile(path).config if path.is_file() else folder_config(path)


def abstract_model(
    config: ModelConfig, dtype: str = "float32", lora: LoraConfig | None = None
) -> Decoder:
    """A decoder of ShapeDtypeStructs: what loading fills and planning compiles."""

    def build():
        return Decoder(config, lora, dtype=DTYPES[dtype], rngs=nnx.Rngs(0))

    return nnx.eval_shape(build)


def fresh_adapter(
    path: ParameterPath, shape: tuple[int, ...], *, seed: int
) -> np.ndarray:
    """Initial float32 value of lora_a (normal, variance 1 / in) or lora_b (zero).

    Drawn on the host: the same on any mesh and in every process.
    """
    if path[-1] == "lora_b":
        return np.zeros(shape, np.float32)
    stream = np.random.default_rng([seed, zlib.crc32(".".join(path).encode())])
    return stream.standard_normal(shape, np.float32) * np.float32(shape[-2] ** -0.5)


def check_tensors(model: Decoder, tensors: HFFolder | GGUFFile) -> None:
    """Compare the checkpoint's headers with the decoder; BadInput lists the faults."""
    expected = expected_tensors(model)
    faults = []
    for name, shape in expected.items():
        found = tensors.shapes.get(name)
        if found is None:
            faults.append(f"tensor {name} {list(shape)} is missing")
        elif found != shape:
            faults.append(
                f"tensor {name} in {tensors.where(name)}: "
                f"expected shape {list(shape)}, found {list(found)}"
            )
    for name in sorted(set(tensors.shapes) - set(expected)):
        unused_head = name == "lm_head.weight" and model.config.tied
        if not unused_head and not name.endswith(IGNORED):
            faults.append(f"tensor {name} in {tensors.where(name)} is not expected")
    if faults:
        more = len(faults) - MAX_LISTED
        listed = "; ".join(faults[:MAX_LISTED]) + (f"; {more} more" if more > 0 else "")
        raise BadInput(f"weights in {tensors.files[0].parent}: {listed}")


def expected_tensors(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Name and shape of every checkpoint tensor of a decoder."""
    shapes = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, BASE)):
        layers = range(variable.shape[0]) if path[0] == "layers" else range(1)
        for layer in layers:
            name = tensor_name(path).format(layer=layer)
            shapes[name] = tensor_shape(path, variable.shape)
    return shapes


def _fill(model: Decoder, read: Read, mesh: Mesh | None, which: nnx.filterlib.Filter):
    """Replace the abstract values of some variables, one parameter at a time."""
    for path, variable in nnx.to_flat_state(nnx.state(model, which)):
        shape, dtype = variable.shape, variable.dtype
        piece = read(path, shape)
        if mesh is None:
            whole = tuple(slice(0, size) for size in shape)
            value = jnp.asarray(piece(whole), dtype)
        else:
            axes = devices.spec(variable.logical_axes, shape, mesh)
            place = NamedSharding(mesh, axes)
            shard = _remember(lambda index, p=piece, d=dtype: p(index).astype(d))
            value = jax.make_array_from_callback(shape, place, shard)
        variable.set_value(value)


def _remember(piece: Callable[[Index], np.ndarray]) -> Callable[[Index], np.ndarray]:
    """Devices that hold the same shard share one reading of it."""
    known = {}

    def recall(index):
        key = str(index)
        if key not in known:
            known[key] = piece(index)
        return known[key]

    return recall


def _whole(values: Callable[[ParameterPath, Shape], np.ndarray], path, shape):
    """Shards of an array that is made whole on the host."""
    array = values(path, shape)
    return lambda index: array[index]


def _stacked_whole(tensors: GGUFFile, path: ParameterPath, shape: Shape) -> np.ndarray:
    return _stacked(tensors, path, shape)(tuple(slice(0, size) for size in shape))


def _stacked(tensors: HFFolder | GGUFFile, path: ParameterPath, shape: Shape):
    """Shards of a parameter that the checkpoint stores layer by layer, transposed."""
    name, transposed = tensor_name(path), path[-1] == "kernel"

    def one(index, layer=None):
        inner = index[::-1] if transposed else index
        values = tensors.read(name.format(layer=layer), inner)
        return values.T if transposed else values

    def piece(index):
        index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape, strict=True))
        if path[0] != "layers":
            return one(index)
        layers = range(index[0].start, index[0].stop)
        return np.stack([one(index[1:], layer) for layer in layers])

    return piece
