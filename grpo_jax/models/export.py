"""Adapters to and from PEFT folders, and merged checkpoints for any server.

PEFT stores lora_A as [r, in] and lora_B as [out, r] under the names of the Hugging
Face modules; both are the transposes of ours. Merging adds alpha/r times A B to each
kernel in float32 and rounds once to the base's dtype.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerFast

from grpo_jax.config import BadInput
from grpo_jax.models.config import LoraConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.hf_format import (
    PROJECTIONS,
    config_to_hf,
    num_bytes,
    read_json,
    tensor_name,
    tensor_shape,
)
from grpo_jax.models.load import BASE
from tools_env.roles import ROLES

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Options under which PEFT computes something else than W + alpha/r B A.
PLAIN_LORA = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "layer_replication": None,
}
MAX_SHARD_BYTES = 2 << 30


def save_peft(path: str | Path, model: Decoder, base_name: str) -> None:
    """Write the model's adapters as a PEFT folder that names `base_name`.

    Routed ones become two such folders inside it, `reasoning` and `tool`. With several
    hosts each must call this; the first one writes.
    """
    adapters = _host_adapters(model)
    if not adapters:
        raise BadInput(f"{path}: the model has no adapters to export")
    if jax.process_index():
        return
    for name, index in _folders(model.lora):
        folder, tensors = Path(path) / name, {}
        for place, stacked in adapters.items():
            for layer, values in enumerate(stacked[index(place)]):
                tensors[_peft_name(place, layer)] = np.ascontiguousarray(values.T)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        _write_json(folder / ADAPTER_CONFIG, _peft_config(model.lora, base_name))


def _host_adapters(model: Decoder) -> dict[tuple[str, ...], np.ndarray]:
    variables = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    return {
        place: _host(variable.get_value()).astype(np.float32)
        for place, variable in variables
    }


def _folders(lora: LoraConfig) -> list[tuple[str, Callable]]:
    """The PEFT folders below a path, and which part of an adapter each of them holds.

    [L,I,2,R] and [L,2,R,O] of routed adapters; without, the whole of them.
    """
    if not lora.routed:
        return [("", lambda place: ...)]

    def part(role):
        a, b = np.s_[:, :, role], np.s_[:, role]
        return lambda place: a if place[-1] == "lora_a" else b

    return [(name, part(role)) for role, name in enumerate(ROLES)]


def read_peft_config(path: str | Path) -> LoraConfig:
    """Rank, alpha, targets and dropout of a PEFT folder.

    BadInput for a folder that is none, and for variants this project cannot run.
    """
    file = Path(path) / ADAPTER_CONFIG
    raw = read_json(file)
    for key, plain in PLAIN_LORA.items():
        if (raw.get(key) or None) != (plain or None):
            raise BadInput(f"{file}: {key}={raw.get(key)!r} is not supported")
    shorts = {name.split(".")[1]: short for short, name in PROJECTIONS.items()}
    named = raw.get("target_modules")
    if named == "all-linear":
        named = list(shorts)
    # PEFT writes either module names or the full path of every module.
    last = (
        {name.rsplit(".", 1)[-1] for name in named} if isinstance(named, list) else {}
    )
    if not last or last - set(shorts):
        raise BadInput(
            f"{file}: target_modules={named!r}; supported: {', '.join(shorts)}"
        )
    targets = tuple(short for name, short in shorts.items() if name in last)
    try:
        return LoraConfig(
            rank=raw["r"],
            alpha=float(raw["lora_alpha"]),
            targets=targets,
            dropout=float(raw.get("lora_dropout") or 0.0),
        )
    except KeyError as error:
        raise BadInput(f"{file}: key {error} is missing") from error


def load_peft(path: str | Path, model: Decoder) -> None:
    """Replace the model's adapters by those of a PEFT folder.

    Routed ones by those of its folders `reasoning` and `tool`. The rank, alpha and
    targets must be the model's; every tensor must be there in its shape. Otherwise
    BadInput, and the model is as it was.
    """
    if model.lora is None:
        raise BadInput(f"adapter {path}: the model was built without adapters")
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)))
    values = {p: np.empty(v.shape, np.float32) for p, v in variables.items()}
    for name, index in _folders(model.lora):
        _check_same(Path(path) / name, model.lora)
        _fill(Path(path) / name, values, index)
    for place, variable in variables.items():
        array, old = values[place], variable.get_value()
        new = jax.make_array_from_callback(
            old.shape, old.sharding, lambda index, array=array: array[index]
        )
        variable.set_value(new)


def _check_same(folder: Path, ours: LoraConfig) -> None:
    theirs = read_peft_config(folder)
    for key in ("rank", "alpha", "targets"):
        found, expected = getattr(theirs, key), getattr(ours, key)
        if key == "targets":
            found, expected = sorted(found), sorted(expected)
        if found != expected:
            raise BadInput(f"adapter {folder}: {key} {found}, lora.{key} is {expected}")


def _fill(folder: Path, values: dict[tuple[str, ...], np.ndarray], index) -> None:
    """Write a folder's tensors into their part of `values`."""
    tensors = _read_adapter(folder)
    for place, whole in values.items():
        part = whole[index(place)]
        for layer, target in enumerate(part):
            name = _peft_name(place, layer)
            _check_adapter(folder, name, tensors, target.shape[::-1])
            target[...] = tensors.pop(name).T
    if tensors:
        raise BadInput(f"adapter {folder}: tensor {min(tensors)} is not expected")


