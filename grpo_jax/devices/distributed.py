"""One JAX process a host, only when the configuration asks for it."""

import jax
from ml_collections import ConfigDict


def initialize_distributed(config: ConfigDict) -> None:
    """Join the other hosts; a no-op with `distributed.coordinator=''`.

    Must run before any device is touched. 'auto' leaves addresses and numbers to JAX's
    cluster detection (TPU VM, Slurm, GKE).
    """
    distributed = config.distributed
    match distributed.coordinator:
        case "":
            return
        case "auto":
            jax.distributed.initialize()
        case address:
            jax.distributed.initialize(
                coordinator_address=address,
                num_processes=distributed.num_processes,
                process_id=distributed.process_id,
            )
