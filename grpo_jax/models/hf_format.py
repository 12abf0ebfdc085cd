"""Hugging Face's checkpoint format: configs, tensor names, safetensors folders.

`load` reads base weights through `HFFolder`, `export` writes them back under the same
names. A linear weight is stored [out, in] there and [in, out] here.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from grpo_jax.config import BadInput
from grpo_jax.models.config import ModelConfig

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")  # null: derived from others
# Kinds of position scaling, and the numbers that each needs.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
ROPE_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale")
ROPE_NUMBERS += ("mscale_all_dim", "original_max_position_embeddings")

PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
OUTSIDE_LAYERS = {
    ("embed", "table"): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head", "kernel"): "lm_head.weight",
}


def tensor_name(path: tuple[str, ...]) -> str:
    """Checkpoint name of a decoder parameter, with `{layer}` where layers are stacked.

    ("layers", "mlp", "up", "kernel") -> "model.layers.{layer}.mlp.up_proj.weight"
    """
    if path in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[path]
    module = {**PROJECTIONS, **NORMS}[path[-2]]
    leaf = "bias" if path[-1] == "bias" else "weight"
    return f"model.layers.{{layer}}.{module}.{leaf}"


def tensor_shape(path: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in the checkpoint of one layer's tensor of a (stacked) parameter."""
    inner = shape[1:] if path[0] == "layers" else shape
    return inner[::-1] if path[-1] == "kernel" else inner


def config_from_hf(raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """ModelConfig of a parsed config.json; BadInput for what the decoder cannot run."""
    architecture = raw.get("model_type")
    if architecture not in ARCHITECTURES:
        raise BadInput(
            f"{where}: model_type {architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    _refuse_unsupported(raw, where)
    given = [key for key in OPTIONAL_SIZES if raw.get(key) is not None]
    for key in (*SIZES, *given):
        if not isinstance(raw.get(key, 1), int) or raw.get(key, 1) < 1:
            raise BadInput(f"{where}: {key}={raw[key]!r} is not a positive integer")
    _check_numbers(raw, ("rms_norm_eps", "rope_theta"), where)
    try:
        heads = raw["num_attention_heads"]
        kv_heads = raw.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise BadInput(
                f"{where}: num_key_value_heads={kv_heads} does not divide "
                f"num_attention_heads={heads}"
            )
        theta, scaling = _rope(raw, where)
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            width=raw["hidden_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_width=raw.get("head_dim") or raw["hidden_size"] // heads,
            mlp_width=raw["intermediate_size"],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            tied=raw.get("tie_word_embeddings", False),
            max_positions=raw["max_position_embeddings"],
            architecture=architecture,
        )
    except KeyError as error:
        raise BadInput(f"{where}: key {error} is missing") from error


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    """The decoder would compute something else than these options ask for."""
    asked = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "attention_bias": bool(raw.get("attention_bias")),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    for key, present in asked.items():
        if present:
            raise BadInput(f"{where}: {key}={raw[key]!r} is not supported")


def _rope(raw: Mapping[str, Any], where: str):
    """(theta, sorted scaling items or None) from either of the two config forms."""
    record = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(record, Mapping):
        raise BadInput(f"{where}: position scaling {record!r} is not an object")
    record = dict(record)
    _check_numbers(record, ("rope_theta",), where)
    theta = record.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0
    theta = float(theta)
    kind = record.pop("type", "default")
    kind = record["rope_type"] = record.get("rope_type", kind)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        known = ", ".join(ROPE_TYPES)
        raise BadInput(
            f"{where}: rope_type {kind!r} is not supported; supported: {known}"
        )
    partial = record.pop("partial_rotary_factor", raw.get("partial_rotary_factor", 1))
    if partial not in (None, 1, 1.0):
        raise BadInput(f"{where}: partial_rotary_factor={partial} is not supported")
    if kind == "default":
        return theta, None
    for key in ROPE_TYPES[kind]:
        if record.get(key) is None:
            raise BadInput(f"{where}: rope_type {kind!r} needs a key {key!r}")
    _check_numbers(record, (*ROPE_TYPES[kind], *ROPE_NUMBERS), where)
    if kind == "llama3" and not record["low_freq_factor"] < record["high_freq_factor"]:
        raise BadInput(f"{where}: low_freq_factor is not below high_freq_factor")
    if kind in ("llama3", "yarn"):
        original = raw.get("original_max_position_embeddings")
        original = original or raw["max_position_embeddings"]
        record.setdefault("original_max_position_embeddings", original)
    return theta, tuple(sorted((k, v) for k, v in record.items() if v is not None))


def _check_numbers(raw: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    """Of these keys, what is there must be a positive number."""
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise BadInput(f"{where}: {key}={value!r} is not a positive number")


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json content for a decoder of this shape (weights stored as `dtype`)."""
    scaling = dict(config.rope_scaling) if config.rope_scaling else None
    if scaling and scaling["rope_type"] not in ROPE_TYPES:
        raise BadInput(
            f"rope scaling {scaling['rope_type']!r} has no form in config.json"
        )
    return {
        "architectures": [ARCHITECTURES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_positions,
        "dtype": dtype,
    }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; BadInput names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a JSON object")
    return content


def folder_config(folder: Path) -> ModelConfig:
    """The decoder's shape from a model folder's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"model folder {folder}: config.json is missing")
    return config_from_hf(read_json(path), str(path))


class HFFolder:
    """The tensors of a folder of safetensors, single or sharded, read lazily.

    Attributes:
      config: the decoder's shape.
      shapes: shape of each tensor by its name, from the headers alone.
      files: the files that hold them.
    """

    def __init__(self, folder: Path):
        self.config = folder_config(folder)
        self.files = _weight_files(folder)
        self._readers = [_open(path) for path in self.files]
        self._owner = {
            name: (reader, path)
            for reader, path in zip(self._readers, self.files, strict=True)
            for name in reader.keys()  # noqa: SIM118 - not a dict
        }
        self.shapes = {name: self._shape(name) for name in self._owner}

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        return str(self._owner[name][1])

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of one tensor; the rest of it is never read."""
        piece = self._owner[name][0].get_slice(name)
        return piece[index if len(index) > 1 else index[0]]

    def _shape(self, name: str) -> tuple[int, ...]:
        reader, path = self._owner[name]
        piece = reader.get_slice(name)
        if piece.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            kind = piece.get_dtype()
            raise BadInput(
                f"{path}: tensor {name} is {kind}; only floats are supported"
            )
        return tuple(piece.get_shape())


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadInput(f"{index}: weight_map is not an object")
        names = sorted(set(weight_map.values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        listed = ", ".join(missing) or "every weight file"
        raise BadInput(f"model folder {folder}: missing {listed} (safetensors only)")
    return [folder / name for name in names]


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path}: not a readable safetensors file: {error}") from error


def num_bytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Size of an array."""
    return math.prod(shape) * np.dtype(dtype).itemsize
