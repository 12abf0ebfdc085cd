"""Adapters as PEFT folders and merged checkpoints, without torch."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from grpo_jax import models
from grpo_jax.config import BadInput
from grpo_jax.models.blockwise import Packing
from grpo_jax.models.decoder import Linear
from grpo_jax.models.export import merged

LORA = models.LoraConfig(rank=4, alpha=10.0, targets=("q", "v", "down"))
TOKENS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)


def adapted(lora=LORA, **options):
    """The tiny model with random adapters, B included."""
    model = models.load_model("tiny", lora=lora, **options)
    generator = np.random.default_rng(3)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        values = generator.standard_normal(variable.shape).astype(np.float32)
        old = variable.get_value()
        variable.set_value(jax.device_put(0.2 * values, old.sharding))
    return model


def forward(model):
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state: nnx.merge(graph, state)(TOKENS))(state))


@pytest.fixture
def peft_folder(tmp_path):
    models.save_peft(tmp_path / "adapter", adapted(), "owner/base")
    return tmp_path / "adapter"


def edit_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def adapters(model):
    return jax.tree.leaves(nnx.state(model, nnx.LoRAParam))


def test_LO1_scale_is_alpha_over_rank_in_layer_and_merge():
    a, b = np.array([[1.0, 2], [0, 1]]), np.array([[1.0, 0], [1, -1]])  # [r,in] [out,r]
    lora = models.LoraConfig(rank=2, alpha=4.0)
    axes = (2, "embed"), (2, "mlp")
    options = dict(bias=False, lora=lora, dtype=jnp.float32, rngs=nnx.Rngs(0))
    linear = Linear(1, *axes, **options)
    # One layer, as the scan over layers hands it out.
    linear.kernel.set_value(jnp.zeros((2, 2)))
    linear.lora_a.set_value(jnp.asarray(a.T, jnp.float32))
    linear.lora_b.set_value(jnp.asarray(b.T, jnp.float32))
    x = jnp.ones((1, 1, 2))
    np.testing.assert_array_equal(linear(x)[0, 0], [6, 4])
    zeros = np.zeros((2, 2), np.float32)
    kernel = merged(zeros, a.T.astype("f4"), b.T.astype("f4"), lora.alpha / lora.rank)
    np.testing.assert_array_equal(kernel.T, [[2, 4], [2, 2]])
    np.testing.assert_array_equal(x[0, 0] @ kernel, [6, 4])


def test_LO1_merged_folder_gives_the_adapted_logits(tmp_path):
    model = adapted(models.LoraConfig(rank=4, alpha=10.0))
    models.save_merged(tmp_path, model, models.load_tokenizer("tiny"), stops=(258, 256))
    reloaded = models.load_model(tmp_path)
    expected = forward(model)
    np.testing.assert_allclose(forward(reloaded), expected, atol=1e-4)
    assert np.abs(forward(models.load_model("tiny")) - expected).max() > 0.1
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [258, 256]


def test_LO3_dropout_acts_in_the_training_forward_only():
    lora = models.LoraConfig(rank=4, alpha=10.0, dropout=0.5)
    graph, state = nnx.split(adapted(lora))
    plain = forward(adapted(models.LoraConfig(rank=4, alpha=10.0)))
    np.testing.assert_array_equal(forward(nnx.merge(graph, state)), plain)
    positions = jnp.broadcast_to(jnp.arange(12), TOKENS.shape)
    packing = Packing.causal(*TOKENS.shape)

    @jax.jit
    def hidden(key):
        model = nnx.merge(graph, state)
        return model.hidden(TOKENS, positions, packing, dropout_key=key)

    one, same, other = (np.asarray(hidden(jax.random.key(k))) for k in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.01
    np.testing.assert_array_equal(forward(nnx.merge(graph, state)), plain)


def test_LO1_peft_round_trip_is_exact(peft_folder):
    model = models.load_model("tiny", lora=LORA)
    models.load_peft(peft_folder, model)
    for found, expected in zip(adapters(model), adapters(adapted()), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert models.read_peft_config(peft_folder) == LORA


def test_peft_folder_of_a_sharded_model(tmp_path):
    mesh = jax.make_mesh(
        (2, 4), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    model = adapted(mesh=mesh)
    models.save_peft(tmp_path, model, "owner/base")
    again = models.load_model("tiny", lora=LORA, mesh=mesh)
    models.load_peft(tmp_path, again)
    for found, expected in zip(adapters(again), adapters(model), strict=True):
        assert found.sharding == expected.sharding
        np.testing.assert_array_equal(found, expected)


def test_peft_folder_speaks_pefts_names(peft_folder):
    config = json.loads((peft_folder / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj", "down_proj"]
    assert (config["r"], config["lora_alpha"]) == (4, 10)
    assert config["base_model_name_or_path"] == "owner/base"
    tensors = load_file(peft_folder / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1"
    assert tensors[f"{prefix}.mlp.down_proj.lora_A.weight"].shape == (4, 128)
    assert tensors[f"{prefix}.self_attn.v_proj.lora_B.weight"].shape == (32, 4)
    assert len(tensors) == 2 * 2 * 3


def refused(folder, lora, *parts):
    model = models.load_model("tiny", lora=lora)
    before = [np.asarray(leaf) for leaf in adapters(model)]
    with pytest.raises(BadInput) as caught:
        models.load_peft(folder, model)
    for part in parts:
        assert str(part) in str(caught.value)
    for found, expected in zip(adapters(model), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_adapters_of_another_shape_are_refused(peft_folder):
    refused(peft_folder, models.LoraConfig(8, 10.0, LORA.targets), "rank 4", 8)
    refused(peft_folder, models.LoraConfig(4, 8.0, LORA.targets), "alpha 10", 8)
    refused(peft_folder, models.LoraConfig(4, 10.0, ("q",)), "targets", "down")
    refused(peft_folder, None, "without adapters")


def test_damaged_adapters_are_refused(peft_folder):
    weights = peft_folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file(tensors | {name: np.zeros((4, 32), np.float32)}, weights)
    refused(peft_folder, LORA, name, "expected shape [4, 64], found [4, 32]")
    save_file(tensors | {"stray": np.zeros(1, np.float32)}, weights)
    refused(peft_folder, LORA, "stray is not expected")
    del tensors[name]
    save_file(tensors, weights)
    refused(peft_folder, LORA, name, "is missing")
    weights.unlink()
    refused(peft_folder, LORA, weights.name)


@pytest.mark.parametrize(
    "changes",
    [
        dict(use_rslora=True),
        dict(use_dora=True),
        dict(peft_type="IA3"),
        dict(rank_pattern={"q_proj": 8}),
        dict(bias="all"),
        dict(target_modules=["q_proj", "lm_head"]),
        dict(target_modules=r".*q_proj"),
    ],
)
def test_lora_variants_are_refused_by_name(peft_folder, changes):
    edit_config(peft_folder, **changes)
    (key,) = changes
    refused(peft_folder, LORA, f"{key}=", peft_folder)


def test_folders_that_are_no_adapter(tmp_path):
    refused(tmp_path / "none", LORA, "adapter_config.json")
    with pytest.raises(BadInput, match="no adapters"):
        models.save_peft(tmp_path, models.load_model("tiny"), "tiny")
