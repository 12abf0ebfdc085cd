"""Decoders and adapters against transformers and peft on torch, float32."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from grpo_jax import models
from grpo_jax.models.sources import locate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.parity,
    # peft asks transformers by a name that transformers 5 deprecates.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

LENGTH = 48
SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.15,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
CASES = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn-untied": ("Qwen2", {"rope_scaling": YARN}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16}),
    "qwen3-yarn": ("Qwen3", {"rope_scaling": YARN, "tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama-linear": ("Llama", {"rope_scaling": dict(rope_type="linear", factor=2.0)}),
    "llama3": ("Llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
}


def torch_model(kind, options, theta=500.0):
    """A random torch model whose biases and norms are random too."""
    options = SHAPE | {"tie_word_embeddings": False, "head_dim": 8} | options
    config_class = getattr(transformers, f"{kind}Config")
    config = config_class(**options, rope_theta=theta)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def torch_logits(model, tokens, lengths=None):
    tokens = torch.tensor(np.asarray(tokens), dtype=torch.long)
    mask = torch.ones_like(tokens)
    for row, length in enumerate(lengths or []):
        mask[row, length:] = 0
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask).logits.float().numpy()


def jitted(model):
    graph, state = nnx.split(model)
    forward = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    return lambda tokens: np.asarray(forward(state, jnp.asarray(tokens, jnp.int32)))


def random_tokens(rows=2, length=LENGTH, vocab=SHAPE["vocab_size"]):
    return np.random.default_rng(0).integers(0, vocab, (rows, length))


def greedy_choices(forward, prompt, chosen, length):
    """What greedy decoding picks after each prefix of prompt + chosen.

    Equal to `chosen` exactly when greedy decoding from the prompt gives `chosen`.
    """
    tokens = np.zeros((2, length), np.int32)  # two rows: one program the fewer
    tokens[0, : len(prompt) + len(chosen)] = [*prompt, *chosen]
    picks = forward(tokens)[0].argmax(axis=-1)
    return picks[len(prompt) - 1 : len(prompt) - 1 + len(chosen)].tolist()


def torch_greedy(model, prompt, count):
    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=count, eos_token_id=None, pad_token_id=0
    )
    tokens = torch.tensor([prompt])
    mask = torch.ones_like(tokens)
    out = model.generate(tokens, attention_mask=mask, generation_config=settings)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case, tmp_path):
    reference = torch_model(*CASES[case])
    reference.save_pretrained(tmp_path)
    forward = jitted(models.load_model(tmp_path))
    tokens, lengths = random_tokens(), [LENGTH, 3]
    ours, theirs = forward(tokens), torch_logits(reference, tokens, lengths)
    assert np.abs(theirs).max() > 1
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(ours[row, :length], theirs[row, :length], atol=1e-4)
    prompt = tokens[0, :9].tolist()
    expected = torch_greedy(reference, prompt, 32)
    assert greedy_choices(forward, prompt, expected, LENGTH) == expected


def test_old_and_new_rope_records_are_one(tmp_path):
    """transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling."""
    reference = torch_model("Llama", {"rope_scaling": LLAMA3})
    reference.save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    scaling = dict(new["rope_parameters"])
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert models.config_from_hf(new) == models.config_from_hf(old)
    assert models.config_from_hf(new).rope_theta == 500.0
    scaling["type"] = scaling.pop("rope_type")
    assert models.config_from_hf(old) == models.config_from_hf(new)


def adapted(model, seed=3):
    """Give every adapter, B included, random values."""
    generator = np.random.default_rng(seed)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        values = 0.2 * generator.standard_normal(variable.shape)
        variable.set_value(jnp.asarray(values, jnp.float32))
    return model


LORA = models.LoraConfig(rank=4, alpha=10.0)


def test_peft_reads_what_we_write(tmp_path):
    peft = pytest.importorskip("peft")
    reference = torch_model(*CASES["qwen2"])
    reference.save_pretrained(tmp_path / "base")
    model = adapted(models.load_model(tmp_path / "base", lora=LORA))
    models.save_peft(tmp_path / "adapter", model, str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert peft.get_peft_model_state_dict(theirs).keys() == written.keys()
    tokens = random_tokens()
    ours = jitted(model)(tokens)
    np.testing.assert_allclose(ours, torch_logits(theirs, tokens), atol=1e-4)
    base = jitted(models.load_model(tmp_path / "base"))(tokens)
    assert np.abs(ours - base).max() > 0.1


def test_peft_reads_both_routed_adapters(tmp_path):
    peft = pytest.importorskip("peft")
    reference = torch_model(*CASES["qwen2"])
    reference.save_pretrained(tmp_path / "base")
    routed = dataclasses.replace(LORA, routed=True)
    model = adapted(models.load_model(tmp_path / "base", lora=routed))
    models.save_peft(tmp_path / "both", model, str(tmp_path / "base"))
    first, second = (tmp_path / "both" / name for name in ("reasoning", "tool"))
    theirs = peft.PeftModel.from_pretrained(reference, first, adapter_name="reasoning")
    theirs.load_adapter(second, adapter_name="tool")
    tokens = random_tokens()
    logits = []
    for name in ("reasoning", "tool"):
        theirs.set_adapter(name)
        logits.append(torch_logits(theirs.eval(), tokens))
        one = models.load_model(tmp_path / "base", lora=LORA)
        models.load_peft(tmp_path / "both" / name, one)
        np.testing.assert_allclose(jitted(one)(tokens), logits[-1], atol=1e-4)
    np.testing.assert_allclose(jitted(model)(tokens), logits[0], atol=1e-4)
    assert np.abs(logits[0] - logits[1]).max() > 0.1


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_we_read_what_peft_writes(tmp_path, targets):
    peft = pytest.importorskip("peft")
    reference = torch_model(*CASES["llama-untied"])
    reference.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules=targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(reference, config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    lora = models.read_peft_config(tmp_path / "adapter")
    model = models.load_model(tmp_path / "base", lora=lora)
    models.load_peft(tmp_path / "adapter", model)
    tokens = random_tokens()
    expected = torch_logits(theirs, tokens)
    np.testing.assert_allclose(jitted(model)(tokens), expected, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen3-yarn", "llama3", "qwen2-yarn-untied"])
def test_transformers_reads_the_merged_folder(tmp_path, case):
    kind, options = CASES[case]
    tokenizer = models.load_tokenizer("tiny")
    reference = torch_model(kind, options | {"vocab_size": len(tokenizer)})
    reference.save_pretrained(tmp_path / "base")
    model = adapted(models.load_model(tmp_path / "base", lora=LORA))
    models.save_merged(tmp_path / "merged", model, tokenizer, max_shard_bytes=20_000)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path / "merged", dtype=torch.float32).eval()
    assert_same(model, theirs)
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")) == 264


def assert_same(model, theirs):
    """Equal logits, and equal greedy tokens."""
    forward, tokens = jitted(model), random_tokens()
    np.testing.assert_allclose(forward(tokens), torch_logits(theirs, tokens), atol=1e-4)
    prompt = tokens[0, :9].tolist()
    expected = torch_greedy(theirs, prompt, 32)
    assert greedy_choices(forward, prompt, expected, LENGTH) == expected


@pytest.mark.parametrize("case", ["qwen2", "qwen3-untied", "llama-untied"])
def test_transformers_reads_the_gguf_file(case, tmp_path):
    """Their own reader of the format: names, and llama.cpp's order of q and k.

    It leaves out Llama 3's scaling, and takes Qwen3's heads to be 128 wide.
    """
    kind, options = CASES[case]
    if kind == "Qwen3":
        options = options | {"head_dim": 128}
    tokenizer = models.load_tokenizer("tiny")
    reference = torch_model(kind, options | {"vocab_size": len(tokenizer)})
    reference.save_pretrained(tmp_path / "base")
    model = adapted(models.load_model(tmp_path / "base", lora=LORA))
    models.save_gguf(tmp_path / "model.gguf", model, tokenizer, name="mine")
    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    assert_same(model, theirs)


TEXTS = [
    "Hello world's 12345 and 3.14, it's  double  spaced",
    "def f(x):\n    return x**2\n\n\nprint(f(10))\t# tab",
    "转账10万元给张三 ☀️ émigré naïve Ünïcode \u00a0 nbsp",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "",
    " ",
    "\n\n 7",
]


@pytest.mark.slow
def test_smollm2_from_gguf_equals_transformers_own_loading():
    path = locate("smollm2-135m")
    load = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    forward = jitted(models.load_model("smollm2-135m"))
    tokenizer = models.load_tokenizer("smollm2-135m")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(text)["input_ids"]
    tokens = np.zeros((2, 80), np.int32)
    tokens[0] = random_tokens(1, 80, 49152)
    tokens[1, : len(prompt)] = prompt
    lengths = [80, len(prompt)]
    ours, theirs = forward(tokens), torch_logits(reference, tokens, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(ours[row, :length], theirs[row, :length], atol=1e-3)
    expected = torch_greedy(reference, prompt, 32)
    assert greedy_choices(forward, prompt, expected, 80) == expected
    assert "Paris" in tokenizer.decode(expected)


@pytest.mark.slow
def test_smollm2_tokenizer_equals_transformers_own():
    path = locate("smollm2-135m")
    theirs = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name
    )
    ours = models.load_tokenizer("smollm2-135m")
    for text in TEXTS:
        ids = ours(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == text
        # transformers skips the digit split, which cuts this text elsewhere.
        if "\n 7" not in text:
            assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.tokenize("\n\n 17") == ["ĊĊĠ", "1", "7"]
