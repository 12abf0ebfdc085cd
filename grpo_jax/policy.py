"""Which adapters a mode works on, and whether they fit what is given.

Mode train always goes on from the newest; eval and export read the one that
`checkpoint.load` names, also beside a training that goes on. A run may start from the
adapters of another, or of a PEFT folder.
"""

import json
import logging
from pathlib import Path

from flax import nnx
from ml_collections import ConfigDict

from grpo_jax import checkpoints, models
from grpo_jax.checkpoints import Saved
from grpo_jax.config import BadInput

LOG = logging.getLogger(__name__)
LOOKS = 5  # how often a checkpoint may vanish before it can be read


def find(config: ConfigDict, workdir: Path) -> Saved | None:
    """The checkpoint to read; None: this workdir never had any.

    BadInput where there is none by that name, or where all are damaged.
    """
    folder, keys = workdir / "checkpoints", config.checkpoint
    if keys.load == "newest" and not any(folder.glob("*step_*")):
        return None
    return checkpoints.find(folder, keys.load, keys.best)


def read(
    config: ConfigDict, workdir: Path, saved: Saved, adapters: nnx.State
) -> tuple[Saved, nnx.State]:
    """The chosen checkpoint as of now, and its adapters in the places of `adapters`.

    `saved` was chosen before the model was loaded. A training that goes on beside may
    have deleted it since: then `checkpoint.load` chooses again. BadInput where it
    names a step that is gone, and as `check` and `checkpoints.read_adapters`.
    """
    for _ in range(LOOKS):
        try:
            if not config.checkpoint.load.isdecimal():
                saved = find(config, workdir) or saved
            check(config, saved)
            return saved, checkpoints.read_adapters(saved, adapters)
        except Exception:  # orbax raises many types where a file is gone
            if _is_whole(saved):
                raise
            LOG.info("%s is gone; choosing again", saved.path)
    raise BadInput(f"checkpoint {saved.path} was deleted before it could be read")


def _is_whole(saved: Saved) -> bool:
    try:
        checkpoints.find(saved.path.parent, str(saved.step))
    except BadInput:
        return False
    return True


def check(config: ConfigDict, saved: Saved) -> None:
    """Refuse a checkpoint of another base model or adapter scale."""
    check_alpha(saved, config.lora.alpha)
    check_base(saved, config.model.source)


def check_base(saved: Saved, source: str) -> None:
    """Refuse adapters of another base model; shapes do not show that either."""
    if saved.meta["base"] != models.base_fingerprint(source):
        raise BadInput(
            f"checkpoint {saved.path} was trained on other base weights than "
            f"model.source={source} now holds"
        )


def check_alpha(saved: Saved, alpha: float) -> None:
    """Refuse adapters that were trained under another scale; shapes do not show it."""
    if saved.meta.get("alpha", alpha) != alpha:
        raise BadInput(
            f"checkpoint {saved.path}: lora.alpha was {saved.meta['alpha']}, the "
            f"configuration has {alpha}"
        )


def start_from(path: str, model: models.Decoder) -> None:
    """Load adapters from a PEFT folder or from the newest checkpoint of a workdir."""
    folder = Path(path)
    if not (folder / "checkpoints").is_dir():
        names = ("adapter_config.json", "reasoning/adapter_config.json")
        if not any((folder / name).is_file() for name in names):
            raise BadInput(
                f"lora.init_from '{path}' is neither a PEFT folder (with "
                "adapter_config.json) nor a run's workdir (with checkpoints)"
            )
        models.load_peft(folder, model)
        _compare_base_names(folder, model)
        return
    adapters = nnx.state(model, nnx.LoRAParam)
    saved = checkpoints.find(folder / "checkpoints")
    check_base(saved, model.source)
    check_alpha(saved, model.lora.alpha)
    nnx.update(model, checkpoints.read_adapters(saved, adapters))


def _compare_base_names(folder: Path, model: models.Decoder) -> None:
    """Say so where a PEFT folder names another base: only its names are known."""
    ours = models.base_name(model.source)
    for file in sorted(folder.rglob("adapter_config.json")):
        named = json.loads(file.read_text()).get("base_model_name_or_path")
        if named and named != ours:
            LOG.warning(
                "'%s' was trained on '%s', model.source is '%s'", file, named, ours
            )
