"""How often the long checks repeat: a tenth of the full count in the slow tests.

GRPO_JAX_FULL=1 runs them whole, which takes many minutes.
"""

import os

FULL = os.environ.get("GRPO_JAX_FULL") == "1"


def of(full: int) -> int:
    return full if FULL else full // 10
