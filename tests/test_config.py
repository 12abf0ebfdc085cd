"""Every config builds and passes its own checks; bad values are refused by name."""

import json
import logging
from itertools import permutations

import pytest
from ml_collections import ConfigDict

from configs import base, edge, fund, quickstart, tir
from grpo_jax import config as configuration
from grpo_jax.config import BadInput

VARIANTS = {
    "quickstart": ("", "long"),
    "fund": ("", *fund.VARIANTS, *fund.SIZES),
    "tir": ("", *tir.VARIANTS, *tir.SIZES),
    "edge": ("", "smollm2", "tiny"),
}
METHODS = [(made, name) for made in (fund, tir) for name in made.VARIANTS]
BUILT = [(name, variant) for name, known in VARIANTS.items() for variant in known]


@pytest.mark.parametrize("name, variant", BUILT)
def test_every_config_builds_locked_and_passes(name, variant, repository):
    source = f"{repository}/configs/{name}.py" + (f":{variant}" if variant else "")
    config = configuration.load(source)
    configuration.check(config)
    assert config.is_locked
    assert configuration.leaves(config).keys() == (
        configuration.leaves(base.get_config()).keys()
    )


def test_every_key_of_base_has_a_comment(repository):
    text = (repository / "configs" / "base.py").read_text()
    body = text[: text.index("return config.lock()")].splitlines()
    keys = [line for line in body if " = " in line and "ConfigDict()" not in line]
    assert len(keys) == len(configuration.leaves(base.get_config()))
    assert not [line for line in keys if "#" not in line]


def test_the_articles_values():
    config = fund.get_config()
    assert (config.model.source, config.lora.rank) == ("Qwen/Qwen2.5-7B-Instruct", 16)
    assert (config.lora.alpha, config.rollout.num_generations) == (32, 8)
    assert (config.rollout.temperature, config.train.learning_rate) == (0.9, 5e-6)
    assert (config.train.num_epochs, config.objective.estimator) == (4, "ngrpo")
    config = tir.get_config()
    assert config.rollout.num_generations == 16
    lengths = config.rollout.max_prompt_length, config.rollout.max_completion_length
    assert sum(lengths) == 32768
    assert config.rollout.max_tool_calling_iterations == 15
    assert config.train.prompts_per_step == 64
    assert (config.objective.ratio, config.objective.clip) == ("cumulative", "sqrt_log")
    plain = tir.get_config("grpo").objective
    assert (plain.ratio, plain.clip, plain.lld) == ("token", "fixed", 0)


@pytest.mark.parametrize("made, name", METHODS)
def test_every_method_composes_with_every_size_in_either_order(made, name):
    for size in made.SIZES:
        config = made.get_config(f"{name},{size}")
        assert config == made.get_config(f" {size} , {name} ")
        configuration.check(config)
        assert config.model.source.startswith(size)


def test_methods_compose_in_any_order_on_plain_grpo():
    stack = tir.get_config()
    stack.reward.similarity = 0.5  # of the variant gtpo, the paper's form
    for names in permutations(("gtpo", "ctpo", "llds")):
        assert tir.get_config(",".join(names)) == stack
    assert tir.get_config("grpo,gtpo") == tir.get_config("gtpo")
    both = fund.get_config("tool,lead,tiny")
    assert (both.data.answer_format, both.objective.estimator) == ("tool", "lead")


@pytest.mark.parametrize("pair", ["gspo,dapo", "dapo,gspo"])
def test_methods_that_want_different_values_are_refused(pair):
    with pytest.raises(ValueError, match="'gspo' and 'dapo'|'dapo' and 'gspo'") as no:
        tir.get_config(pair)
    assert "objective.epsilon" in str(no.value) and "0.28" in str(no.value)


def test_of_two_sizes_the_later_one_wins():
    for last, source in [("tiny", "tiny"), ("smollm2", "smollm2-135m")]:
        first = "smollm2" if last == "tiny" else "tiny"
        assert fund.get_config(f"{first},{last}").model.source == source


@pytest.mark.parametrize("pair", list(permutations(("article", "tiny", "smollm2"), 2)))
def test_composed_variants_pass(pair):
    configuration.check(fund.get_config(",".join(pair)))


def test_unknown_variant_lists_the_known_ones():
    with pytest.raises(ValueError, match="no variant 'lang'; known: long"):
        quickstart.get_config("lang")


def test_unknown_key_is_refused_in_a_config_file():
    with pytest.raises(AttributeError, match="epsilon"):
        edge.get_config().objective.epsilonn = 0.1


