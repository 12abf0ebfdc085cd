"""SmolLM2-135M-Instruct learns to pick the fund assistant's tool. Start here.

What: a short cold start on generated gold answers teaches the answer's form and most of
the choices; GRPO with the graded reward goes on from there. The final table compares
held-out tasks, of templates that training never sees, before and after.
Hardware: two CPU cores and 8 GiB of memory are enough.
Measured: `long`, 400 held-out tasks, mean of three seeds: .61 of the tools right after
the cold start, .72 after RL, in 29 to 39 minutes; the default, 100 tasks: .56 and .63,
in 11 minutes (docs/experiments/quickstart.md).
Command: python run.py --config=configs/quickstart.py

Variants
  long   60 steps, evaluated on 400 held-out tasks
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base
from configs.base import with_variants


def get_config(variants: str = "") -> ConfigDict:
    config = get_base()
    config.model.source = "smollm2-135m"

    config.rollout.num_generations = 8
    config.rollout.max_prompt_length = 96
    config.rollout.max_completion_length = 16
    config.rollout.max_turn_length = 16
    config.rollout.max_tool_calling_iterations = 0  # one answer; nothing is executed
    config.rollout.slots = 128
    config.rollout.burst = 16

    config.objective.scale_rewards = "none"  # a lone success of eight is mostly luck
    config.objective.drop_flat_groups = True  # they teach nothing: a third of the time

    config.data.answer_format = "tool"  # a tool's name, ten tokens
    config.data.num_tasks = 1024
    config.data.num_eval_tasks = 100

    config.sft.num_epochs = 3
    config.sft.num_examples = 100  # two of three choices right, no tool unknown
    config.sft.batch_size = 5  # about one packed row

    config.train.num_steps = 20
    config.train.prompts_per_step = 16
    config.train.micro_batch_size = 1
    config.train.row_length = 640  # four prompts, each with its group
    config.train.learning_rate = 1e-4
    config.train.warmup_steps = 2
    return with_variants(config, variants, {"long": _long})


def _long(config: ConfigDict) -> None:
    config.data.num_eval_tasks = 400
    config.train.num_steps = 60