def merged(
    kernel: Float[np.ndarray, "I O"],
    lora_a: Float[np.ndarray, "I R"],
    lora_b: Float[np.ndarray, "R O"],
    scale: float,
) -> Float[np.ndarray, "I O"]:
    """kernel + scale A B, computed in float32, in the kernel's dtype."""
    update = lora_a.astype(np.float32) @ lora_b.astype(np.float32)
    return (kernel.astype(np.float32) + scale * update).astype(kernel.dtype)


def save_merged(
    path: str | Path,
    model: Decoder,
    tokenizer: PreTrainedTokenizerFast,
    *,
    stops: tuple[int, ...] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write base plus adapters as a Hugging Face folder with its tokenizer.

    `stops` are the ids that end a turn, for generation_config.json (default: eos).
    With several hosts each must call this; the first one writes.
    The host holds one shard of at most `max_shard_bytes` at a time. BadInput for
    routed adapters: no single set of weights is this model.
    """
    if model.lora is not None and model.lora.routed:
        raise BadInput(f"{path}: routed adapters cannot be merged into one model")
    folder, first = Path(path), jax.process_index() == 0
    if first:
        _write_small_files(folder, model, tokenizer, stops)
    shards = _plan_shards(model, max_shard_bytes)
    weight_map, total = {}, 0
    for number, names in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: merged_tensor(model, *where) for name, where in names.items()}
        if first:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if first and len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_small_files(folder: Path, model: Decoder, tokenizer, stops) -> None:
    """Config, generation config and tokenizer of a merged folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_to_hf(model.config, str(model.embed["table"].dtype))
    ends = list(stops) or [tokenizer.eos_token_id]
    config |= {"eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": ends})
    tokenizer.save_pretrained(folder)


def _plan_shards(model: Decoder, limit: int) -> list[dict[str, tuple]]:
    """Checkpoint name -> (path, layer) for each file, in order."""
    shards, size = [{}], 0
    for path, layer, variable in base_tensors(model):
        shape = tensor_shape(path, variable.shape)
        needed = num_bytes(shape, variable.dtype)
        if shards[-1] and size + needed > limit:
            shards.append({})
            size = 0
        shards[-1][tensor_name(path).format(layer=layer)] = (path, layer)
        size += needed
    return shards


def base_tensors(
    model: Decoder,
) -> Iterator[tuple[tuple[str, ...], int | None, object]]:
    """(path, layer, variable) of every checkpoint tensor; layer None: not stacked."""
    for path, variable in nnx.to_flat_state(nnx.state(model, BASE)):
        stacked = path[0] == "layers"
        for layer in range(variable.shape[0]) if stacked else [None]:
            yield path, layer, variable


def merged_tensor(model: Decoder, path: tuple[str, ...], layer: int | None):
    """One checkpoint tensor, adapters added, in the checkpoint's orientation."""
    module = model
    for part in path[:-1]:
        module = module[part] if isinstance(module, nnx.Dict) else getattr(module, part)

    def value(name):
        found = module[name] if isinstance(module, nnx.Dict) else getattr(module, name)
        return _host(found.get_value() if layer is None else found.get_value()[layer])

    out = value(path[-1])
    if path[-1] == "kernel" and getattr(module, "lora_a", None) is not None:
        scale = model.lora.alpha / model.lora.rank
        out = merged(out, value("lora_a"), value("lora_b"), scale)
    return np.ascontiguousarray(out.T if path[-1] == "kernel" else out)


def _peft_name(path: tuple[str, ...], layer: int) -> str:
    """(layers, attention, q, lora_a), 3 -> PEFT's name of that lora_A weight."""
    weight = tensor_name((*path[:-1], "kernel")).format(layer=layer)
    half = {"lora_a": "lora_A", "lora_b": "lora_B"}[path[-1]]
    return f"base_model.model.{weight.removesuffix('weight')}{half}.weight"


def _peft_config(lora: LoraConfig, base_name: str) -> dict:
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return PLAIN_LORA | {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [PROJECTIONS[t].split(".")[1] for t in lora.targets],
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _read_adapter(folder: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"adapter {folder}: {ADAPTER_WEIGHTS}: {error}") from error


def _check_adapter(folder, name, tensors, shape) -> None:
    if name not in tensors:
        raise BadInput(f"adapter {folder}: tensor {name} {list(shape)} is missing")
    found = tensors[name].shape
    if found != shape:
        raise BadInput(
            f"adapter {folder}: tensor {name}: expected shape {list(shape)}, "
            f"found {list(found)}"
        )


def _host(array: jax.Array) -> np.ndarray:
    """The whole array on this host, whatever its sharding."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
