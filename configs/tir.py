"""Tool-integrated reasoning: mathematics with a Python interpreter, over many turns.

What: the collapse article's incident (groups of 16, 32,768 tokens, up to 15 calls, 64
problems a step, a binary outcome), with three repairs in place of plain GRPO: GTPO's
advantages by turn (arXiv 2511.14846), groups without a difference in outcome dropped
first, since a discount below 1 punishes the opening calls of those that all succeeded;
CTPO's cumulative ratio and its window that widens with the square root of the position
(arXiv 2605.07331); the likelihood-displacement penalty (arXiv 2512.04220). A cold start
on gold trajectories with calls comes first.
Hardware: a TPU slice or several GPUs; --config.mesh.tensor=4 shares the 7B base and
long rows among four devices each. What fits: --mode=plan (docs/tpu.md).
Time and result: not run on this hardware yet. `tools/call_rate` must not fall.
Command: python run.py --config=configs/tir.py

Variants: methods, each on plain GRPO; named together they compose in any order
  grpo       the setting in which the policy stopped calling its tool
  gtpo       advantages by turn from discounted returns; failures whose code is like
             a success's earn up to half of it
  mt_grpo    a reward for turns whose calls run, beside the outcome
  gigpo      turns that began with equal observations compared
  steppo     a critic's values, generalised advantages and one ratio a turn
  gear       advantages weighted by token, by the policy that knows the answer
  rloo       leave-one-out advantages, REINFORCE's ratio 1
  dapo       clip-higher, token mean, flat groups replaced, soft overlong penalty
  gspo       one ratio a trajectory
  cispo      bounded weights, no token without gradient
  ctpo       the cumulative ratio
  llds       the likelihood-displacement penalty
  simpletir  clip-higher; trajectories with a void turn carry no loss
  retool     clip-higher, token mean, dual clip; failures lose less with tools
  dart       two adapters of half the rank, for tool calls and for reasoning
  floor      a bonus that rises while under half of the trajectories call the tool
  vspo       groups without a difference replaced by repeats of valuable tasks
  entropy    an entropy bonus
  aster      interaction-dense cold start, then stage 1: 18,432 tokens of context
  aster2     stage 2: 32,768 tokens; what all rollouts solved in stage 1 is left out
and sizes
  smollm2    SmolLM2-135M and arithmetic, on a CPU
  tiny       two random layers, six steps: a smoke run on a CPU

The two stages of ASTER (arXiv 2602.01204) are two runs, the second from the first:
  python run.py --config=configs/tir.py:aster --workdir=runs/aster
  python run.py --config=configs/tir.py:aster2 --workdir=runs/aster2 \
    --config.lora.init_from=runs/aster \
    --config.data.probe=runs/aster/pass_rates.jsonl
"""

from ml_collections import ConfigDict

from configs.base import get_config as get_base
from configs.base import use_dart, use_smollm2, use_tiny, with_variants


def get_config(variants: str = "") -> ConfigDict:
    config = get_base()
    config.model.source = "Qwen/Qwen2.5-7B-Instruct"

    config.rollout.num_generations = 16
    config.rollout.max_prompt_length = 2048
    config.rollout.max_completion_length = 32768 - 2048  # 32,768 with the prompt
    config.rollout.max_turn_length = 8192
    config.rollout.max_tool_calling_iterations = 15
    config.rollout.slots = 64

    _gtpo(config)
    _ctpo(config)
    config.objective.aggregation = "seq_mean_token_mean"
    config.objective.lld = 0.2

    config.tools.environment = "python"
    config.tools.workers = 32
    config.tools.max_result_chars = 4096
    config.data.source = "reasoning_gym"
    config.data.datasets = (
        "prime_factorization",
        "base_conversion",
        "count_primes",
        "polynomial_equations",
        "simple_integration",
        "intermediate_integration",
    )
    config.data.num_tasks = 2000
    config.data.num_eval_tasks = 200

    config.sft.num_epochs = 2
    config.sft.num_examples = 512
    config.sft.learning_rate = 1e-4

    config.train.num_steps = 800
    config.train.prompts_per_step = 64
    config.train.num_minibatches = 4  # the ratios differ from 1 after the first
    config.train.micro_batch_size = 8
    config.train.remat = True
    config.train.learning_rate = 1e-5
    config.eval.every = 50
    return with_variants(config, variants, VARIANTS, SIZES, start=_grpo)


def _gtpo(config: ConfigDict) -> None:
    config.objective.estimator = "gtpo"
    config.objective.gamma = 0.9
    _drop_flat(config)


def _ctpo(config: ConfigDict) -> None:
    config.objective.ratio = "cumulative"
    config.objective.clip = "sqrt_log"
    config.objective.epsilon = 0.025
    config.objective.epsilon_high = 0.05


def _drop_flat(config: ConfigDict) -> None:
    # A random model is always wrong: nothing would be left to try the update with.
    config.objective.drop_flat_groups = config.model.source != "tiny"


def _replace_flat(config: ConfigDict) -> None:
    _drop_flat(config)
    if config.objective.drop_flat_groups:
        config.objective.max_draws = 10  # as in verl


def _gtpo_paper(config: ConfigDict) -> None:
    """With the shaping of failures, which needs a declared maximum and tools."""
    _gtpo(config)
    config.reward.similarity = 0.5  # the paper's alpha


def _grpo(config: ConfigDict) -> None:
    config.objective.update(get_base().objective.to_dict())
    config.objective.aggregation = "seq_mean_token_mean"


