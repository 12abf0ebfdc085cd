"""What a run costs on TPUs that are not there: its programs compiled for a topology.

    python run.py --config=configs/tir.py --mode=plan --config.plan.topology=v5e:4x4

The TPU compiler (libtpu, a package; no TPU) compiles the trainer's own programs from
abstract arrays: prefill, extend, decode, score and update. Figures of memory are the
compiler's; times are rooflines, the least that a chip's peak rates allow. What is not
counted is said. DIR/plan.json has all numbers.
"""

import json
import logging
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from grpo_jax import models
from grpo_jax.config import BadInput
from grpo_jax.models.known import known_config
from grpo_jax.planning.chips import GIB, Chip, chip, describe, topology_mesh
from grpo_jax.planning.counting import collectives, work
from grpo_jax.planning.programs import (
    Program,
    device_bytes,
    make_parts,
    programs,
)

LOG = logging.getLogger(__name__)
# The first size that the compiler names where memory runs out is what it asked for.
_NEEDED = re.compile(r"\b([\d.]+)([KMG])\b")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass
class Cost:
    """Of one program, on one device where not said otherwise.

    Attributes:
      name, tokens: the program and the positions that it computes, on all devices.
      fits: the compiler found room for it.
      temporaries: bytes beside its arguments and results; None: unknown.
      needed: bytes of HBM that the compiler asked for; None where it fits.
      flops, bytes: of its matrix products.
      collectives: kind -> (how often, bytes taken in).
      seconds: roofline by "compute", "memory" and "links".
      compile_seconds: what compiling took.
    """

    name: str
    tokens: int
    fits: bool = True
    temporaries: int | None = None
    needed: int | None = None
    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=dict)
    compile_seconds: float = 0.0

    @property
    def limit(self) -> str:
        return max(self.seconds, key=self.seconds.get)


@dataclass
class Plan:
    """Of a whole step.

    Attributes:
      kept: bytes a device holds, by kind.
      costs: one a program.
      peaks: bytes at the peak of "rollout" and "update"; None: a program did not fit.
      memory: bytes of HBM.
      advice: what to change where something does not fit.
    """

    title: str
    kept: dict[str, int]
    costs: list[Cost]
    peaks: dict[str, int | None]
    memory: int
    advice: list[str]


def main(config: ConfigDict, workdir: Path) -> None:
    """Print the plan of a config and write DIR/plan.json; BadInput as for a run."""
    topology = config.plan.topology
    if not topology:
        raise BadInput("--mode=plan needs plan.topology, such as v5e:4x4")
    one, mesh = chip(topology), topology_mesh(topology, config.mesh)
    dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    shape = known_config(config.model.source)
    if shape is None:
        shape = models.load_config(config.model.source)
    plan = make_plan(config, shape, mesh, one, describe(topology, mesh, dtype), dtype)
    _print(plan)
    workdir.mkdir(parents=True, exist_ok=True)
    record = asdict(plan) | {"topology": topology, "source": config.model.source}
    (workdir / "plan.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {workdir / 'plan.json'}")


def make_plan(
    config: ConfigDict,
    shape: models.ModelConfig,
    mesh: Mesh,
    one: Chip,
    title: str,
    dtype: str,
) -> Plan:
    """Compile every program of the config for the mesh's devices."""
    with jax.set_mesh(mesh):
        parts = make_parts(config, shape, mesh, dtype)
        kept = {
            "base weights": device_bytes(parts.base),
            "adapters and optimizer": device_bytes(parts.state),
            "reference adapters": device_bytes(parts.adapters),
            "weights for decoding": 0
            if mesh.shape["fsdp"] == 1
            else device_bytes(parts.decoder),
            "KV cache": device_bytes(parts.slots),
            "gradient": device_bytes(parts.adapters),
            "rollout batch, unpacked": device_bytes(parts.batch) * _batches(config),
        }
        costs, peaks = [], {"rollout": 0, "update": 0}
        for program in programs(config, parts, mesh):
            LOG.info("compiling %s", program.name)
            cost = _cost(program, mesh.size, one)
            costs.append(cost)
            phase = program.phase
            if not cost.fits or peaks[phase] is None:
                peaks[phase] = None
            else:
                peaks[phase] = max(peaks[phase], _held(kept, phase) + cost.temporaries)
    advice = [*_advice(config, costs, kept, one), *_too_high(peaks, one)]
    return Plan(title, kept, costs, peaks, one.memory, advice)


