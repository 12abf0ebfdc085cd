"""Which of a run's checkpoints a mode works on, and whether it fits what is given.

Mode train always goes on from the newest; eval and export read the one that
`checkpoint.load` names, also beside a training that goes on.
"""

from pathlib import Path

from ml_collections import ConfigDict

from grpo_jax import checkpoints, models
from grpo_jax.checkpoints import Saved
from grpo_jax.config import BadInput


def find(config: ConfigDict, workdir: Path) -> Saved | None:
    """The checkpoint to read; None: this workdir never had any.

    BadInput where there is none by that name, or where all are damaged.
    """
    folder, keys = workdir / "checkpoints", config.checkpoint
    if keys.load == "newest" and not any(folder.glob("*step_*")):
        return None
    return checkpoints.find(folder, keys.load, keys.best)


def check(config: ConfigDict, saved: Saved) -> None:
    """Refuse a checkpoint of another base model or adapter scale."""
    check_alpha(saved, config.lora.alpha)
    base = models.base_fingerprint(config.model.source)
    if saved.meta["base"] != base:
        raise BadInput(
            f"checkpoint {saved.path} was trained on other base weights than "
            f"model.source={config.model.source} now holds"
        )


def check_alpha(saved: Saved, alpha: float) -> None:
    """Refuse adapters that were trained under another scale; shapes do not show it."""
    if saved.meta.get("alpha", alpha) != alpha:
        raise BadInput(
            f"checkpoint {saved.path}: lora.alpha was {saved.meta['alpha']}, the "
            f"configuration has {alpha}"
        )
