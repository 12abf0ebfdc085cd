"""A 1B-4B model for the device: small groups, a lower rate, a stronger anchor.

What: a smaller policy collapses sooner, so the step is shorter, the KL to the adapters
that RL began with is on, and trajectories are short. Groups are small because memory
is. Calls are in the template's own form, which the base model knows and servers read;
--config.tools.protocol=compact takes half the tokens a call, and a cold start to learn.
Hardware: one accelerator with 16 GiB.
Time and result: not run on this hardware yet.
Command: python run.py --config=configs/edge.py

Variants
  smollm2  SmolLM2-135M and arithmetic, on a CPU
  tiny     two random layers, six steps: a smoke run
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base
from configs.base import use_smollm2, use_tiny, with_variants


def get_config(variants: str = "") -> ConfigDict:
    config = get_base()
    config.model.source = "Qwen/Qwen2.5-1.5B-Instruct"
    config.lora.rank = 8
    config.lora.alpha = 16.0

    config.rollout.num_generations = 8
    config.rollout.max_prompt_length = 512
    config.rollout.max_completion_length = 2048
    config.rollout.max_turn_length = 768
    config.rollout.max_tool_calling_iterations = 4
    config.rollout.slots = 16

    config.objective.ratio = "cumulative"
    config.objective.clip = "sqrt_log"
    config.objective.epsilon = 0.025  # arXiv 2605.07331
    config.objective.epsilon_high = 0.05
    config.objective.aggregation = "seq_mean_token_mean"
    config.objective.beta = 0.04

    config.tools.environment = "python"
    config.tools.max_result_chars = 512
    config.data.source = "reasoning_gym"
    config.data.datasets = ("chain_sum", "products", "gcd", "lcm")
    config.data.num_tasks = 1024
    config.data.num_eval_tasks = 100

    config.sft.num_epochs = 2
    config.sft.num_examples = 256
    config.sft.learning_rate = 2e-4

    config.train.num_steps = 300
    config.train.prompts_per_step = 8
    config.train.num_minibatches = 2
    config.train.learning_rate = 2e-6
    config.train.remat = True
    config.eval.every = 50
    sizes = {"smollm2": _smollm2, "tiny": _tiny}
    return with_variants(config, variants, {}, sizes)


def _smollm2(config: ConfigDict) -> None:
    use_smollm2(config)
    config.rollout.max_completion_length = 384
    config.rollout.max_turn_length = 160
    config.data.num_tasks = 256
    config.data.num_eval_tasks = 32
    config.sft.num_examples = 96
    config.sft.learning_rate = 5e-4
    config.train.learning_rate = 5e-5
    config.eval.every = 0


def _tiny(config: ConfigDict) -> None:
    use_tiny(config)
    config.sft.learning_rate = 5e-4
    config.eval.every = 0
