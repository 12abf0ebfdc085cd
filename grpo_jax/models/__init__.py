"""Decoders, their adapters and tokenizers: loaded, kept, exported."""

from grpo_jax.models.config import LORA_TARGETS, LoraConfig, ModelConfig
from grpo_jax.models.decoder import Decoder, KVCache
from grpo_jax.models.export import (
    load_peft,
    read_peft_config,
    save_merged,
    save_peft,
)
from grpo_jax.models.gguf_write import save_gguf
from grpo_jax.models.hf_format import config_from_hf
from grpo_jax.models.load import abstract_model, load_config, load_model
from grpo_jax.models.sources import base_fingerprint, base_name
from grpo_jax.models.tokenizer import load_tokenizer, stop_ids

__all__ = [
    "LORA_TARGETS",
    "Decoder",
    "KVCache",
    "LoraConfig",
    "ModelConfig",
    "abstract_model",
    "base_fingerprint",
    "base_name",
    "config_from_hf",
    "load_config",
    "load_model",
    "load_peft",
    "load_tokenizer",
    "read_peft_config",
    "save_gguf",
    "save_merged",
    "save_peft",
    "stop_ids",
]
