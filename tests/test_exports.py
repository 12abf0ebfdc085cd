"""Mode export: each format as written, read back, and refused."""

import dataclasses
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import run
from grpo_jax import exports, models
from grpo_jax.models import export

pytestmark = pytest.mark.usefixtures("signals")
KEYS = models.LoraConfig(4, 8.0, models.LORA_TARGETS, 0.0)  # of configs/tir.py:tiny


def fill(model):
    """Random adapters, B included."""
    generator = np.random.default_rng(3)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        values = generator.standard_normal(variable.shape)
        variable.set_value(jnp.asarray(0.2 * values, jnp.float32))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A PEFT folder with adapters that are not zero."""
    model = models.load_model("tiny", lora=KEYS)
    fill(model)
    folder = tmp_path_factory.mktemp("adapter")
    models.save_peft(folder, model, "tiny")
    return folder


@pytest.fixture
def command(tmp_path, adapter):
    """Arguments of mode export in tmp_path, which holds no checkpoint."""
    settings = ("--mode=export", f"--workdir={tmp_path}")
    start = f"--config.lora.init_from={adapter}"
    return ["--config=configs/tir.py:tiny", *settings, start]


def trained(adapter):
    model = models.load_model("tiny", lora=KEYS)
    models.load_peft(adapter, model)
    return model


def merged(adapter):
    model = trained(adapter)
    kernel = model.layers.mlp.up
    update = np.asarray(kernel.lora_a[...]) @ np.asarray(kernel.lora_b[...])
    return np.asarray(kernel.kernel[...]) + 8.0 / 4 * update


def test_peft_is_the_default(tmp_path, command, adapter, capsys, caplog):
    for _ in range(2):  # a later export replaces an earlier one
        assert run.main(command) == 0
    folder = tmp_path / "export"
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    name = "adapter_model.safetensors"
    found, expected = load_file(folder / name), load_file(adapter / name)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values)
        assert values.dtype == np.float32
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert "read back: logits up to 0 apart" in caplog.text


def test_merged_is_a_whole_checkpoint(tmp_path, command, adapter):
    assert run.main([*command, "--config.export.format=merged"]) == 0
    folder = tmp_path / "export-merged"
    again = models.load_model(folder)
    np.testing.assert_allclose(
        again.layers.mlp.up.kernel[...], merged(adapter), rtol=1e-6, atol=1e-6
    )
    tokenizer = models.load_tokenizer(folder)
    assert models.stop_ids(folder, tokenizer) == models.stop_ids(
        "tiny", models.load_tokenizer("tiny")
    )


def test_gguf_opens_in_the_gguf_package(tmp_path, command, adapter):
    assert run.main([*command, "--config.export.format=gguf"]) == 0
    path = tmp_path / "export.gguf"
    by_name = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    np.testing.assert_allclose(
        by_name["blk.1.ffn_up.weight"], merged(adapter)[1].T, rtol=1e-6, atol=1e-6
    )
    assert models.load_tokenizer(path).chat_template


@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_LO1_a_merge_that_is_none_is_noticed(tmp_path, command, monkeypatch, form):
    monkeypatch.setattr(export, "merged", lambda kernel, *_: kernel)
    with pytest.raises(RuntimeError, match="gives other logits than the model"):
        run.main([*command, f"--config.export.format={form}"])
    assert not (tmp_path / exports.PLACES[form]).exists()


@pytest.fixture
def routed(tmp_path, command):
    """The command with two adapters that differ."""
    keys = dataclasses.replace(KEYS, routed=True)
    model = models.load_model("tiny", lora=keys)
    fill(model)
    models.save_peft(tmp_path / "start", model, "tiny")
    more = (
        "--config.lora.routed=True",
        f"--config.lora.init_from={tmp_path / 'start'}",
    )
    return [*command, *more]


def test_routed_adapters_are_two_folders_and_both_are_compared(
    tmp_path, routed, monkeypatch
):
    assert run.main(routed) == 0
    for name in ("reasoning", "tool"):
        file = f"{name}/adapter_model.safetensors"
        found, expected = (load_file(tmp_path / d / file) for d in ("export", "start"))
        for key, values in expected.items():
            np.testing.assert_array_equal(found[key], values)

    load = models.load_peft

    def second_is_lost(path, model):
        load(path, model)
        if path.name == "partial-export":
            state = nnx.state(model, nnx.LoRAParam)
            nnx.update(model, jax.tree.map(_without_second, state))

    monkeypatch.setattr(models, "load_peft", second_is_lost)
    with pytest.raises(RuntimeError, match="gives other logits than the model"):
        run.main(routed)


def _without_second(x):
    """[L,2,R,O] is lora_b: with it zero the adapter does nothing."""
    return x.at[:, 1].set(0) if x.shape[1] == 2 else x


@pytest.mark.parametrize("form", ["merged", "gguf"])
def test_routed_adapters_are_not_one_set_of_weights(routed, form, capsys):
    assert run.main([*routed, f"--config.export.format={form}"]) == 2
    assert "routed adapters (lora.routed) are not one" in capsys.readouterr().err


def test_nothing_to_export_is_bad_input(tmp_path, command, capsys):
    assert run.main(command[:-1]) == 2
    assert "holds no checkpoint to export" in capsys.readouterr().err
    assert run.main([*command, "--config.checkpoint.load=7"]) == 2
    assert "holds no step 7; saved steps: none" in capsys.readouterr().err


def test_bfloat16_weights_differ_by_rounding_only(tmp_path, command):
    more = ("--config.model.dtype=bfloat16", "--config.export.format=merged")
    assert run.main([*command, *more]) == 0
    stored = load_file(tmp_path / "export-merged" / "model.safetensors")
    assert {str(values.dtype) for values in stored.values()} == {"bfloat16"}
    assert jax.tree.leaves(stored)
