"""Every configuration key, once: its default, meaning and unit.

A config file starts from `get_config()` and changes what it needs; the command line
overrides single keys (`--config.train.num_steps=3`). The result is locked: a key that
does not exist here is refused. `grpo_jax.config.check` cross-checks the values.
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Build a fresh config with the defaults."""
    config = ConfigDict()

    config.model = ConfigDict()
    config.model.source = "smollm2-135m"  # HF folder, hub id, .gguf, or embedded name
    config.model.dtype = "auto"  # base weights; auto: float32 on CPU, else bfloat16

    config.lora = ConfigDict()
    config.lora.rank = 16  # width of the adapter's two factors
    config.lora.alpha = 32.0  # the adapter is scaled by alpha / rank
    config.lora.targets = ("q", "k", "v", "o", "gate", "up", "down")  # projections
    config.lora.dropout = 0.0  # probability, on the adapter's input, training only
    config.lora.routed = False  # two adapters of this rank (DART): one processes what
    # predicts tool calls, the other the rest
    config.lora.init_from = ""  # PEFT folder or workdir to start from; "": fresh

    config.mesh = ConfigDict()
    config.mesh.fsdp = -1  # devices that share base weights and rows; -1: the rest
    config.mesh.tensor = 1  # devices that share heads, mlp and vocabulary
    config.mesh.context = 1  # devices that share the positions of a row; only 1 so far

    config.plan = ConfigDict()  # mode plan
    config.plan.topology = ""  # TPUs to plan for, such as v5e:4x4

    config.distributed = ConfigDict()  # one JAX process a host
    config.distributed.coordinator = ""  # host:port; "auto": ask the cluster; "": alone
    config.distributed.num_processes = 1  # hosts; read with an explicit host:port
    config.distributed.process_id = 0  # this host's number, from 0

    config.rollout = ConfigDict()
    config.rollout.num_generations = 8  # trajectories a task: the group size G
    config.rollout.temperature = 1.0  # 0: greedy
    config.rollout.top_p = 1.0  # nucleus of this probability; 1: off
    config.rollout.top_k = 0  # the k likeliest tokens; 0: off
    config.rollout.max_prompt_length = 512  # tokens; a longer prompt is skipped
    config.rollout.max_completion_length = 512  # MODEL + TOOL tokens a trajectory
    config.rollout.max_turn_length = 512  # sampled tokens a turn
    config.rollout.max_tool_calling_iterations = 5  # turns that may end in calls
    config.rollout.slots = 16  # trajectories decoded at a time: the KV cache's rows
    config.rollout.burst = 32  # decode steps between two looks at the tools

    config.objective = ConfigDict()
    config.objective.estimator = "grpo"  # a trajectory: grpo | dr_grpo | rloo | ngrpo
    # | lead; a turn: gtpo | mt_grpo | gigpo; with a critic: steppo
    config.objective.scale_rewards = "std"  # std | none | batch; dr_grpo: always none;
    # batch: grpo and ngrpo only
    config.objective.ddof = 1  # 1: sample standard deviation, 0: population
    config.objective.virtual_reward = placeholder(float)  # ngrpo: of the virtual best
    # sample, without the interaction bonus; None: the most that the reward can give
    config.objective.num_virtual = 1  # ngrpo: virtual samples a group
    config.objective.gamma = 0.9  # gtpo, gigpo: discount a turn; steppo: a step
    config.objective.lam = 1.0  # steppo: lambda a step of generalised advantages
    config.objective.step = "turn"  # steppo: turn | role (its thoughts and calls apart)
    config.objective.norm_scope = "group"  # gtpo, turns compared: group | batch
    config.objective.format_penalty = 0.1  # gtpo: what a malformed turn loses
    config.objective.turn_weight = 1.0  # mt_grpo, gigpo: of the turn's part
    config.objective.lead_alpha = 0.05  # lead: what a correct answer's length weighs
    config.objective.lead_min_length = 4000.0  # lead: tokens; lengths count above
    config.objective.lead_unfinished = 0.0  # lead: of truncated failures; others -1
    config.objective.token_weights = "none"  # of advantages: none | gear, by a teacher
    # that is the policy itself with the answer in its prompt
    config.objective.gear_divergence = 1.0  # gear: nats that make a token an anchor
    config.objective.gear_entropy = 1.0  # gear: nats that end the anchor's segment
    config.objective.gear_kappa = 0.5  # gear: weight per standard deviation
    config.objective.gear_low = 0.2  # gear: least weight, before their mean becomes 1
    config.objective.gear_high = 3.0  # gear: largest weight
    config.objective.ratio = "token"  # token | sequence | cumulative | step
    config.objective.clip = "fixed"  # fixed | sqrt_log | sqrt_linear | none
    config.objective.surrogate = "ppo"  # ppo | cispo (clips the weight, not the token)
    config.objective.epsilon = 0.2  # lower clip width
    config.objective.epsilon_high = placeholder(float)  # upper width; None: epsilon
    config.objective.dual_clip = placeholder(float)  # bound for A < 0; None: off
    config.objective.aggregation = "token_mean"  # token_mean | seq_mean_token_mean
    # | seq_mean_token_sum | constant (divides by rollout.max_completion_length)
    config.objective.beta = 0.0  # KL weight; 0: no reference pass
    config.objective.kl_estimator = "k3"  # k2 | k3
    config.objective.reference = "start"  # start: adapters RL began with | base: none
    config.objective.lld = 0.0  # weight of the likelihood-displacement penalty
    config.objective.lld_gate = "action"  # action | response | token
    config.objective.lld_normalization = "paper"  # paper | code
    config.objective.lld_answer = "none"  # weight of a final answer's tokens in it, by
    # the batch's mean of executed calls: none (1) | paper | code
    config.objective.entropy = 0.0  # weight of the entropy bonus
    config.objective.tis_cap = placeholder(float)  # cap of trainer/sampler; None: off
    config.objective.tis_level = "token"  # token | sequence | geometric
    config.objective.tis_mode = "truncate"  # above the cap: truncate | mask (to 0)
    config.objective.role_weights = ()  # of the mean losses of reasoning and tool-call
    # tokens, (0.3, 0.7) in the fund article; (): every token alike
    config.objective.role_gradients_every = 0  # steps between measurements of the angle
    # between the gradients of both, four extra passes each; 0: never
    config.objective.mask_truncated_completions = False  # drop cut-off trajectories
    config.objective.mask_void_turns = False  # and those with a turn of no use
    config.objective.drop_flat_groups = False  # leave out groups of equal total rewards
    # (with bonuses and turn terms, without the overlong penalty)
    config.objective.drop_saturated_groups = False  # and those that are all solved
    config.objective.max_draws = 1  # rollouts a step at most in which other groups take
    # the place of those that the two filters drop; 1: they are not replaced
    config.objective.redraw = "new"  # by new tasks | value: by repeats of this step's
    # tasks of high value (VSPO)
    config.objective.overlong_buffer = 0  # tokens before max_completion_length in which
    # the reward falls by 1; 0: no penalty

    config.critic = ConfigDict()  # steppo: adapters and a head that learn values
    config.critic.learning_rate = 1e-4  # peak, constant after the warm-up
    config.critic.warmup_steps = 10  # updates of linear warm-up
    config.critic.weight_decay = 0.0  # AdamW
    config.critic.max_grad_norm = 1.0  # global norm
    config.critic.clip = 0.5  # how far a value may usefully move in a step; 0: anywhere

    config.reward = ConfigDict()
    config.reward.fund = "graded"  # graded | article | capped (blind to the label)
    config.reward.functions = ()  # dotted paths of your own; () : the environment's
    config.reward.weights = ()  # one a function; (): all 1
    config.reward.maxima = ()  # the most each function can give; (): not declared
    config.reward.timeout_s = 60.0  # seconds of an async function of yours for a batch;
    # late: it abstains on the batch, and rewards/NAME/failed counts it
    config.reward.allow_unreachable = False  # a virtual reward above that is accepted
    config.reward.overuse_penalty = 0.3  # fund: an uncalled-for check_market_status
    config.reward.overuse = ()  # (tool, condition, penalty) each; the condition is the
    # dotted path of a function of the task: is a call of the tool uncalled for?
    config.reward.parsed = 0.0  # weight: share of a turn's calls that could be read
    config.reward.schema_valid = 0.0  # weight: that name a tool and fit its schema
    config.reward.executed = 0.0  # weight: that ran without an error
    config.reward.stages = False  # grade the outcome: readable .1, right 1
    config.reward.failure_bonus = False  # failures earn -1 of the maximum and .1 more a
    # turn with calls, up to -.6 (ReTool)
    config.reward.similarity = 0.0  # most that failures earn for code like that of
    # their group's passing members
    config.reward.embedding = ""  # dotted path, texts to vectors; "": code tokens
    config.reward.interaction = 0.0  # weight: a call on a task that needs a tool
    config.reward.interaction_max = 0.5  # the most that the floor raises it to
    config.reward.floor = 0.0  # least call rate on tasks that need a tool; 0: none
    config.reward.floor_mode = "bonus"  # bonus (Lagrangian) | kl | reject
    config.reward.floor_rate = 0.1  # bonus: change of its weight per shortfall of 1
    config.reward.floor_kl = 0.1  # kl: KL weight added below the floor

    config.tools = ConfigDict()
    config.tools.environment = "fund"  # fund | fund_bank | python | functions
    # | verifiers | dotted path
    config.tools.verifiers = ""  # verifiers: name of an installed environment, or the
    # dotted path of a function that returns one
    config.tools.verifiers_args = "{}"  # its arguments, a JSON object
    config.tools.functions = ()  # dotted paths of functions and classes (functions)
    config.tools.mcp = ()  # MCP servers, a command line or URL each (functions)
    config.tools.noise = 0.0  # share of calls that time out unasked, for study
    config.tools.timeout_s = 10.0  # seconds a call
    config.tools.memory_mb = 512  # MiB a sandbox process
    config.tools.output_bytes = 16384  # bytes kept of what a sandboxed call prints
    config.tools.workers = 16  # calls that run at a time
    config.tools.max_calls_per_turn = 4  # calls beyond these are answered by an error
    config.tools.max_result_chars = 2048  # characters of a result the model sees
    config.tools.stateful = True  # python: variables live through the trajectory
    config.tools.protocol = "hermes"  # of calls: hermes | compact, with fewer tokens
    config.tools.sandbox = ConfigDict()
    config.tools.sandbox.require = "process"  # weakest: process | landlock | namespace

    config.data = ConfigDict()
    config.data.source = "fund"  # fund | fund_bank | reasoning_gym | .jsonl | .parquet
    # | hub id | environment: the tasks that tools.environment brings itself
    config.data.eval_source = ""  # as source; "": held-out tasks of the same source
    config.data.num_tasks = 512  # training tasks to generate or read; 0: all there are
    config.data.num_eval_tasks = 64  # held-out tasks
    config.data.languages = ("en",)  # fund: en, zh
    config.data.prompt_style = "short"  # fund: short | full, with the tools' parameters
    config.data.answer_format = "react"  # fund: react | reasoning_action | tool
    config.data.categories = ()  # fund: names to keep; (): all
    config.data.category_weights = ()  # fund: shares of these; (): equal ones
    config.data.oversample = ()  # fund: categories whose training tasks are repeated
    config.data.oversample_times = 3  # how often each of those comes
    config.data.flawed_labels = False  # fund: combos labelled check_balance, for study
    config.data.datasets = ("chain_sum", "products", "gcd", "lcm")  # reasoning_gym
    config.data.seed = 0  # of generation and of the order
    config.data.strict = False  # True: a bad row ends the run; False: skipped, counted
    config.data.shuffle = True  # a new order every epoch
    config.data.probe = ""  # probe.jsonl of eval.probe or a run's pass_rates.jsonl; "":
    # a probe beside the source, if there
    config.data.pass_rate = ()  # (low, high): train only on tasks probed within

    config.sft = ConfigDict()  # cold start on gold trajectories
    config.sft.source = ""  # "": gold answers of the training tasks | rows with
    # messages (and tools): .jsonl | .parquet | hub id
    config.sft.num_epochs = 0  # 0: none
    config.sft.num_examples = 64  # gold trajectories, the first ones; 0: all
    config.sft.min_tool_calls = 0  # that each of them has at least; built-in ones are
    # joined, one question after the other, until they do
    config.sft.learning_rate = 5e-4  # peak
    config.sft.batch_size = 8  # examples an update
    config.sft.warmup_steps = 4  # updates of linear warm-up

    config.train = ConfigDict()
    config.train.seed = 0  # of adapters, sampling and minibatches
    config.train.num_steps = 100  # rollout batches; 0: count in epochs
    config.train.num_epochs = 0  # passes over data.source; 0: count in steps
    config.train.prompts_per_step = 8  # tasks a rollout batch
    config.train.num_minibatches = 1  # optimizer updates a pass over a rollout batch
    config.train.num_iterations = 1  # passes over a rollout batch
    config.train.micro_batch_size = 8  # packed rows a forward and backward pass
    config.train.row_length = 0  # tokens of a packed row; 0: the longest trajectory's
    config.train.remat = False  # recompute layers in the backward pass to save memory
    config.train.learning_rate = 1e-5  # peak
    config.train.warmup_steps = 10  # updates of linear warm-up
    config.train.schedule = "constant"  # after warm-up: constant | linear | cosine
    config.train.weight_decay = 0.0  # AdamW, on adapters
    config.train.max_grad_norm = 1.0  # global norm
    config.train.adam_b1 = 0.9  # decay of the first moment
    config.train.adam_b2 = 0.999  # decay of the second moment

    config.eval = ConfigDict()
    config.eval.every = 0  # steps; 0: only before and after
    config.eval.num_generations = 1  # k of avg@k, pass@k and maj@k
    config.eval.temperature = 0.0  # 0: greedy
    config.eval.suite = ""  # mode eval: other people's tests instead of held-out tasks:
    # bfcl | bfcl:SET,SET | reasoning_gym:SET,SET
    config.eval.limit = 0  # suite: tasks a set; 0: all of bfcl, 100 of reasoning_gym
    config.eval.probe = False  # mode eval: training tasks with and without tools,
    # eval.num_generations times each; with 1: rollout.num_generations

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 1  # steps; adapters are small
    config.checkpoint.keep = 2  # newest complete checkpoints kept
    config.checkpoint.best = ""  # also keep the best by this metric; "": do not
    config.checkpoint.load = "newest"  # eval, export: newest | best | a step's number

    config.export = ConfigDict()
    config.export.format = "peft"  # peft: the adapter | merged: a Hugging Face folder
    # | gguf: a file for llama.cpp

    config.monitor = ConfigDict()
    config.monitor.action = "warn"  # on a severe alarm: warn | stop

    config.trackers = ConfigDict()  # besides metrics.jsonl, which is always written
    config.trackers.tensorboard = True  # event files in DIR/tensorboard
    config.trackers.wandb = False  # online or offline as WANDB_MODE says
    config.trackers.trackio = False  # a local dashboard
    config.trackers.project = "grpo_jax"  # name of the project at wandb and trackio

    return config.lock()