def _mt_grpo(config: ConfigDict) -> None:
    config.objective.estimator = "mt_grpo"
    config.reward.executed = 0.2  # a turn's own reward


def _gigpo(config: ConfigDict) -> None:
    config.objective.estimator = "gigpo"
    config.objective.gamma = 0.95  # arXiv 2505.10978


def _steppo(config: ConfigDict) -> None:
    _gspo(config)
    config.objective.estimator = "steppo"
    config.objective.ratio = "step"
    config.objective.gamma = 0.99  # arXiv 2604.18401, with lambda 1
    config.objective.dual_clip = 10.0


def _gear(config: ConfigDict) -> None:
    config.objective.token_weights = "gear"


def _rloo(config: ConfigDict) -> None:
    config.objective.estimator = "rloo"
    config.objective.aggregation = "seq_mean_token_sum"
    config.train.num_minibatches = 1  # on-policy


def _clip_higher(config: ConfigDict) -> None:
    config.objective.epsilon_high = 0.28  # arXiv 2503.14476
    config.objective.aggregation = "token_mean"
    config.objective.dual_clip = 10.0


def _dapo(config: ConfigDict) -> None:
    _clip_higher(config)
    _replace_flat(config)
    config.objective.overlong_buffer = config.rollout.max_completion_length // 5


def _gspo(config: ConfigDict) -> None:
    config.objective.ratio = "sequence"
    config.objective.epsilon = 3e-4  # arXiv 2507.18071: the ratio is a geometric mean
    config.objective.epsilon_high = 4e-4


def _cispo(config: ConfigDict) -> None:
    config.objective.surrogate = "cispo"
    config.objective.epsilon = 1.0  # arXiv 2506.13585 bounds the weight from above only
    config.objective.aggregation = "token_mean"


def _llds(config: ConfigDict) -> None:
    config.objective.lld = 0.2


def _simpletir(config: ConfigDict) -> None:
    _clip_higher(config)
    _drop_flat(config)
    config.objective.mask_void_turns = True
    config.rollout.max_tool_calling_iterations = 5


def _floor(config: ConfigDict) -> None:
    config.reward.floor = 0.5


def _vspo(config: ConfigDict) -> None:
    _replace_flat(config)
    if config.objective.drop_flat_groups:
        config.objective.redraw = "value"


def _entropy(config: ConfigDict) -> None:
    config.objective.entropy = 0.001


def _aster(config: ConfigDict) -> None:
    """Plain GRPO with clip-higher, an outcome reward, and no interaction bonus."""
    _clip_higher(config)
    config.objective.tis_cap = 2.0
    longest = config.rollout.max_completion_length
    config.rollout.max_completion_length = longest * 8 // 15  # 16,384 of 30,720 tokens
    if _small(config):
        config.sft.min_tool_calls = 2
        return
    _aster_sizes(config)
    config.sft.num_examples = 0
    config.sft.min_tool_calls = 10  # more than nine; the article's "at least": 9
    config.sft.num_epochs = 6


def _aster2(config: ConfigDict) -> None:
    _clip_higher(config)
    config.objective.tis_cap = 2.0
    config.data.pass_rate = (0.0, 0.99)
    config.sft.num_epochs = 0  # stage 1 had it
    if not _small(config):
        _aster_sizes(config)


def _aster_sizes(config: ConfigDict) -> None:
    config.rollout.num_generations = 8
    config.rollout.max_tool_calling_iterations = 50
    config.train.prompts_per_step = 128
    config.train.num_minibatches = 2


def _small(config: ConfigDict) -> bool:
    """A size was chosen: its budgets stay."""
    return config.model.source in ("tiny", "smollm2-135m")


def _retool(config: ConfigDict) -> None:
    _clip_higher(config)
    config.reward.failure_bonus = True


def _arithmetic(config: ConfigDict) -> None:
    config.data.datasets = ("chain_sum", "products", "gcd", "lcm")
    config.tools.workers = 4
    config.tools.max_result_chars = 512
    config.eval.every = 0


def _smollm2(config: ConfigDict) -> None:
    use_smollm2(config)
    _arithmetic(config)
    config.rollout.max_prompt_length = 256
    config.rollout.max_completion_length = 256
    config.rollout.max_turn_length = 128
    config.rollout.max_tool_calling_iterations = 3
    config.data.num_tasks = 256
    config.data.num_eval_tasks = 32
    config.sft.num_epochs = 1
    config.sft.num_examples = 80
    config.sft.learning_rate = 5e-4
    config.train.num_minibatches = 2


def _tiny(config: ConfigDict) -> None:
    use_tiny(config)
    _arithmetic(config)
    config.objective.drop_flat_groups = False
    config.sft.learning_rate = 5e-4


VARIANTS = {
    "grpo": _grpo,
    "gtpo": _gtpo_paper,
    "mt_grpo": _mt_grpo,
    "gigpo": _gigpo,
    "steppo": _steppo,
    "gear": _gear,
    "rloo": _rloo,
    "dapo": _dapo,
    "gspo": _gspo,
    "cispo": _cispo,
    "ctpo": _ctpo,
    "llds": _llds,
    "simpletir": _simpletir,
    "retool": _retool,
    "dart": use_dart,
    "floor": _floor,
    "vspo": _vspo,
    "entropy": _entropy,
    "aster": _aster,
    "aster2": _aster2,
}
SIZES = {"smollm2": _smollm2, "tiny": _tiny}