BAD = {
    "objective.clip": ("fix", r"fixed.*did you mean 'fixed'"),
    "objective.estimator": ("ngrp", "did you mean 'ngrpo'"),
    "objective.kl_estimator": ("k1", "expected gradient is zero.*'k3'"),
    "objective.scale_rewards": ("group", "std, none, batch"),
    "objective.ddof": (2, "0, 1"),
    "objective.epsilon": (-0.1, "at least 0"),
    "objective.beta": (float("nan"), "at least 0; got nan"),
    "objective.dual_clip": (1.0, r"above 1\.0"),
    "objective.virtual_reward": (float("nan"), "finite number; got nan"),
    "rollout.num_generations": (1, "at least 2"),
    "rollout.slots": (0, "at least 1; got 0"),
    "rollout.max_completion_length": (0, "at least 1"),
    "rollout.top_p": (1.5, "to 1; got 1.5"),
    "rollout.temperature": (-1.0, "at least 0"),
    "lora.rank": (0, "at least 1"),
    "lora.targets": ((), "nothing would be trained"),
    "lora.dropout": (1.0, "0.99"),
    "mesh.fsdp": (0, "at least 1; got 0"),
    "mesh.context": (2, "from 1 to 1"),
    "tools.environment": ("pyhton", "did you mean 'python'"),
    "tools.timeout_s": (0.0, "at least 0.001"),
    "data.languages": (("en", "fr"), "en, zh; got 'fr'"),
    "data.source": ("", "empty"),
    "sft.source": ("fund", "no file of gold conversations"),
    "sft.num_examples": (-1, "at least 0"),
    "reward.weights": ((1.0,), "1 entries for 0 reward.functions"),
    "reward.functions": ((1,), "one an entry; got 1"),
    "reward.maxima": ((1.0, 2.0), "2 entries for 0 reward.functions"),
    "reward.overuse": ((("tool", "m.f"),), r"penalty a number.*got \('tool', 'm.f'\)"),
    "reward.floor": (1.2, "from 0 to 1; got 1.2"),
    "reward.floor_mode": ("rejct", "did you mean 'reject'"),
    "reward.interaction": (0.8, "interaction_max=0.5"),
    "reward.embedding": ("m.f", "without reward.similarity"),
    "data.pass_rate": ((0.5, 0.2), r"low <= high.*got \(0.5, 0.2\)"),
    "train.learning_rate": (float("inf"), "finite number; got inf"),
    "train.seed": (-1, "from 0 to"),
    "train.num_minibatches": (3, r"does not divide train\.prompts_per_step=8"),
    "train.num_epochs": (2, "=2: set one of them"),
    "train.num_steps": (0, "set one of them"),
    "train.schedule": ("cosin", "did you mean 'cosine'"),
    "checkpoint.keep": (0, "at least 1"),
    "monitor.action": ("panic", "warn, stop"),
    "distributed.coordinator": ("host", "host:port"),
}


@pytest.mark.parametrize("key", BAD)
def test_bad_values_are_refused_by_name(key):
    value, message = BAD[key]
    config = base.get_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(BadInput, match=rf"(?s){key.replace('.', r'[.]')}.*{message}"):
        configuration.check(config)


def test_one_generation_has_a_group_with_a_virtual_sample():
    config = base.get_config()
    config.rollout.num_generations = 1
    config.objective.estimator = "ngrpo"
    configuration.check(config)


def test_environment_by_dotted_path_and_functions():
    config = base.get_config()
    config.tools.environment = "my_package.environments.Shop"
    configuration.check(config)
    config.tools.environment = "functions"
    for key in ("tools.functions", "reward.functions"):
        with pytest.raises(
            BadInput, match=f"tools.environment='functions' needs {key}"
        ):
            configuration.check(config)
        config.update_from_flattened_dict({key: ("my_package.mine",)})
    configuration.check(config)


def test_process_id_beyond_the_hosts():
    config = base.get_config()
    config.distributed.update(coordinator="h:1", num_processes=2, process_id=2)
    with pytest.raises(BadInput, match="process_id=2 is not below"):
        configuration.check(config)


def test_a_config_that_is_not_built_on_base(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(): return ConfigDict({'train': {'seed': 0}})\n"
    )
    with pytest.raises(BadInput, match="lacks 'checkpoint.best'"):
        configuration.check(configuration.load(str(path)))


@pytest.mark.parametrize(
    "text, message",
    [
        ("import nowhere_at_all", "ModuleNotFoundError.*nowhere_at_all"),
        ("def get_config(: pass", "SyntaxError"),
        ("x = 1", "no attribute 'get_config'"),
        ("def get_config(): return {}", "no ConfigDict"),
        ("def get_config(): raise RuntimeError('why')", "RuntimeError: why"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
    ],
)
def test_config_files_that_fail_say_why(tmp_path, text, message):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(BadInput, match=message):
        configuration.load(str(path))


def test_missing_config_file_suggests_a_neighbour(repository):
    with pytest.raises(BadInput, match=r"no file .*tri\.py'; did you mean 'tir\.py'"):
        configuration.load(f"{repository}/configs/tri.py")


def test_saved_config_and_resume(tmp_path, caplog):
    caplog.set_level(logging.INFO, "grpo_jax")
    config = tir.get_config("tiny")
    configuration.check_resume(config, tmp_path)  # nothing there yet
    configuration.save(config, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert configuration.leaves(ConfigDict(saved)).keys() == (
        configuration.leaves(config).keys()
    )
    configuration.check_resume(config, tmp_path)
    assert caplog.text == ""
    config.train.num_steps = 9
    configuration.check_resume(config, tmp_path)
    assert "train.num_steps is 9" in caplog.text
    config.lora.rank = 8
    with pytest.raises(BadInput, match=r"lora\.rank is 8.*began with 4.*--workdir"):
        configuration.check_resume(config, tmp_path)


@pytest.mark.parametrize("text", ['{"a": "b', "[1]", "3"])
def test_a_damaged_saved_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, match=r"config\.json' is damaged.*--workdir"):
        configuration.check_resume(tir.get_config("tiny"), tmp_path)


def test_a_workdir_that_cannot_be_is_bad_input(tmp_path):
    config = tir.get_config("tiny")
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match="file' is not a folder"):
            configuration.check_resume(config, workdir)
        with pytest.raises(BadInput, match="--workdir.*cannot be written"):
            configuration.save(config, workdir)
