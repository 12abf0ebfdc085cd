"""What the benchmark of the objective counts, on the eight devices of the tests."""

import jax
import pytest

from bench.objective import COLLECTIVE, collectives, compiled, random_arrays


def test_asynchronous_collectives_with_tuple_shapes_are_found():
    text = """
      %a = f32[8,96]{1,0} all-gather(f32[1,96]{1,0} %x), dimensions={0}
      %b = (f32[1,96]{1,0}, f32[8,96]{1,0}) all-gather-start(f32[1,96]{1,0} %x)
      %c = f32[8,96]{1,0} all-gather-done((f32[1,96]{1,0}, f32[8,96]{1,0}) %b)
      %d = f32[] all-reduce(f32[] %y), to_apply=%add
      %e = f32[8]{0} add(f32[8]{0} %p, f32[8]{0} %q)
    """
    found = COLLECTIVE.findall(text)
    assert [kind for _, kind in found] == ["all-gather", "all-gather", "all-reduce"]
    assert found[1][0] == "(f32[1,96]{1,0}, f32[8,96]{1,0})"


@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_moves_no_whole_array_between_devices(packed):
    """Rewards cross devices, for a group's mean; no row of tokens does."""
    rows, length = 64, 352  # a length that no other dimension has
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    inputs = random_arrays(rows, 64, segments=8)[packed]
    found = collectives(compiled(inputs, rows, length, mesh))
    assert found  # sums at least
    assert not [shape for shape, _ in found if f"{length}" in shape]