def _batches(config: ConfigDict) -> int:
    """Micro-batches of a step if every trajectory had a row of its own."""
    trajectories = config.train.prompts_per_step * config.rollout.num_generations
    return -(-trajectories // config.train.micro_batch_size)


# What is in memory in one phase only: the cache is freed before the update begins.
ONLY = {
    "rollout": ("KV cache", "weights for decoding"),
    "update": ("gradient", "rollout batch, unpacked"),
}


def _held(kept: dict[str, int], phase: str) -> int:
    """Bytes beside a program of this phase."""
    absent = [kind for other, kinds in ONLY.items() if other != phase for kind in kinds]
    return sum(size for kind, size in kept.items() if kind not in absent)


def _too_high(peaks: dict[str, int | None], one: Chip) -> list[str]:
    """Phases of which every program fits, but not beside what else is held."""
    return [
        f"the {phase} does not fit: its peak is {peak / GIB:.1f} GiB of "
        f"{one.memory / GIB:.0f}; raise mesh.fsdp or mesh.tensor, or lower "
        + ("rollout.slots" if phase == "rollout" else "train.micro_batch_size")
        for phase, peak in peaks.items()
        if peak is not None and peak > one.memory
    ]


def _cost(program: Program, devices: int, one: Chip) -> Cost:
    started = time.monotonic()
    traced = program.trace()
    total = work(traced.jaxpr.jaxpr, program.while_trips)
    cost = Cost(program.name, program.tokens)
    cost.flops, cost.bytes = total.flops / devices, total.bytes / devices
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = _NEEDED.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        cost.fits = False
        if needed:
            cost.needed = int(float(needed[1]) * _UNITS[needed[2].upper()])
        taken = 0.0
    else:
        cost.temporaries = compiled.memory_analysis().temp_size_in_bytes
        cost.collectives = collectives(compiled.as_text(), program.while_trips)
        taken = sum(size for _, size in cost.collectives.values())
    cost.seconds = {
        "compute": cost.flops / one.flops,
        "memory": cost.bytes / one.bandwidth,
        "links": taken / one.links,
    }
    cost.compile_seconds = time.monotonic() - started
    return cost


_REMEDIES = {
    "prefill": "lower rollout.max_prompt_length",
    "extend": "lower rollout.slots or rollout.max_completion_length",
    "decode": "lower rollout.slots or rollout.max_completion_length",
    "score": "lower train.micro_batch_size or rollout.max_completion_length",
    "update": "lower train.micro_batch_size or rollout.max_completion_length",
}


def _advice(config, costs: list[Cost], kept: dict[str, int], one: Chip) -> list[str]:
    found = []
    for cost in costs:
        if cost.fits:
            continue
        asked = f"needs {cost.needed / GIB:.1f} GiB of" if cost.needed else "exceeds"
        found.append(
            f"{cost.name} does not fit: it {asked} {one.memory / GIB:.0f} GiB; "
            f"{_REMEDIES[cost.name]}{_slots_that_fit(config, cost, kept, one)}"
        )
    uncounted = {
        "the critic of objective.estimator='steppo'": config.objective.estimator
        == "steppo",
        "the teacher's pass of objective.token_weights='gear'": (
            config.objective.token_weights == "gear"
        ),
        "the routing of lora.routed in decoding": config.lora.routed,
        "the cold start": config.sft.num_epochs > 0,
    }
    found += [f"not counted: {what}" for what, used in uncounted.items() if used]
    if any(not cost.fits for cost in costs) and config.mesh.tensor == 1:
        found.append(
            "mesh.tensor=2 or 4 shares every layer's activations among more devices"
        )
    if any(not cost.fits for cost in costs) and not config.train.remat:
        found.append("train.remat=True keeps one activation a layer")
    return found


def _slots_that_fit(config, cost: Cost, kept: dict[str, int], one: Chip) -> str:
    """How many slots leave room, where the cache is what is too large."""
    if cost.name != "decode" or not cost.needed:
        return ""
    a_slot = kept["KV cache"] / config.rollout.slots
    over = (cost.needed - one.memory) / a_slot
    fitting = int(config.rollout.slots - over)
    return f" (about {fitting} slots of this length fit)" if fitting > 0 else ""


def _print(plan: Plan) -> None:
    console = Console()
    print(plan.title)
    held = Table("on a device", "GiB", title="Memory", title_justify="left")
    for kind, size in plan.kept.items():
        held.add_row(kind, f"{size / GIB:.2f}")
    for phase, peak in plan.peaks.items():
        text = "does not fit" if peak is None else f"{peak / GIB:.2f}"
        held.add_row(f"peak of the {phase}, of {plan.memory / GIB:.0f}", text)
    table = Table(
        *("program", "tokens", "temporary GiB", "TFLOP", "GB moved", "GB received"),
        *("ms", "limit", "compiled in s"),
        title="Programs, a device; ms at least",
        title_justify="left",
    )
    links = Table(
        *("program", "collective", "times", "GB received"),
        title="Collectives, a device",
        title_justify="left",
    )
    for cost in plan.costs:
        table.add_row(*_row(cost))
        for kind, (count, size) in cost.collectives.items():
            links.add_row(cost.name, kind, f"{count:.0f}", f"{size / 1e9:.3f}")
    for one in (held, table, links):
        console.print(one)
    for line in plan.advice:
        print(line)


def _row(cost: Cost) -> list[str]:
    taken = sum(size for _, size in cost.collectives.values())
    return [
        cost.name,
        f"{cost.tokens:,}",
        f"{cost.temporaries / GIB:.2f}" if cost.fits else "too much",
        f"{cost.flops / 1e12:.2f}",
        f"{cost.bytes / 1e9:.1f}",
        f"{taken / 1e9:.2f}",
        f"{1e3 * max(cost.seconds.values()):.1f}",
        cost.limit,
        f"{cost.compile_seconds:.0f}",
    ]
