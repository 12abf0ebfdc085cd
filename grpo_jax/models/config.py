"""What a decoder and its adapters look like: plain frozen records, no arrays.

`load` reads them from a checkpoint, `decoder` builds modules from them, `export`
writes them back in the formats of Hugging Face and PEFT.
"""

from dataclasses import dataclass

from grpo_jax.bounds import PROJECTIONS

LORA_TARGETS = PROJECTIONS


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a Qwen2.5, Qwen3 or Llama decoder.

    Attributes:
      vocab_size: rows of the embedding table, padding rows of the checkpoint included.
      width: size of the residual stream (D).
      num_layers: decoder blocks (L).
      num_heads: query heads (N).
      num_kv_heads: key and value heads (K), a divisor of num_heads.
      head_width: size of one head (H), not always width / num_heads.
      mlp_width: size of the gated feed-forward layer (F).
      norm_eps: epsilon of every RMSNorm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: sorted items of the checkpoint's scaling record, or None.
      qkv_bias: biases on q, k and v (Qwen2.5).
      qk_norm: RMSNorm on each query and key head (Qwen3).
      tied: the output head is the transposed embedding table.
      max_positions: longest context the checkpoint declares.
      architecture: "qwen2", "qwen3" or "llama".
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, object], ...] | None
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    max_positions: int
    architecture: str

    @property
    def longest_context(self) -> int:
        """Tokens that the positions reach, stretched by a scaling record or not.

        Checkpoints that leave YaRN to the user declare the original context.
        """
        record = dict(self.rope_scaling or ())
        original = record.get("original_max_position_embeddings", 0)
        return max(self.max_positions, int(original * record.get("factor", 1)))


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685): W x + (alpha / rank) B A x.

    Routed (DART, arXiv 2602.00994), there are two of them, each of this rank and
    scale; a position uses that of the token it predicts: reasoning, or a tool call.

    Attributes:
      rank: r, the inner size.
      alpha: numerator of the scale alpha / rank.
      targets: which of the seven projections carry an adapter.
      dropout: share of adapter inputs zeroed in the training forward only.
      routed: two adapters, reasoning and tool, in place of one.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = LORA_TARGETS
    dropout: float = 0.0
    routed: bool = False
