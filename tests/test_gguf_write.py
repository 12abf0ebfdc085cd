"""GGUF files written by this project, opened by the `gguf` package and read back."""

import dataclasses

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_gguf import random_tensors, shape, with_tokenizer, write
from tokenizers import pre_tokenizers

from grpo_jax import models
from grpo_jax.config import BadInput
from grpo_jax.models import rope
from grpo_jax.models.export import base_tensors, merged_tensor
from grpo_jax.models.gguf_file import GGUFFile

LORA = models.LoraConfig(rank=4, alpha=10.0)
TEXTS = ["a th<|im_end|> 转 <think>\n", "123 it's  12\n\n 7"]


def decoder(tmp_path, config, dtype="float32"):
    """A random decoder of this shape with random adapters, B included."""
    path = write(tmp_path / "base.gguf", config, random_tensors(config))
    model = models.load_model(path, dtype, lora=LORA)
    generator = np.random.default_rng(3)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        values = generator.standard_normal(variable.shape)
        variable.set_value(jnp.asarray(0.2 * values, jnp.float32))
    return model


def written(tmp_path, model, tokenizer=None, **options):
    path = tmp_path / "out.gguf"
    tokenizer = tokenizer or models.load_tokenizer("tiny")
    models.save_gguf(path, model, tokenizer, name="mine", **options)
    return path


def tensors(model):
    places = [(place, layer) for place, layer, _ in base_tensors(model)]
    return {str(p): np.asarray(merged_tensor(model, *p)) for p in places}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_merged_tensor_comes_back(tmp_path, architecture, tied):
    config = dataclasses.replace(shape(architecture, tied), vocab_size=264)
    model = decoder(tmp_path, config)
    path = written(tmp_path, model)
    again = models.load_model(path)
    assert again.config == config
    expected, found = tensors(model), tensors(again)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, name)
    base = models.load_model(tmp_path / "base.gguf").layers.mlp.up.kernel[...]
    assert np.abs(again.layers.mlp.up.kernel[...] - base).max() > 0.1


def test_bfloat16_keeps_its_bits_and_vectors_are_float32(tmp_path):
    config = dataclasses.replace(shape("qwen2"), vocab_size=264)
    model = decoder(tmp_path, config, "bfloat16")
    path = written(tmp_path, model)
    kinds = gguf.GGMLQuantizationType
    for tensor in gguf.GGUFReader(path).tensors:
        vector = len(tensor.shape) == 1
        assert tensor.tensor_type == (kinds.F32 if vector else kinds.BF16)
    found = tensors(models.load_model(path, "bfloat16"))
    for name, values in tensors(model).items():
        np.testing.assert_array_equal(found[name], values, name)


def test_the_gguf_package_reads_what_llama_cpp_needs(tmp_path):
    config = dataclasses.replace(shape("llama"), vocab_size=270)
    reader = gguf.GGUFReader(written(tmp_path, decoder(tmp_path, config), stops=(3,)))
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.name"] == "mine"
    assert fields["llama.rope.dimension_count"] == config.head_width
    assert fields["llama.attention.head_count_kv"] == config.num_kv_heads
    assert len(fields["tokenizer.ggml.tokens"]) == 270
    types = fields["tokenizer.ggml.token_type"]
    assert types[:256] == [1] * 256 and types[256:264] == [3] * 8
    assert types[264:] == [5] * 6  # rows of the table that no token has
    assert fields["tokenizer.ggml.eot_token_id"] == 3
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert "tool_call" in fields["tokenizer.chat_template"]


@pytest.mark.parametrize("kind", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_tokenizers_come_back(tmp_path, kind):
    tokenizer = models.load_tokenizer(with_tokenizer(tmp_path / "t.gguf", kind))
    config = dataclasses.replace(shape("qwen2"), vocab_size=len(tokenizer))
    path = written(tmp_path, decoder(tmp_path, config), tokenizer)
    assert GGUFFile(path).metadata["tokenizer.ggml.pre"] == kind
    again = models.load_tokenizer(path)
    for text in TEXTS:
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.chat_template == tokenizer.chat_template
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert models.stop_ids(path, again) == models.stop_ids(path, tokenizer)


def test_a_tokenizer_without_a_name_in_llama_cpp_is_refused(tmp_path):
    tokenizer = models.load_tokenizer(with_tokenizer(tmp_path / "t.gguf", "qwen2"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = dataclasses.replace(shape("qwen2"), vocab_size=len(tokenizer))
    with pytest.raises(BadInput, match="llama.cpp's name.*export 'merged'"):
        written(tmp_path, decoder(tmp_path, config), tokenizer)


def test_scaled_positions_come_back(tmp_path):
    yarn = (("factor", 4.0), ("original_max_position_embeddings", 32))
    yarn = tuple(sorted((*yarn, ("rope_type", "yarn"))))
    config = dataclasses.replace(shape("qwen2"), vocab_size=264)
    model = decoder(tmp_path, config)
    model.config = dataclasses.replace(config, rope_scaling=yarn)
    assert models.load_config(written(tmp_path, model)) == model.config
    odd = (("attention_factor", 2.0), *yarn)
    model.config = dataclasses.replace(config, rope_scaling=odd)
    with pytest.raises(BadInput, match="attention_factor has no form in GGUF"):
        written(tmp_path, model)


def test_llama_3_s_scaling_becomes_divisors(tmp_path):
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0)
    scaling |= dict(high_freq_factor=4.0, original_max_position_embeddings=32)
    config = dataclasses.replace(shape("llama"), vocab_size=264)
    model = decoder(tmp_path, config)
    model.config = dataclasses.replace(config, rope_scaling=tuple(scaling.items()))
    expected, _ = rope.frequencies(model.config)
    found, _ = rope.frequencies(models.load_config(written(tmp_path, model)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.abs(expected - rope.frequencies(config)[0]).max() > 1e-4
