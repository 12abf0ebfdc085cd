"""A decoder as one GGUF file: base plus adapters, and the tokenizer, for llama.cpp.

The mirror of `gguf_file` and `tokenizer`, which read such files. Matrices keep the
base's dtype (F32 or BF16), vectors are F32, as llama.cpp wants them; it has tools of
its own to quantise further. Tensors are written one at a time.
"""

import json
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedTokenizerFast

from grpo_jax.config import BadInput
from grpo_jax.models import rope
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.decoder import Decoder
from grpo_jax.models.export import base_tensors, merged_tensor
from grpo_jax.models.gguf_file import MODULES, ROPE_FACTORS, TOP, pairs_from_halves
from grpo_jax.models.hf_format import tensor_name, tensor_shape
from grpo_jax.models.tokenizer import CONTROL, USER_DEFINED, pre_tokenizer_name

NORMAL, UNUSED = 1, 5  # tokenizer.ggml.token_type
KINDS = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
}
FILE_TYPES = {"float32": gguf.LlamaFileType.ALL_F32}
FILE_TYPES["bfloat16"] = gguf.LlamaFileType.MOSTLY_BF16
# What llama.cpp takes YaRN's other settings to be; a checkpoint may repeat them.
YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
YARN_KEYS = {"rope_type", "factor", "original_max_position_embeddings"}


def save_gguf(
    path: str | Path,
    model: Decoder,
    tokenizer: PreTrainedTokenizerFast,
    *,
    name: str,
    stops: tuple[int, ...] = (),
) -> None:
    """Write the file; `stops` are ids that end a turn beside the tokenizer's eos.

    BadInput for a tokenizer or a scaling of positions that GGUF has no name for, and
    for routed adapters: no single set of weights is this model.
    """
    if model.lora is not None and model.lora.routed:
        raise BadInput(f"{path}: routed adapters cannot be merged into one model")
    config = model.config
    writer = gguf.GGUFWriter(str(path), config.architecture)
    factors = _rope_factors(config)
    try:
        writer.add_name(name)
        dtype = str(model.embed["table"].dtype)
        writer.add_file_type(FILE_TYPES[dtype])
        _add_shape(writer, config)
        _add_tokenizer(writer, config, tokenizer, stops)
        places = list(base_tensors(model))
        for place, layer, variable in places:
            shape = tensor_shape(place, variable.shape)
            kind = KINDS[dtype] if len(shape) > 1 else KINDS["float32"]
            width = 2 if kind == KINDS["bfloat16"] else 4
            size = int(np.prod(shape)) * width
            name = _gguf_name(tensor_name(place).format(layer=layer))
            # The dtype is only looked at where the kind is not given.
            writer.add_tensor_info(name, shape, np.dtype("float32"), size, kind)
        if factors is not None:
            writer.add_tensor_info(
                ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for place, layer, _ in places:
            writer.write_tensor_data(_stored(model, place, layer))
        if factors is not None:
            writer.write_tensor_data(factors)
    finally:
        writer.close()


def _stored(model: Decoder, place: tuple[str, ...], layer: int | None) -> np.ndarray:
    """One tensor as the file holds it; bfloat16 as its bits, which numpy can write."""
    values = merged_tensor(model, place, layer)
    config, projection = model.config, place[-2]
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    if config.architecture == "llama" and projection in heads:
        values = pairs_from_halves(values, heads[projection])
    if values.ndim == 1 or values.dtype == np.float32:
        return np.ascontiguousarray(values, np.float32)
    return np.ascontiguousarray(values).view(np.uint16)


def _gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight."""
    tops = {hugging_face: ours for ours, hugging_face in TOP.items()}
    if name in tops:
        return tops[name]
    modules = {hugging_face: ours for ours, hugging_face in MODULES.items()}
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    module, leaf = rest.rsplit(".", 1)
    return f"blk.{layer}.{modules[module]}.{leaf}"


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    scaling = dict(config.rope_scaling or ())
    kind = scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        odd = {k for k in scaling.keys() - YARN_KEYS if scaling[k] != YARN.get(k)}
        if odd:
            raise BadInput(f"rope scaling 'yarn' with {min(odd)} has no form in GGUF")
        original = scaling["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)


def _rope_factors(config: ModelConfig) -> np.ndarray | None:
    """Divisors of the frequencies, GGUF's form of Llama 3's scaling."""
    kind = dict(config.rope_scaling or ()).get("rope_type")
    if kind not in ("llama3", "factors"):
        return None
    half = np.arange(0, config.head_width, 2, dtype=np.float64)
    plain = config.rope_theta ** (-half / config.head_width)
    scaled, _ = rope.frequencies(config)
    return (plain / scaled).astype(np.float32)


def _add_tokenizer(
    writer: gguf.GGUFWriter,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    stops: tuple[int, ...],
) -> None:
    merges = _merges(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(tokenizer))
    tokens = [f"[PAD{i}]" for i in range(config.vocab_size)]
    kinds = [UNUSED] * config.vocab_size
    for token, index in tokenizer.get_vocab().items():
        if index < config.vocab_size:
            tokens[index], kinds[index] = token, NORMAL
    for index, token in tokenizer.added_tokens_decoder.items():
        if index < config.vocab_size:
            tokens[index] = token.content
            kinds[index] = CONTROL if token.special else USER_DEFINED
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    begins = False
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
        begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins)
    others = [stop for stop in stops if stop != tokenizer.eos_token_id]
    if others:
        writer.add_eot_token_id(others[0])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _merges(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE":
        raise BadInput(
            f"export.format='gguf' needs a byte-level BPE tokenizer; {model['type']}"
        )
    return [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
