"""Loading: folders of safetensors in every layout, and what bad ones are told."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from grpo_jax import devices, models
from grpo_jax.config import BadInput
from grpo_jax.models import tiny
from grpo_jax.models.load import BASE, expected_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny model as a Hugging Face folder of one file."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    models.save_merged(path, models.load_model("tiny"), models.load_tokenizer("tiny"))
    return path


@pytest.fixture
def broken(folder, tmp_path):
    """A copy of it to break."""
    return shutil.copytree(folder, tmp_path / "broken")


def flat(model):
    return {
        ".".join(path): np.asarray(variable.get_value())
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def forward(model, tokens):
    """Logits, compiled as one program."""
    graph, state = nnx.split(model)
    call = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    return np.asarray(call(state, jnp.asarray(tokens, jnp.int32)))


def assert_same(one, other):
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def edit_config(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_round_trip_of_a_single_file(folder):
    assert_same(models.load_model(folder), models.load_model("tiny"))
    assert models.load_config(folder) == tiny.CONFIG


def test_round_trip_of_shards(tmp_path):
    model, tokenizer = models.load_model("tiny"), models.load_tokenizer("tiny")
    models.save_merged(tmp_path, model, tokenizer, max_shard_bytes=50_000)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same(models.load_model(tmp_path), model)


def test_kernels_are_transposes_and_layers_are_stacked(folder):
    tensors = load_file(folder / "model.safetensors")
    model = models.load_model(folder)
    for layer in range(2):
        stored = tensors[f"model.layers.{layer}.mlp.down_proj.weight"]
        np.testing.assert_array_equal(
            model.layers.mlp.down.kernel[...][layer], stored.T
        )
    np.testing.assert_array_equal(
        model.head["kernel"][...], tensors["lm_head.weight"].T
    )


@pytest.mark.parametrize("source", ["tiny", "folder"])
def test_a_mesh_shards_the_same_weights(folder, source):
    source = folder if source == "folder" else source
    mesh = jax.make_mesh(
        (2, 4), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    lora = models.LoraConfig(rank=4, alpha=8.0)
    sharded = models.load_model(source, lora=lora, mesh=mesh)
    assert_same(sharded, models.load_model(source, lora=lora))
    for _, variable in nnx.to_flat_state(nnx.state(sharded, nnx.Param)):
        axes = devices.spec(variable.logical_axes, variable.shape, mesh)
        assert variable.get_value().sharding.spec == axes
    kernel = sharded.layers.mlp.up.kernel.get_value()
    assert kernel.addressable_shards[0].data.shape == (2, 64 // 2, 128 // 4)


def test_bfloat16_base_keeps_float32_adapters(folder):
    lora = models.LoraConfig(rank=4, alpha=8.0)
    model = models.load_model(folder, "bfloat16", lora=lora)
    kinds = {v.dtype for _, v in nnx.to_flat_state(nnx.state(model, BASE))}
    assert kinds == {jnp.dtype("bfloat16")}
    assert model.layers.mlp.up.lora_a.dtype == jnp.float32
    assert forward(model, np.arange(6)[None]).dtype == np.float32


def test_bfloat16_files_load_in_either_dtype(folder, tmp_path):
    model = models.load_model(folder, "bfloat16")
    models.save_merged(tmp_path, model, models.load_tokenizer("tiny"))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(models.load_model(tmp_path, "bfloat16"), model)
    wide = flat(models.load_model(tmp_path, "float32"))
    for name, values in flat(model).items():
        np.testing.assert_array_equal(wide[name], values.astype(np.float32))


def test_LO1_fresh_adapters_leave_the_base_bit_for_bit(folder):
    tokens = np.arange(12).reshape(2, 6)
    base = forward(models.load_model(folder), tokens)
    lora = models.LoraConfig(rank=4, alpha=8.0)
    model = models.load_model(folder, lora=lora, seed=1)
    np.testing.assert_array_equal(forward(model, tokens), base)
    assert float(jnp.std(model.layers.mlp.down.lora_a[...])) > 0.05


def test_adapters_depend_on_the_seed_alone():
    lora = models.LoraConfig(rank=4, alpha=8.0, targets=("q", "down"))
    one, same, other = (models.load_model("tiny", lora=lora, seed=s) for s in (1, 1, 2))
    assert_same(one, same)
    a, b = (flat(m)["layers.attention.q.lora_a"] for m in (one, other))
    assert not np.array_equal(a, b)
    adapters = [name for name in flat(one) if "lora" in name]
    assert sorted({name.split(".")[2] for name in adapters}) == ["down", "q"]


def test_KV1_padding_changes_no_logits():
    """Rows are right-padded: neither pads nor their value reach what is before."""
    model = models.load_model("tiny")
    row = np.array([5, 70, 9])
    alone = forward(model, row[None])[0]
    for pads, pad in [(1, 0), (5, 5), (20, 258)]:
        batch = np.full((2, 3 + pads), pad, np.int32)
        batch[0, :3] = row
        batch[1] = np.random.default_rng(0).integers(0, 264, 3 + pads)
        together = forward(model, batch)[0, :3]
        np.testing.assert_allclose(together, alone, atol=1e-4)
        np.testing.assert_array_equal(together.argmax(-1), alone.argmax(-1))


def refused(source, *parts, load=models.load_model):
    with pytest.raises(BadInput) as caught:
        load(source)
    for part in parts:
        assert str(part) in str(caught.value)


def test_missing_sources_are_named(tmp_path):
    refused(tmp_path / "none", "none", "no such folder")
    refused("./none", "no such folder")
    refused("none.gguf", "none.gguf")
    refused(tmp_path, "config.json is missing")
    (tmp_path / "weights.bin").write_bytes(b"x")
    refused(tmp_path / "weights.bin", "must be a .gguf")
    with pytest.raises(BadInput, match="float16"):
        models.load_model("tiny", "float16")
    with pytest.raises(BadInput, match="q_proj.*targets among q, k"):
        models.load_model("tiny", lora=models.LoraConfig(4, 8.0, ("q_proj",)))


def test_hub_id_without_a_network(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refused("some-owner/some-model", "some-owner/some-model", "no route")


def test_missing_and_extra_tensors_are_listed(broken):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.experts.weight"] = np.zeros(3, np.float32)

    edit_weights(broken, change)
    missing = "model.layers.1.mlp.up_proj.weight [128, 64] is missing"
    extra = "model.layers.0.mlp.experts.weight in"
    refused(broken, missing, extra, broken / "model.safetensors")


def test_wrong_shapes_name_tensor_file_and_both_shapes(broken):
    edit_config(broken, num_key_value_heads=4)
    name = "model.layers.0.self_attn.k_proj.weight"
    shapes = "expected shape [64, 64], found [32, 64]"
    refused(broken, name, broken / "model.safetensors", shapes, "more")


def test_a_tied_model_ignores_a_stored_head_and_rope_buffers(broken):
    edit_config(broken, tie_word_embeddings=True)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(broken, lambda t: t.update({buffer: np.zeros(8, np.float32)}))
    assert models.load_model(broken).config.tied


def test_damaged_files_are_named(broken):
    weights = broken / "model.safetensors"
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(broken, weights, "not a readable safetensors file")
    weights.unlink()
    refused(broken, "missing model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(broken, "missing model-00001-of-00002.safetensors")
    (broken / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    refused(broken, "weight_map is not an object")
    (broken / "config.json").write_text("{")
    refused(broken, broken / "config.json")


def test_integer_weights_are_refused(broken):
    name = "model.norm.weight"
    edit_weights(broken, lambda t: t.update({name: np.zeros(64, np.int8)}))
    refused(broken, name, "I8")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="gemma"), "'gemma'"),
        (dict(hidden_size=None), "'hidden_size' is missing"),
        (dict(num_attention_heads=0), "num_attention_heads=0 is not a positive"),
        (dict(num_key_value_heads=3), "num_key_value_heads=3 does not divide"),
        (dict(use_sliding_window=True), "use_sliding_window"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(rope_scaling=dict(type="longrope")), "longrope"),
        (dict(rope_scaling="yarn"), "'yarn' is not an object"),
        (dict(rope_scaling=dict(type=["yarn"])), "is not supported"),
        (dict(rope_scaling=dict(type="yarn")), "'yarn' needs a key 'factor'"),
        (dict(rope_scaling=dict(rope_type="linear", factor="4")), "factor='4' is not"),
        (
            dict(rope_scaling=dict(rope_type="llama3", factor=8, low_freq_factor=1)),
            "'llama3' needs a key 'high_freq_factor'",
        ),
        (
            dict(rope_scaling=LLAMA3 | dict(low_freq_factor=4.0)),
            "low_freq_factor is not below high_freq_factor",
        ),
        (
            dict(rope_scaling=LLAMA3 | dict(original_max_position_embeddings="8K")),
            "original_max_position_embeddings='8K' is not a positive number",
        ),
        (dict(rope_theta="big"), "rope_theta='big' is not a positive number"),
        (dict(rms_norm_eps=None, head_dim=2.5), "head_dim=2.5 is not a positive"),
        (dict(num_key_value_heads="2"), "num_key_value_heads='2' is not a positive"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
    ],
)
def test_configs_that_the_decoder_cannot_run(broken, changes, message):
    edit_config(broken, **changes)
    refused(broken, message, broken / "config.json")


def test_fingerprint_follows_the_weights(folder, broken):
    before = models.base_fingerprint(folder)
    assert before == models.base_fingerprint(broken)
    edit_weights(broken, lambda t: t["model.norm.weight"].fill(2))
    assert models.base_fingerprint(broken) != before
    assert re.fullmatch(r"[0-9a-f]{64}", before)


def test_expected_tensors_are_those_of_the_file(folder):
    shapes = {k: v.shape for k, v in load_file(folder / "model.safetensors").items()}
    assert expected_tensors(models.abstract_model(tiny.CONFIG)) == shapes


def test_tiny_tokenizer_is_one_token_a_byte():
    tokenizer = models.load_tokenizer("tiny")
    text = "héllo 转账 <tool_call>\n\t{}"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == tiny.CONFIG.vocab_size
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer("a<|im_end|>")["input_ids"][-1] == end == tokenizer.eos_token_id
    assert models.stop_ids("tiny", tokenizer) == (tokenizer.pad_token_id, end)
    assert "<tool_call>" in tokenizer.chat_template


def test_tokenizer_of_a_folder(folder, broken):
    tokenizer = models.load_tokenizer(folder)
    assert tokenizer.get_vocab() == models.load_tokenizer("tiny").get_vocab()
    assert tokenizer.chat_template == models.load_tokenizer("tiny").chat_template
    (broken / "generation_config.json").write_text('{"eos_token_id": [258, 7]}')
    assert models.stop_ids(broken, tokenizer) == (7, 256, 258)
    (broken / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(BadInput, match="generation_config.json: eos_token_id"):
        models.stop_ids(broken, tokenizer)
    (broken / "tokenizer.json").write_text("{}")
    refused(broken, broken, load=models.load_tokenizer)
    (broken / "tokenizer.json").unlink()
    refused(broken, "tokenizer.json is missing", load=models.load_tokenizer)
