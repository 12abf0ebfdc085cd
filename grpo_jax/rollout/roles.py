"""The role of every token of a model turn, by one table on host and device.

`tools_env.roles` has the rules, byte by byte; a `Router` is a rule over the tokens of
one tokenizer. The sampler steps it once a token to choose the adapter that processes
the token, training applies it to whole turns: the same table, so the same adapters.
"""

import json

import flax.struct
import jax
import numpy as np
from jaxtyping import Int
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from grpo_jax.devices import shard
from grpo_jax.types import Leaf
from tools_env.roles import automaton


@flax.struct.dataclass
class RoleTable:
    """A rule over tokens. A turn begins in state 0, of which the role is 0.

    Attributes:
      after: u8 [states, V], the state after a token.
      roles: i32 [states], the role of the next token: 0 reasoning, 1 tool call.
    """

    after: Leaf
    roles: Leaf

    def placed(self) -> "RoleTable":
        """On the devices, a copy on each."""
        return _placed(self)


@jax.jit
def _placed(table):
    return jax.tree.map(lambda x: shard(x, *(None,) * x.ndim), table)


class Router:
    """A rule of `tools_env.roles` over the `size` ids of a tokenizer.

    Ids without a text change nothing. `table` is NumPy.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rule: str, size: int):
        rules = automaton(rule)
        step = np.array(rules.after, np.uint8)  # raises from 257 states on
        after = _over_tokens(step, _token_bytes(tokenizer, size))
        self.table = RoleTable(after, np.array(rules.roles, np.int32))
        self._rows = [row.tobytes() for row in after]

    def __call__(self, tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """The role of each token of a model turn, decided from those before it."""
        state, states = 0, []
        for token in tokens.tolist():
            states.append(state)
            state = self._rows[state][token]
        return self.table.roles[states]


def _over_tokens(step: np.ndarray, texts: list[bytes]) -> np.ndarray:
    """[states, 256] over bytes -> [states, V] over tokens, longest tokens first."""
    order = sorted(range(len(texts)), key=lambda token: -len(texts[token]))
    lengths = np.array([len(texts[token]) for token in order])
    letters = np.zeros((len(texts), lengths[0]), np.uint8)
    for row, token in zip(letters, order, strict=True):
        row[: len(texts[token])] = np.frombuffer(texts[token], np.uint8)
    states = np.arange(len(step), dtype=np.uint8)
    after = np.repeat(states[:, None], len(texts), axis=1)
    for place in range(lengths[0]):
        longer = np.searchsorted(-lengths, -place)  # tokens of more than `place` bytes
        after[:, :longer] = step[after[:, :longer], letters[:longer, place]]
    table = np.empty_like(after)
    table[:, order] = after
    return table


def _token_bytes(tokenizer: PreTrainedTokenizerFast, size: int) -> list[bytes]:
    """What each id writes; b"" for ids beyond the tokenizer's."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    spelled = _byte_level if "ByteLevel" in json.dumps(decoder) else _sentence_piece
    added = tokenizer.added_tokens_decoder
    pieces = tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))
    texts = [
        added[i].content.encode() if i in added else spelled(piece or "")
        for i, piece in enumerate(pieces)
    ]
    return texts + [b""] * (size - len(texts))


# Byte-level vocabularies write printable bytes as themselves and the others, in order,
# as the characters from 256 on.
_PRINTABLE = {ord(c) for c in ByteLevel.alphabet() if ord(c) < 256}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(b): b for b in _PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(_OTHERS)
}


def _byte_level(piece: str) -> bytes:
    return bytes(_BYTES[character] for character in piece)


def _sentence_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode()
