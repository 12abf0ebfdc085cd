"""One JAX process a host, only when the configuration asks for it."""

import jax
from ml_collections import ConfigDict

from grpo_jax.config import BadInput


def initialize_distributed(config: ConfigDict) -> None:
    """Join the other hosts; a no-op with `distributed.coordinator=''`.

    Must run before any device is touched. 'auto' leaves addresses and numbers to JAX's
    cluster detection (TPU VM, Slurm, GKE); BadInput where that finds none.
    """
    distributed = config.distributed
    match distributed.coordinator:
        case "":
            return
        case "auto":
            try:
                jax.distributed.initialize()
            except (ValueError, RuntimeError) as error:
                raise BadInput(
                    "distributed.coordinator='auto' found no cluster to join; name "
                    f"'host:port', or '' for one process ({error})"
                ) from error
        case address:
            jax.distributed.initialize(
                coordinator_address=address,
                num_processes=distributed.num_processes,
                process_id=distributed.process_id,
            )
