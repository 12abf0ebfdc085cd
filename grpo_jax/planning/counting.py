"""Operations of a traced program and collectives of a compiled one, loops included.

XLA's own cost analysis counts the body of a loop once. Here a scan counts as often as
it is long; a `while`, whose length no program knows, as often as its caller says.
"""

import collections
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jax.extend import core


@dataclass(frozen=True)
class Work:
    """Of all devices together.

    Attributes:
      flops: multiplications and additions of the matrix products.
      bytes: their operands and results.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __rmul__(self, times: int | float) -> "Work":
        return Work(times * self.flops, times * self.bytes)


def work(jaxpr: core.Jaxpr, while_trips: int | float) -> Work:
    """The matrix products of a program.

    Args:
      jaxpr: what `jax.jit(f).trace(...)` has.
      while_trips: how often each `while` of it runs.
    """
    total = Work()
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _product(equation)
        elif name == "scan":
            total += inner["length"] * work(inner["jaxpr"].jaxpr, while_trips)
        elif name == "while":
            total += while_trips * work(inner["body_jaxpr"].jaxpr, while_trips)
        elif name == "cond":
            branches = [work(b.jaxpr, while_trips) for b in inner["branches"]]
            total += max(branches, key=lambda one: one.flops)
        else:
            for one in _inner(inner):
                total += work(one, while_trips)
    return total


def _inner(params: dict) -> Iterator[core.Jaxpr]:
    for value in params.values():
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value


def _product(equation) -> Work:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval
    depth = math.prod(left.shape[axis] for axis in contracted)
    arrays = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    moved = sum(x.size * np.dtype(x.dtype).itemsize for x in arrays)
    return Work(2.0 * arrays[-1].size * depth, float(moved))


KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_START = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")  # what a counter runs up to
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")


def collectives(text: str, while_trips: int | float) -> dict[str, tuple[float, float]]:
    """kind -> (how often, bytes that a device takes in) of an optimised HLO module.

    The bytes are those of the results. `while_trips` is for loops of unknown length.
    """
    bodies, entry = _computations(text)
    times: dict[str, float] = collections.defaultdict(float)
    _visit(entry, 1.0, bodies, while_trips, times)
    found: dict[str, list[float]] = {}
    for name, count in times.items():
        for line in bodies[name]:
            match = _COLLECTIVE.search(line)
            if match:
                size = _result_bytes(match[1], "-start(" in line)
                pair = found.setdefault(match[2], [0.0, 0.0])
                pair[0] += count
                pair[1] += count * size
    return {kind: (count, size) for kind, (count, size) in sorted(found.items())}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        start = _START.match(line)
        if start:
            name = start[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _visit(name, count, bodies, while_trips, times) -> None:
    times[name] += count
    for line in bodies.get(name, ()):
        called = _CALLED.findall(line)
        for branches in _BRANCHES.findall(line):
            called += [one.strip().lstrip("%") for one in branches.split(",")]
        repeat = 1.0
        if " while(" in line:
            condition = bodies.get(_CONDITION.search(line)[1], ())
            limits = [int(n) for one in condition for n in _LIMIT.findall(one)]
            repeat = float(max(limits)) if limits else while_trips
        for other in called:
            if other in bodies:
                _visit(other, count * repeat, bodies, while_trips, times)


def _result_bytes(shapes: str, started: bool) -> float:
    """Of a result's text; one that was started lists its operands before it."""
    sizes = [
        _width(kind) * math.prod(int(n) for n in dims.split(",") if n)
        for kind, dims in _SHAPE.findall(shapes)
        if kind != "u32" or dims  # the handles of an asynchronous one
    ]
    if started and shapes.startswith("(") and len(sizes) > 1:
        return float(max(sizes))
    return float(sum(sizes))


def _width(kind: str) -> float:
    """Bytes of an HLO element type."""
    bits = re.search(r"\d+", kind)
    return int(bits[0]) / 8 if bits else 1.0  # pred
