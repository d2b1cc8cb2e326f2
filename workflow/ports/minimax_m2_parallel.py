"""MiniMax-M2 over ranks in three ways at once: `parallel.tp`, `parallel.cp` and `parallel.ep`.

Along tp, a rank has a part of the heads, of the inner features of experts, and of the vocabulary. Along cp, it has a part
of the tokens, in zigzag order, and keys and values go round in a ring. Along ep, it has a part of the experts, whose outputs
go to the ranks of their tokens by an all-to-all. It is the port for one rank (minimax_m2.py) with smaller sizes, plus what
ranks do together.
"""

from collections.abc import Iterator, Mapping

import minimax_m2
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minimax_m2 import TAPS as TAPS
from torch import nn
from torch.distributed.tensor import Replicate

from layerproof.distributed import mesh
from layerproof.port.contract import Stage, ZigZag
from layerproof.taps import tap

PLACEMENTS = {"*": {"cp": ZigZag(1), "ep": Replicate()}}


class Axis:
    """This rank's place in an axis of the mesh: `at` of `size`, in a group; alone if the mesh has no such axis."""

    def __init__(self, name: str) -> None:
        axes = mesh.launched("xla" if dist.get_backend() == "xla" else "cpu")
        self.size = axes.sizes.get(name, 1)
        self.at, self.group = (axes.at(name), axes.group(name)) if self.size > 1 else (0, None)

    def part(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """This rank's part of a tensor; the first parts are one larger if the size is not divisible."""
        return tensor.tensor_split(self.size, dim)[self.at]

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        if self.group:
            dist.all_reduce(total, group=self.group)
        return total

    def gathered(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The parts of all ranks, put together along the last dim, of which rank i has `sizes[i]`."""
        if not self.group:
            return part
        own = F.pad(part, (0, max(sizes) - part.shape[-1]))
        parts = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat([one[..., :size] for one, size in zip(parts, sizes, strict=True)], -1)

    def passed_on(self, own: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
        """Sends a tensor to the next rank, and returns that of the rank before, in `incoming`."""
        assert self.group is not None
        after, before = (dist.get_global_rank(self.group, (self.at + step) % self.size) for step in (1, -1))
        ends = dist.P2POp(dist.isend, own.contiguous(), after), dist.P2POp(dist.irecv, incoming, before)
        for work in dist.batch_isend_irecv(list(ends)):
            work.wait()
        return incoming


def sizes_of(count: int, parts: int) -> list[int]:
    return [len(part) for part in torch.arange(count).tensor_split(parts)]


def tokens_of(rank: int, ranks: int, seq: int) -> torch.Tensor:
    """The tokens of a rank of the ring, in zigzag order: a chunk from the start and one from the end."""
    chunks = torch.arange(seq).tensor_split(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


class NormOfAll(minimax_m2.RMSNorm):
    """RMSNorm over a projection whose heads are spread evenly over the ranks of tp."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, tp = x.float(), Axis("tp")
        mean = tp.sum(wide.square().mean(-1, keepdim=True)) / tp.size
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight


class Attention(minimax_m2.Attention):
    """The attention of this rank's heads and tokens; its k and v go round the ring of cp."""

    def __init__(self, config: dict, dtype: torch.dtype) -> None:
        super().__init__(config, dtype)
        self.q_norm = NormOfAll(self.q_proj.out_features, config["rms_norm_eps"], dtype)
        self.k_norm = NormOfAll(self.k_proj.out_features, config["rms_norm_eps"], dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """x [batch, own tokens, hidden]; positions [seq] and valid [batch, seq] are those of all tokens."""
        batch, own, _ = x.shape
        cp = Axis("cp")
        mine = tokens_of(cp.at, cp.size, len(positions))
        q = self.q_norm(self.q_proj(x)).view(batch, own, self.heads, self.head_dim)
        k = self.k_norm(self.k_proj(x)).view(batch, own, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, own, self.kv_heads, self.head_dim)
        cos, sin = minimax_m2.rotary_tables(positions[mine], self.rotary_dim, self.theta)
        q = tap("attn.q_rot", minimax_m2.rotate(q, cos, sin))
        k = tap("attn.k_rot", minimax_m2.rotate(k, cos, sin))
        q = q.view(batch, own, self.kv_heads, self.heads // self.kv_heads, self.head_dim)

        # Softmax block by block (arXiv 2310.01889): what was summed before is scaled to the largest score so far.
        top = q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
        weight = torch.zeros_like(top)
        total = torch.zeros_like(q, dtype=torch.float32)
        for step in range(cp.size):
            theirs = tokens_of((cp.at - step) % cp.size, cp.size, len(positions))
            if step:
                k, v = (cp.passed_on(one, one.new_empty(batch, len(theirs), *one.shape[2:])) for one in (k, v))
            scores = torch.einsum("bqkgd,bskd->bqkgs", q, k).float() * self.head_dim**-0.5
            seen = (positions[mine][:, None] >= positions[theirs][None, :]) & valid[:, None, theirs]
            scores = scores.masked_fill(~seen[:, :, None, None], float("-inf"))
            highest = torch.maximum(top, scores.amax(-1))
            base = highest.masked_fill(highest == float("-inf"), 0.0)
            block, rest = (scores - base[..., None]).exp(), (top - base).exp()
            weight = weight * rest + block.sum(-1)
            total = total * rest[..., None] + torch.einsum("bqkgs,bskd->bqkgd", block, v.float())
            top = highest
        context = (total / weight[..., None]).to(x.dtype)
        context = tap("attn.context", context.reshape(batch, own, self.heads * self.head_dim))
        return Axis("tp").sum(self.o_proj(context))


class MoE(minimax_m2.MoE):
    """The experts of this rank of ep, of whose inner features this rank of tp has a part."""

    def route(self, x: torch.Tensor) -> torch.Tensor:
        return Axis("ep").part(super().route(x), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ep = Axis("ep")
        made = Axis("tp").sum(super().forward(x)).flatten(0, 1)
        if ep.size == 1:
            return made.view_as(x)
        # Each rank sums what all experts made of its share of the tokens, and all get the sums.
        missing = -len(made) % ep.size
        mine = F.pad(made, (0, 0, 0, missing)).view(ep.size, -1, x.shape[-1])
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=ep.group)
        share = received.float().sum(0).to(x.dtype)
        shares = [torch.empty_like(share) for _ in range(ep.size)]
        dist.all_gather(shares, share, group=ep.group)
        return torch.cat(shares)[: len(made)].view_as(x)


class Layer(minimax_m2.Layer):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return super().forward(own_tokens(x), positions, valid)


class Embedding(minimax_m2.Embedding):
    """A rank of tp has a part of the vocabulary, and zeros for the other words."""

    words: int

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        tp, ids = Axis("tp"), own_tokens(ids)
        first = sum(sizes_of(self.words, tp.size)[: tp.at])
        own = (ids >= first) & (ids < first + len(self.weight))
        rows = F.embedding((ids - first).clamp(0, len(self.weight) - 1), self.weight)
        return tp.sum(rows * own[..., None])


class FinalNorm(minimax_m2.FinalNorm):
    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return super().forward(own_tokens(x), positions, valid)


class Head(minimax_m2.Head):
    words: int

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        tp = Axis("tp")
        return tp.gathered(super().forward(own_tokens(x), positions, valid), sizes_of(self.words, tp.size))


def own_tokens(x: torch.Tensor) -> torch.Tensor:
    """The tokens of this rank of cp, of x [batch, seq, ...]."""
    cp = Axis("cp")
    return x[:, tokens_of(cp.at, cp.size, x.shape[1])]


def heads_of(stage: Stage) -> tuple[slice, slice]:
    """The query heads of this rank of tp, and its key/value heads: one that several ranks share if there are too few.

    Raises:
        ValueError: if the heads do not divide evenly.
    """
    heads, kv_heads = stage.config["num_attention_heads"], stage.config["num_key_value_heads"]
    tp = Axis("tp")
    if heads % tp.size or max(tp.size, kv_heads) % min(tp.size, kv_heads):
        raise ValueError(f"{tp.size} ranks do not divide {heads} heads and {kv_heads} key/value heads evenly")
    queries, keys = heads // tp.size, max(1, kv_heads // tp.size)
    first = tp.at * kv_heads // tp.size
    return slice(tp.at * queries, (tp.at + 1) * queries), slice(first, first + keys)


def build(stage: Stage) -> nn.Module:
    """A rank's module of a stage, on the meta device."""
    config, tp = dict(stage.config), Axis("tp")
    words = config["vocab_size"]
    with torch.device("meta"):
        if stage.name == "norm":
            return FinalNorm(config["hidden_size"], config["rms_norm_eps"], stage.dtype)
        if stage.layer is None:
            config["vocab_size"] = sizes_of(words, tp.size)[tp.at]
            module = (Embedding if stage.name == "embed" else Head)(config, stage.dtype)
            module.words = words
            return module
        layer = Layer(config, stage.dtype)
        queries, keys = heads_of(stage)
        config["num_attention_heads"], config["num_key_value_heads"] = len_of(queries), len_of(keys)
        config["intermediate_size"] = sizes_of(config["intermediate_size"], tp.size)[tp.at]
        layer.attention = Attention(config, stage.dtype)
        moe = layer.moe = MoE(config, stage.dtype)
        for name in ("gate", "up", "down"):
            setattr(moe, name, nn.Parameter(Axis("ep").part(getattr(moe, name).data)))
    return layer


def len_of(part: slice) -> int:
    return part.stop - part.start


def convert(stage: Stage, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's part of a stage's tensors."""
    tp, ep = Axis("tp"), Axis("ep")
    for name, tensor in minimax_m2.convert(stage, weights):
        if stage.name in ("embed", "lm_head"):
            tensor = tp.part(tensor)
        elif ".q_" in name or ".k_" in name or ".v_" in name or ".o_" in name:
            heads = heads_of(stage)[name.split(".")[1][0] in "kv"]
            rows = slice(heads.start * stage.config["head_dim"], heads.stop * stage.config["head_dim"])
            tensor = tensor[:, rows] if ".o_" in name else tensor[rows]
        elif name in ("moe.gate", "moe.up", "moe.down"):
            tensor = tp.part(ep.part(tensor), 2 if name == "moe.down" else 1)
        yield name, tensor.clone()
