"""Complete checkpoints or none: adapters, optimizer, random keys, cursors.

    checkpoints/step_000010/
        arrays/          orbax: every array of the training state
        manifest.json    the host state, each array's shape, each file's size and hash

A step is written beside its final name and takes that name in one rename, manifest
included; older steps are deleted only after that. So whatever has the final name was
once complete, and the hashes tell whether it still is: a step that has lost a byte
since is set aside, named, and the one before it is used. A step cut off between its
manifest and its rename is complete, and gets its name at the next start. Saving is
synchronous, since adapters are small against the minutes that a rollout takes.

The run that owns the folder does all this through `Checkpoints`; `find` and
`read_adapters` only read, also beside a run that goes on saving.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils

from grpo_jax.config import BadInput

STEP_NAME = re.compile(r"step_(\d+)")
PARTIAL, DAMAGED = "partial-", "damaged-"
MANIFEST = "manifest.json"
KEYS = {"step", "metric", "score", "meta", "arrays", "files", "digest"}

log = logging.getLogger(__name__)


class SaveError(RuntimeError):
    """A checkpoint could not be written; the earlier ones are as they were."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A step that is whole.

    Attributes:
      path: its folder.
      step: its number.
      meta: the host state that was saved with it.
      arrays: "dtype[shape]" of every array, by its path in the saved tree.
    """

    path: Path
    step: int
    meta: dict
    arrays: dict[str, str]


class Checkpoints:
    """The checkpoints of the one run that writes them.

    Attributes:
      directory: where the steps lie; BadInput if it cannot be written.
      keep: how many of the newest steps stay.
      best_metric: name of the score of which the highest stays too; "": none.
    """

    def __init__(self, directory: str | Path, keep: int, best_metric: str = ""):
        self.directory = Path(directory).absolute()
        self.keep = keep
        self.best_metric = best_metric
        self._checkpointer = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        if jax.process_index() == 0:
            there = self.directory.exists()
            if there and not os.access(self.directory, os.W_OK | os.X_OK):
                raise BadInput(f"'{directory}' cannot be written")
            if there and not self.directory.is_dir():
                raise BadInput(f"'{directory}' is not a folder")
            self._finish_partials()

    def steps(self) -> list[int]:
        """The saved steps, oldest first, damaged ones included."""
        return sorted(_saved_steps(self.directory))

    def best_step(self) -> int | None:
        """The step with the highest score, the newest of equals; None: no scores."""
        return _best_step(self.directory, self.best_metric)

    def newest(self) -> Saved | None:
        """The newest step that is whole, or None; damaged ones are set aside."""
        for step in reversed(self.steps()):
            saved, fault = _verify(self._path(step), step)
            if saved is not None:
                return saved
            self._set_aside(self._path(step), fault)
        return None

    def save(
        self, step: int, arrays: Any, meta: dict, score: int | float | None = None
    ) -> None:
        """Write one step: a pytree of arrays and a JSON dict of host state.

        `arrays` may hold nnx.State and typed PRNG keys. Every host calls this.
        SaveError leaves all earlier steps as they were.
        """
        final = self._path(step)
        partial = final.with_name(PARTIAL + final.name)
        try:
            self._checkpointer.save(
                partial / "arrays", args=ocp.args.StandardSave(arrays), force=True
            )
            if jax.process_index() == 0:
                manifest = {"step": step, "meta": meta, "arrays": _shapes(arrays)}
                manifest |= {"metric": self.best_metric, "score": score}
                _write_manifest(partial, manifest)
                _rename(partial, final)
        except Exception as error:  # orbax raises many types, whatever the cause
            shutil.rmtree(partial, ignore_errors=True)
            newest = max(self.steps(), default=None)
            kept = "there is none before it" if newest is None else f"{newest} is kept"
            raise SaveError(
                f"step {step} was not saved in '{self.directory}'; {kept}: {error}"
            ) from error
        multihost_utils.sync_global_devices(f"checkpoint {step}")
        if jax.process_index() == 0:
            self._prune()

    def restore(self, saved: Saved, abstract: Any) -> Any:
        """The arrays of a step.

        `abstract` is the pytree that was saved, of arrays or ShapeDtypeStructs whose
        shardings say where each array goes: any mesh will do, not only the saved one.
        Raises BadInput where the step holds other arrays than `abstract`.
        """
        _check_arrays(saved.path, saved.arrays, abstract)
        return self._checkpointer.restore(
            saved.path / "arrays",
            args=ocp.args.StandardRestore(jax.tree.map(_abstract, abstract)),
        )

    def close(self) -> None:
        """Release orbax; every save has already returned."""
        self._checkpointer.close()

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _finish_partials(self) -> None:
        """Complete or remove what a killed process was saving."""
        for partial in self.directory.glob(f"{PARTIAL}*"):
            name = partial.name.removeprefix(PARTIAL)
            match = STEP_NAME.fullmatch(name)
            if match and _verify(partial, int(match[1]))[0] is not None:
                _rename(partial, partial.with_name(name))
                log.info("completed the save of %s", name)
            else:
                shutil.rmtree(partial, ignore_errors=True)
                log.warning("removed %s: its save was cut off", partial)

    def _prune(self) -> None:
        steps = self.steps()
        kept = set(steps[-self.keep :])
        if self.best_metric:
            kept.add(self.best_step())
        for step in steps:
            if step not in kept:
                shutil.rmtree(self._path(step))

    def _set_aside(self, path: Path, fault: str) -> None:
        log.warning("checkpoint %s is incomplete (%s): not used", path, fault)
        # All hosts have seen the fault before one of them moves the evidence.
        multihost_utils.sync_global_devices(f"damaged {path.name}")
        if jax.process_index() == 0:
            aside = path.with_name(DAMAGED + path.name)
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(path, aside)
        multihost_utils.sync_global_devices(f"set aside {path.name}")


def find(directory: str | Path, which: str = "newest", metric: str = "") -> Saved:
    """A whole step of any run, which is left as it is: "newest", "best" or a number.

    The newest falls back to the one before it where it is damaged, saying so; a best
    step (the highest score by `metric`) or a numbered one does not. Raises BadInput
    where there is none.
    """
    if which == "newest":
        return _find_newest(directory)
    paths = _saved_steps(directory)
    step = _best_step(directory, metric) if which == "best" else int(which)
    if step not in paths:
        known = ", ".join(map(str, sorted(paths))) or "none"
        wanted = f"step {which}"
        if which == "best":
            wanted = f"step with a score by checkpoint.best='{metric}'"
        raise BadInput(f"'{directory}' holds no {wanted}; saved steps: {known}")
    saved, fault = _verify(paths[step], step)
    if saved is None:
        raise BadInput(f"checkpoint {paths[step]} is incomplete ({fault})")
    return saved


def _find_newest(directory: str | Path) -> Saved:
    faults = []
    for step, path in sorted(_saved_steps(directory).items(), reverse=True):
        saved, fault = _verify(path, step)
        if saved is not None:
            return saved
        faults.append(f"{path.name}: {fault}")
        log.warning("checkpoint %s is incomplete (%s): not used", path, fault)
    reason = f" ({'; '.join(faults)})" if faults else ""
    raise BadInput(f"'{directory}' holds no complete checkpoint{reason}")


def read_adapters(saved: Saved, adapters: nnx.State) -> nnx.State:
    """The policy's adapters of a checkpoint, whatever optimizer trained them.

    Names and shapes must be those of `adapters`, which also give each array its place;
    BadInput where they are not.
    """
    name = "['state'].adapters"  # where the trainer puts them in what it saves
    policy = {
        k.removeprefix(name): v for k, v in saved.arrays.items() if k.startswith(name)
    }
    _check_arrays(saved.path, policy, adapters)
    item = {"state": {"adapters": jax.tree.map(_abstract, adapters)}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(
            saved.path / "arrays",
            args=ocp.args.PyTreeRestore(
                item,
                restore_args=ocp.checkpoint_utils.construct_restore_args(item),
                partial_restore=True,
            ),
        )
    return arrays["state"]["adapters"]


def _saved_steps(directory: str | Path) -> dict[int, Path]:
    """Step numbers to folders, in no order, damaged ones included."""
    paths = [p for p in Path(directory).absolute().glob("step_*") if p.is_dir()]
    matches = [(STEP_NAME.fullmatch(path.name), path) for path in paths]
    return {int(match[1]): path for match, path in matches if match}


def _best_step(directory: str | Path, metric: str) -> int | None:
    """The step with the highest score by `metric`, the newest of equals."""
    scored = []
    for step, path in _saved_steps(directory).items():
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            if manifest["metric"] == metric and manifest["score"] is not None:
                scored.append((manifest["score"], step))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged: who restores it will say so
    return max(scored)[1] if scored else None


def _rename(partial: Path, final: Path) -> None:
    """Give a complete step its name; an older run's same step makes room."""
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)


