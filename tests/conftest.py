"""Eight virtual CPU devices for every test, and a compilation cache across runs."""

import os
import signal
from pathlib import Path

import compile_cache
import jax
import pytest
from jax.sharding import AxisType

# Before any device is touched: importing a test module may already build arrays. Most
# of the suite's time is compiling; less optimised programs compile in half of it.
# Eight virtual devices on a busy machine may wait for each other longer than the 40 s
# after which XLA ends the process.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", compile_cache.folder())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree, for tests that run the command line."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def one_device():
    """Runs of this process use one of the eight devices.

    For tests that no mesh could fail: eight virtual devices on one core compile and
    compute eight times.
    """
    from grpo_jax import devices  # not before the settings above

    mesh = jax.make_mesh(
        (1, 1),
        ("fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:1],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "make_mesh", lambda keys: mesh)
        yield


@pytest.fixture(scope="module")
def signals():
    """For commands run in this process, which take over SIGTERM and SIGINT."""
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