def use_smollm2(config: ConfigDict) -> None:
    """SmolLM2-135M on a laptop's CPU: a cold start, then small groups."""
    config.model.source = "smollm2-135m"
    config.tools.workers = 4  # two cores
    config.data.prompt_style = "short"
    config.rollout.num_generations = 4
    config.rollout.slots = 16
    config.sft.num_epochs = 3
    config.sft.batch_size = 5
    config.train.prompts_per_step = 4
    config.train.micro_batch_size = 1
    config.train.row_length = 512
    config.train.remat = True  # as fast on a CPU, and a fraction of the memory
    config.train.learning_rate = 1e-4
    config.train.warmup_steps = 2
    config.critic.learning_rate = 1e-3
    config.critic.warmup_steps = 2
    config.train.num_epochs = 0
    config.train.num_steps = 20


def use_tiny(config: ConfigDict) -> None:
    """Two random layers and a byte tokenizer: six steps, for tests and smoke runs."""
    config.model.source = "tiny"
    config.tools.workers = 4
    config.data.prompt_style = "short"
    config.lora.rank = 4
    config.lora.alpha = 8.0
    config.rollout.num_generations = 4
    config.rollout.max_prompt_length = 2048  # a token is a byte
    config.rollout.max_completion_length = 128
    config.rollout.max_turn_length = 64
    config.rollout.max_tool_calling_iterations = 2
    config.rollout.slots = 8
    config.rollout.burst = 16
    config.data.num_tasks = 16
    config.data.num_eval_tasks = 4
    config.sft.num_epochs = 1
    config.sft.num_examples = 8
    config.sft.batch_size = 4
    config.sft.warmup_steps = 1
    config.train.prompts_per_step = 2
    config.train.num_minibatches = 2
    config.train.micro_batch_size = 4
    config.train.learning_rate = 1e-3
    config.train.warmup_steps = 1
    config.critic.learning_rate = 1e-2
    config.critic.warmup_steps = 1
    config.train.num_epochs = 0
    config.train.num_steps = 6
    config.trackers.tensorboard = False