def _write_manifest(path: Path, manifest: dict) -> None:
    files = {str(file.relative_to(path)): _digest(file) for file in _files(path)}
    manifest = json.loads(json.dumps(manifest | {"files": files}, allow_nan=False))
    manifest["digest"] = _own_digest(manifest)
    with open(path / MANIFEST, "w") as stream:
        json.dump(manifest, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _verify(path: Path, step: int) -> tuple[Saved | None, str]:
    """A step, or None and what is wrong with the files that its manifest lists."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return None, f"no {MANIFEST}"
    except OSError as error:
        return None, f"{MANIFEST}: {error.strerror}"
    except ValueError:
        return None, f"{MANIFEST} is cut off"
    if not isinstance(manifest, dict) or not KEYS <= manifest.keys():
        return None, f"{MANIFEST} is damaged"
    if manifest.pop("digest") != _own_digest(manifest):
        return None, f"{MANIFEST} has changed"
    if manifest["step"] != step:
        return None, f"it is a copy of step {manifest['step']}"
    for name, digest in manifest["files"].items():
        if not (path / name).is_file():
            return None, f"{name} is missing"
        try:
            if _digest(path / name) != digest:
                return None, f"{name} has changed"
        except OSError as error:
            return None, f"{name}: {error.strerror}"
    return Saved(path, step, manifest["meta"], manifest["arrays"]), ""


def _check_arrays(path: Path, saved: dict[str, str], abstract: Any) -> None:
    wanted = _shapes(abstract)
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise BadInput(
                f"checkpoint {path}: {name} is {saved.get(name, 'absent')}, "
                f"the configuration makes it {wanted.get(name, 'absent')}"
            )


def _shapes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(key): f"{leaf.dtype}{list(leaf.shape)}"
        for key, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _files(path: Path) -> Iterator[Path]:
    return (file for file in sorted(path.rglob("*")) if file.is_file())


def _own_digest(manifest: dict) -> str:
    """Hash of the manifest's other entries, so that it too is checked."""
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
