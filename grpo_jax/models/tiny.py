"""The "tiny" model: two random layers and a byte tokenizer, for tests and smoke runs.

Untied, with a head wide enough that adapters alone can learn sharp predictions. One
byte of text is one token; only the turn markers are single tokens.
"""

import zlib

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_jax.models.chat_template import HERMES_CHATML, TURN_END, TURN_START
from grpo_jax.models.config import ModelConfig

END_OF_TEXT = "<|endoftext|>"
RESERVED = 5  # rounds the vocabulary up to a multiple of 8, so that any mesh divides it
SPECIALS = [END_OF_TEXT, TURN_START, TURN_END]
SPECIALS += [f"<|reserved_{i}|>" for i in range(RESERVED)]

CONFIG = ModelConfig(
    vocab_size=256 + len(SPECIALS),
    width=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=16,
    mlp_width=128,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=None,
    qkv_bias=True,
    qk_norm=False,
    tied=False,
    max_positions=16384,
    architecture="qwen2",
)
HEAD_STD = 0.15
EMBED_STD = 0.5


def parameter(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The fixed float32 value of one parameter; depends on its path alone."""
    if path[-1] == "scale":
        return np.ones(shape, np.float32)
    if path[-1] == "bias":
        return np.zeros(shape, np.float32)
    std = {"embed": EMBED_STD, "head": HEAD_STD}.get(path[0], shape[-2] ** -0.5)
    generator = np.random.default_rng(zlib.crc32(".".join(path).encode()))
    return std * generator.standard_normal(shape, np.float32)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte b is some id below 256; the specials follow; ChatML with Hermes tools."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    marks = [AddedToken(text, normalized=False, special=True) for text in SPECIALS]
    backend.add_special_tokens(marks)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = HERMES_CHATML
    return wrapped
