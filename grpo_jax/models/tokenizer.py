"""Tokenizers: from a model folder, from GGUF metadata, or the tiny model's bytes.

Everywhere else a tokenizer is a `PreTrainedTokenizerFast` with a chat template, an eos
and a pad token. Padding is marked by lengths and masks, never by the pad id.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers import models as bpe_models
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_jax.config import BadInput
from grpo_jax.models import tiny
from grpo_jax.models.gguf_file import GGUFFile
from grpo_jax.models.hf_format import read_json
from grpo_jax.models.sources import TINY, locate

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# Marks that end a turn or a text in the chat formats of the supported families.
END_MARKS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = rf"{_WORDS}|\p{{N}}|{_REST}"
LLAMA3_SPLIT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model source; BadInput when there is none to be had."""
    if source == TINY:
        return tiny.tokenizer()
    path = locate(source, weights=False)
    tokenizer = _from_gguf(GGUFFile(path)) if path.is_file() else _from_folder(path)
    if tokenizer.eos_token is None:
        raise BadInput(f"tokenizer of {path}: no end-of-sequence token")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(source: str | Path, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Every id that ends a model turn, ascending.

    The tokenizer's own eos, those of the checkpoint's config.json and
    generation_config.json, and the known end marks that are special tokens here.
    """
    found = {tokenizer.eos_token_id}
    specials = set(tokenizer.all_special_tokens)
    specials |= {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    found |= {tokenizer.convert_tokens_to_ids(m) for m in END_MARKS if m in specials}
    if source != TINY and (folder := locate(source, weights=False)).is_dir():
        for name in ("generation_config.json", "config.json"):
            if (folder / name).is_file():
                ids = read_json(folder / name).get("eos_token_id")
                ids = ids if isinstance(ids, list) else [ids]
                if not all(isinstance(i, int | None) for i in ids):
                    raise BadInput(f"{folder / name}: eos_token_id={ids} is no id")
                found |= set(ids)
    return tuple(sorted(found - {None}))


def _from_folder(folder: Path) -> PreTrainedTokenizerFast:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise BadInput(f"model folder {folder}: tokenizer.json is missing")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception for a broken file
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"tokenizer of {folder} failed to load: {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        raise BadInput(f"tokenizer of {folder}: {kind} is not a fast tokenizer")
    return tokenizer


def _from_gguf(file: GGUFFile) -> PreTrainedTokenizerFast:
    path = file.files[0]
    if file.metadata.get("tokenizer.ggml.model") != "gpt2":
        kind = file.metadata.get("tokenizer.ggml.model")
        raise BadInput(
            f"{path}: unknown tokenizer {kind!r}; only byte-level BPE (gpt2)"
        )
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    backend = _byte_level_bpe(file, tokens)
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        marks = [t for t, k in zip(tokens, kinds, strict=True) if k == kind]
        added = [AddedToken(mark, normalized=False, special=special) for mark in marks]
        backend.add_special_tokens(added) if special else backend.add_tokens(added)

    def named(key):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if index is None else tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def pre_tokenizer_name(tokenizer: PreTrainedTokenizerFast) -> str:
    """llama.cpp's name of how a tokenizer cuts text before it merges bytes.

    BadInput where it has none that this project knows.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if not backend["model"].get("merges"):  # bytes stay bytes however text is cut
        return "default"
    wanted = _cuts(backend["pre_tokenizer"])
    for name, make in PRE_TOKENIZERS.items():
        known = Tokenizer(bpe_models.BPE())
        known.pre_tokenizer = pre.Sequence(make())
        if _cuts(json.loads(known.to_str())["pre_tokenizer"]) == wanted:
            return name
    raise BadInput(
        "export.format='gguf': llama.cpp's name of this tokenizer is not known here; "
        "export 'merged' and convert that with llama.cpp's own script"
    )


def _cuts(record: dict) -> list:
    """What matters of a pre-tokenizer's JSON."""
    steps = record.get("pretokenizers", [record])
    keys = ("type", "pattern", "behavior", "use_regex", "individual_digits")
    return [{key: step.get(key) for key in keys} for step in steps]


def _byte_level(use_regex: bool) -> pre.PreTokenizer:
    return pre.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> list[pre.PreTokenizer]:
    return [pre.Split(Regex(pattern), "isolated"), _byte_level(False)]


# By tokenizer.ggml.pre.
PRE_TOKENIZERS = {
    # Every digit stands alone, then GPT-2's pattern.
    "smollm": lambda: [pre.Digits(individual_digits=True), _byte_level(True)],
    "gpt-2": lambda: [_byte_level(True)],
    "default": lambda: [_byte_level(True)],
    "qwen2": lambda: _split(QWEN2_SPLIT),
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
}


def _byte_level_bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    kind = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind not in PRE_TOKENIZERS:
        raise BadInput(f"{file.files[0]}: unknown pre-tokenizer {kind!r}")
    splits = PRE_TOKENIZERS[kind]()
    pairs = file.metadata.get("tokenizer.ggml.merges") or []  # GGUF has no empty list
    merges = [tuple(pair.split(" ")) for pair in pairs]
    vocab = {token: index for index, token in enumerate(tokens)}
    whole_words = kind == "llama-bpe"  # Llama 3 takes a known word before any merge
    backend = Tokenizer(
        bpe_models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words)
    )
    backend.pre_tokenizer = pre.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend
