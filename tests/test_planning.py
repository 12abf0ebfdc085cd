"""Plans: what is counted, against programs whose work is known; shapes of models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import run
from grpo_jax import plan
from grpo_jax.models import abstract_model
from grpo_jax.models.known import known_config
from grpo_jax.planning import counting
from grpo_jax.planning.chips import CHIPS, chip


def traced(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).trace(*arrays)


def test_a_scan_counts_as_often_as_it_is_long():
    def layers(x, weights):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    found = counting.work(traced(layers, (4, 8), (5, 8, 8)).jaxpr.jaxpr, 1)
    assert found.flops == 5 * 2 * 4 * 8 * 8
    assert found.bytes == 5 * 4 * (4 * 8 + 8 * 8 + 4 * 8)


def test_a_while_counts_as_often_as_its_caller_says():
    def rounds(x, n):
        return jax.lax.fori_loop(0, n[0].astype(int), lambda _, x: x @ x, x)

    jaxpr = traced(rounds, (8, 8), (1,)).jaxpr.jaxpr
    assert counting.work(jaxpr, 7).flops == 7 * 2 * 8**3


def test_branches_remat_and_custom_gradients_are_entered():
    @jax.checkpoint
    def inner(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    jaxpr = traced(jax.jit(inner), (4, 4)).jaxpr.jaxpr
    assert counting.work(jaxpr, 1).flops == 2 * 2 * 4**3


HLO = """HloModule m

%inside (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = f32[16]{0} all-gather(%x), dimensions={0}
  %r = (f32[4]{0}, f32[4]{0}) all-reduce(%a, %b), to_apply=%add
}

%until (p: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(28)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%unknown (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

%dynamic (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = bf16[2,8]{1,0} reduce-scatter(%x), dimensions={1}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%until, body=%inside
  %v = (s32[], f32[8]) while(%t), condition=%unknown, body=%dynamic
  %c = (f32[8]{0}, f32[32]{0}) all-gather-start(%p), dimensions={0}
  %d = f32[32]{0} all-gather-done(%c)
}
"""


def test_collectives_of_a_loop_count_every_round():
    found = counting.collectives(HLO, while_trips=3)
    assert found["all-gather"] == (29, 28 * 64 + 128)
    assert found["all-reduce"] == (28, 28 * 32)
    assert found["reduce-scatter"] == (3, 3 * 32)


def test_collectives_of_a_program_on_eight_devices():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("x",), ()))

    def gathered(x, w):
        y = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return jax.lax.with_sharding_constraint(y, whole)

    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((3, 32, 32), jnp.float32, sharding=whole)
    text = jax.jit(gathered).lower(x, w).compile().as_text()
    assert counting.collectives(text, 1) == {"all-gather": (1, 16 * 32 * 4)}


# Parameters as the model cards give them, in billions.
@pytest.mark.parametrize(
    ("source", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.49),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.54),
        ("Qwen/Qwen2.5-3B-Instruct", 3.09),
        ("Qwen/Qwen2.5-7B-Instruct", 7.61),
        ("Qwen/Qwen2.5-14B-Instruct", 14.7),
        ("Qwen/Qwen3-0.6B", 0.60),
        ("Qwen/Qwen3-1.7B", 1.72),
        ("Qwen/Qwen3-4B", 4.02),
        ("Qwen/Qwen3-8B", 8.19),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.24),
        ("meta-llama/Llama-3.2-3B-Instruct", 3.21),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
    ],
)
def test_known_models_have_the_parameters_of_their_cards(source, billions):
    config = known_config(source)
    leaves = jax.tree.leaves(abstract_model(config, "bfloat16"))
    total = sum(int(np.prod(x.shape)) for x in leaves) / 1e9
    assert total == pytest.approx(billions, rel=0.01)


def test_other_models_are_not_known():
    assert known_config("Qwen/Qwen2.5-7B-Instruct-1M") is None


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ((), "plan.topology"),
        (("--config.plan.topology=v9:4x4",), "no chip 'v9'"),
    ],
)
def test_what_cannot_be_planned_for_exits_2(tmp_path, capsys, more, says):
    arguments = ["--config=configs/tir.py", f"--workdir={tmp_path}", "--mode=plan"]
    assert run.main([*arguments, *more]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_chips_are_named_before_the_colon():
    assert chip("v5e:4x4") is CHIPS["v5e"]


def test_a_peak_above_the_memory_is_said():
    peaks = {"rollout": 17 * 2**30, "update": None}
    (line,) = plan._too_high(peaks, CHIPS["v5e"])
    assert "rollout does not fit: its peak is 17.0 GiB of 16" in line
    assert "lower rollout.slots" in line


def test_what_only_one_phase_holds_does_not_count_in_the_other():
    kept = {"base weights": 1, "KV cache": 2, "weights for decoding": 4, "gradient": 8}
    kept["rollout batch, unpacked"] = 16
    assert (plan._held(kept, "rollout"), plan._held(kept, "update")) == (7, 25)


def test_advice_names_the_program_the_bytes_and_a_key():
    import configs.tir

    config = configs.tir.get_config()
    gib = 2**30
    costs = [
        plan.Cost("decode", 1, fits=False, needed=20 * gib),
        plan.Cost("update", 1),
    ]
    found = plan._advice(config, costs, {"KV cache": 8 * gib}, CHIPS["v5e"])
    assert "decode does not fit: it needs 20.0 GiB of 16 GiB" in found[0]
    assert "about 32 slots" in found[0]
    assert found[1].startswith("not counted: the cold start")
    assert found[2].startswith("mesh.tensor=2 or 4")
