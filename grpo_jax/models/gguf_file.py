"""GGUF files (llama.cpp's format): config, dequantised tensors, tokenizer metadata.

Tensors appear under Hugging Face names. llama.cpp stores the rows of q and k of the
Llama architecture interleaved for its own rotary convention; they are put back here.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from grpo_jax.config import BadInput
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.gguf_header import read_header
from grpo_jax.models.hf_format import ARCHITECTURES

MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # llama3 scaling, as divisors of the frequencies


class GGUFFile:
    """One GGUF file, memory-mapped.

    Attributes:
      metadata: every key of the header.
      config: the decoder's shape.
      shapes: shape of each tensor by its Hugging Face name.
      files: the file itself.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise BadInput(f"model file {path} does not exist")
        self.metadata, tensors = read_header(path)
        self.files = [path]
        self._tensors = {_hf_name(tensor.name): tensor for tensor in tensors}
        self._factors = self._tensors.pop(ROPE_FACTORS, None)
        self.config = self._config()
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def where(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        return f"{self.files[0]} ({self._tensors[name].name})"

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of one tensor, dequantised to float32."""
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.kind)
        except NotImplementedError as error:
            raise BadInput(f"{self.where(name)}: {error}") from error
        if self.config.architecture == "llama":
            heads = {
                "q_proj": self.config.num_heads,
                "k_proj": self.config.num_kv_heads,
            }
            projection = name.split(".")[-2]
            if projection in heads:
                values = _halves_from_pairs(values, heads[projection])
        return values[index]

    def _config(self) -> ModelConfig:
        path = self.files[0]
        architecture = self.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise BadInput(
                f"{path}: architecture {architecture!r} is not supported; "
                f"supported: {known}"
            )

        def get(key, default=None):
            found = self.metadata.get(f"{architecture}.{key}", default)
            if found is None:
                raise BadInput(f"{path}: metadata {architecture}.{key} is missing")
            return found

        table = self._tensors.get("model.embed_tokens.weight")
        if table is None:
            raise BadInput(f"{path}: tensor token_embd.weight is missing")
        heads, width = get("attention.head_count"), get("embedding_length")
        return ModelConfig(
            vocab_size=table.shape[0],
            width=width,
            num_layers=get("block_count"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_width=get("attention.key_length", width // heads),
            mlp_width=get("feed_forward_length"),
            # Stored as float32: 1e-5 comes back as 9.999999747e-06.
            norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
            rope_theta=float(get("rope.freq_base", 10_000.0)),
            rope_scaling=self._rope_scaling(get),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            tied="lm_head.weight" not in self._tensors,
            max_positions=get("context_length"),
            architecture=architecture,
        )

    def _rope_scaling(self, get) -> tuple[tuple[str, Any], ...] | None:
        if self._factors is not None:
            values = gguf.dequantize(self._factors.data, self._factors.kind)
            factors = tuple(float(value) for value in values)
            return (("factors", factors), ("rope_type", "factors"))
        kind = get("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise BadInput(f"{self.files[0]}: rope scaling {kind!r} is not supported")
        record = {"rope_type": kind, "factor": float(get("rope.scaling.factor"))}
        if kind == "yarn":
            original = get("rope.scaling.original_context_length")
            record["original_max_position_embeddings"] = original
        return tuple(sorted(record.items()))


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if not name.startswith("blk."):
        return TOP.get(name, name)
    _, layer, module, leaf = name.split(".", 3)
    return f"model.layers.{layer}.{MODULES.get(module, module)}.{leaf}"


def pairs_from_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from [x0 x1 ... y0 y1 ...] to [x0 y0 x1 y1 ...]."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _halves_from_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from [x0 y0 x1 y1 ...] back to [x0 x1 ... y0 y1 ...]."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
