"""Shape of a decoder: its layers as blocks with sizes, without the words of any family's config.

A family's file reads a HF config into a `Decoder`. The trainer's modules, the table of shards, the servers' layout, and
estimates of memory and time are built from it. They choose by the type of a block, layer by layer.

    Attention        grouped-query attention
    LatentAttention  attention whose queries, keys and values come from latent vectors
    DeltaNet         gated delta net, a linear attention
    Mlp              gated MLP
    Experts          mixture of gated experts
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary positions, over the full context or in a sliding window."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of queries and keys
    output_gate: bool = False  # each head's output is scaled by a sigmoid; its rows follow the head's in q_proj
    window: int = 0  # keys that a query sees, itself included; 0: all before it
    sinks: bool = False  # True: each head has a logit without value in its softmax
    softmax_scale: float | None = None  # factor of the scores; None: head_dim ** -0.5
    rotary: int = 0  # row of the model's tables of rotary frequencies

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def active_elements(self, hidden: int) -> int:
        """Elements of the matrices that multiply a token of `hidden` features."""
        return hidden * ((3 if self.output_gate else 2) * self.q_size + 2 * self.kv_size)

    @property
    def score_size(self) -> int:
        """Products of a query with a key, and as many of its score with the value: the mean of both."""
        return self.q_size

    def cached_elements(self, tp_size: int) -> int:
        """Elements of the KV cache for one token on a server's rank. Ranks beyond the KV heads hold copies of them."""
        return 2 * max(1, self.kv_heads // tp_size) * self.head_dim


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention over the full context (DeepSeek-V2, arXiv:2405.04434).

    The last `rotary_dim` elements of a query or key are rotated in pairs of neighbours. All heads share this part of a
    key.
    """

    heads: int
    query_rank: int  # size of a query's latent vector; 0: queries come from the hidden features
    kv_rank: int  # size of the latent vector of keys and values
    plain_dim: int  # elements of a query or key that are not rotated
    rotary_dim: int
    value_dim: int
    softmax_scale: float
    rotary_scale: float  # factor on the rotated elements (YaRN)
    norm_eps: float  # of the norms of latent vectors
    qkv_bias = output_bias = qk_norm = sinks = output_gate = False
    window = 0

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        """Size of a query or key."""
        return self.plain_dim + self.rotary_dim

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all heads' keys, and of values padded to the size of keys."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the matrix that makes keys, without their rotated part, and values from latent vectors."""
        return self.heads * (self.plain_dim + self.value_dim)

    def active_elements(self, hidden: int) -> int:
        """Elements of the matrices that multiply a token of `hidden` features."""
        query = (hidden + self.q_size) * self.query_rank if self.query_rank else hidden * self.q_size
        key_value = hidden * (self.kv_rank + self.rotary_dim) + self.kv_rank * self.kv_rows
        return query + key_value + hidden * self.heads * self.value_dim

    @property
    def score_size(self) -> int:
        """Products of a query with a key, and as many of its score with the value: the mean of both."""
        return self.heads * (self.head_dim + self.value_dim) // 2

    def cached_elements(self, tp_size: int) -> int:
        """Elements of the KV cache for one token on a server's rank: each holds the latent vector and the key part."""
        return self.kv_rank + self.rotary_dim


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net (arXiv:2412.06464): a causal convolution, then a state of keys by values for each value head.

    Each key head has several value heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int  # tokens that the convolution reads
    grouped: bool  # checkpoints have the rows of q, k, v, z together by key head; False: all of q, then k, v

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    def sections(self, ranks: int) -> tuple[int, ...]:
        """Rows of the input projection on one of `ranks`: query, key, value, z, beta, alpha."""
        keys, values, heads = self.key_size // ranks, self.value_size // ranks, self.value_heads // ranks
        return keys, keys, values, values, heads, heads

    def active_elements(self, hidden: int) -> int:
        """Elements of the matrices that multiply a token of `hidden` features, and of the state, read and updated."""
        return hidden * (sum(self.sections(1)) + self.value_size) + 3 * self.value_size * self.key_dim

    @property
    def score_size(self) -> int:
        """0: its cost does not grow with the distance of tokens."""
        return 0

    def cached_elements(self, tp_size: int) -> int:
        """0: a server's cache has one state for each sequence, and nothing for a token."""
        return 0


@dataclass(frozen=True)
class Mlp:
    """Gated MLP."""

    width: int
    activation: str = "silu"  # or gelu_tanh

    def active_elements(self, hidden: int) -> int:
        """Elements of the matrices that multiply a token of `hidden` features."""
        return 3 * hidden * self.width


@dataclass(frozen=True)
class ExpertNames:
    """Module names of a mixture of experts in a family's checkpoints."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    interleaved: bool = False  # True: a layer's experts are one tensor, with gate and up in turn (`fused_experts.py`)
    shared: str = "shared_experts"


@dataclass(frozen=True)
class Experts:
    """Mixture of gated experts with SiLU. A router gives each token to the `topk` experts with the largest scores.

    With `clamp`, experts compute `(up + 1) * gate * sigmoid(1.702 gate)`, with gate and up clamped (gpt-oss).
    """

    count: int
    width: int  # intermediate size of one expert
    topk: int  # experts per token
    normalized: bool  # True if the weights of a token's experts sum to 1
    names: ExpertNames
    shared_width: int = 0  # intermediate size of the expert that every token takes; 0: there is none
    shared_gate: bool = False  # a sigmoid of the token scales that expert's output
    biased: bool = False  # True: the router and each projection of an expert have a bias
    clamp: float = 0.0  # 0: SiLU without clamps
    score: str = "softmax"  # of the router's logits: softmax or sigmoid
    selection_bias: bool = False  # True: a bias is added to scores for the choice of experts, and not to their weights
    groups: int = 1  # number of groups of experts
    topk_groups: int = 1  # number of groups that a token's experts come from
    scale: float = 1.0  # factor on the weights of a token's experts

    def active_elements(self, hidden: int) -> int:
        """Elements of the experts' matrices that multiply a token of `hidden` features."""
        return 3 * hidden * (self.width * self.topk + self.shared_width)


@dataclass(frozen=True)
class Layer:
    """One layer: a norm and attention, a norm and an MLP or experts, each added to the residual stream."""

    attention: Attention | LatentAttention | DeltaNet
    mlp: Mlp | Experts
    sandwich: bool = False  # True: a norm also after attention and after the MLP, before the sum


@dataclass(frozen=True)
class MtpLayer:
    """One depth of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), by modules of a checkpoint.

    It norms a hidden state and the embedding of a later token, projects both to one vector, and runs one more layer and
    a norm. The model's own head follows.
    """

    layer: Layer
    prefix: str  # of the layer's tensors
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    embedding_copy: str = ""  # tensor that repeats the model's embedding; "": there is none
    head_copy: str = ""  # tensor that repeats the model's head


@dataclass(frozen=True)
class Decoder:
    """A language model without its head: embedding, layers, final RMSNorm."""

    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    tied: bool  # True if the head shares the embedding
    norm_eps: float
    zero_centered_norms: bool = False  # True: norms multiply by 1 + weight
    embedding_scale: float = 1.0  # factor of embeddings, not of the head
    mtp: tuple[MtpLayer, ...] = ()  # layers of multi-token prediction, where they are trained

    @property
    def windowed(self) -> bool:
        """True if any layer attends in a window, or with sinks."""
        return any(block.window or block.sinks for block in self.attentions)

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """The attention of each layer that has some."""
        return [layer.attention for layer in self.layers if not isinstance(layer.attention, DeltaNet)]

    @property
    def attention(self) -> Attention | LatentAttention:
        """The attention of every layer that has some."""
        return self.attentions[0]

    @property
    def delta_net(self) -> DeltaNet | None:
        """The gated delta net of the layers that have one; None if there is none."""
        return next((layer.attention for layer in self.layers if isinstance(layer.attention, DeltaNet)), None)

    @property
    def mlp(self) -> Mlp | None:
        """The MLP of the dense layers; None if every layer has experts."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Mlp)), None)

    @property
    def experts(self) -> Experts | None:
        """The experts of the layers that have some; None for a dense model."""
        return next((layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)), None)

    @property
    def mlp_width(self) -> int:
        """Intermediate size of the dense layers' MLP; an expert's where every layer has experts."""
        return next(layer.mlp.width for layer in sorted(self.layers, key=lambda layer: isinstance(layer.mlp, Experts)))

    @property
    def sparse(self) -> tuple[bool, ...]:
        """By layer: True if it has experts."""
        return tuple(isinstance(layer.mlp, Experts) for layer in self.layers)