def use_dart(config: ConfigDict) -> None:
    """Two routed adapters in place of one, with the same number of parameters."""
    config.lora.routed = True
    config.lora.rank = max(config.lora.rank // 2, 1)
    config.lora.alpha = config.lora.alpha / 2  # the scale alpha / rank stays


Variant = Callable[[ConfigDict], None]  # edits a config


def with_variants(
    config: ConfigDict,
    variants: str,
    methods: dict[str, Variant],
    sizes: dict[str, Variant] | None = None,
    start: Variant | None = None,
) -> ConfigDict:
    """Apply comma-separated `variants`: sizes first, wherever they stand, then methods.

    With any method the config first goes through `start`. Every method then edits a
    copy of that, and what it changed is merged, so that the order of methods does not
    matter. Raises ValueError for an unknown name, which lists the known ones, and for
    two methods that want different values of one key.
    """
    sizes = sizes or {}
    names = [name for name in (part.strip() for part in variants.split(",")) if name]
    for name in names:
        if name not in methods | sizes:
            known = ", ".join(sorted(methods | sizes))
            raise ValueError(f"no variant '{name}'; known: {known}")
    for name in names:
        if name in sizes:
            sizes[name](config)
    chosen = [name for name in names if name in methods]
    if chosen and start is not None:
        start(config)
    plain = leaves(config)
    setters: dict[str, tuple[str, Any]] = {}
    for name in chosen:
        own = config.copy_and_resolve_references()
        methods[name](own)
        for key, value in leaves(own).items():
            if value == plain[key]:
                continue
            other, wanted = setters.setdefault(key, (name, value))
            if wanted != value:
                raise ValueError(
                    f"the variants '{other}' and '{name}' do not go together: {key} "
                    f"would be {wanted!r} with one and {value!r} with the other"
                )
    config.update_from_flattened_dict({key: x for key, (_, x) in setters.items()})
    return config


def leaves(config: ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Every key as a dotted path, with its value."""
    flat = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, ConfigDict):
            flat |= leaves(value, f"{path}.")
        else:
            flat[path] = value
    return flat
