"""Mistakes that show only on more than one rank: edits of workflow/ports/minimax_m2_parallel.py.

`tap` is where a mistake shows first, and `says` is in what is said of it: a cause of the dictionary, or words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bugs.corpus import LAYER, edited


@dataclass(frozen=True)
class RankBug:
    """A mistaken port over the ranks of these axes. `tap` is None if it cannot be run to its end."""

    name: str
    axes: Mapping[str, int]
    tap: str | None
    says: str
    edits: tuple[tuple[str, str], ...]
    stage: str = LAYER

    def overlay(self, source: str) -> str:
        """The port's source with this mistake.

        Raises:
            ValueError: if the source is not the one that the mistake was written for.
        """
        return edited(source, self.name, self.edits)


TP2, TP4, CP2, CP3, EP2, EP3 = {"tp": 2}, {"tp": 4}, {"cp": 2}, {"cp": 3}, {"ep": 2}, {"ep": 3}
O_PROJ = 'return Axis("tp").sum(self.o_proj(context))'
EXPERTS = 'made = Axis("tp").sum(super().forward(x)).flatten(0, 1)'
MEAN = "mean = tp.sum(wide.square().mean(-1, keepdim=True)) / tp.size"
QUERIES = "slice(tp.at * queries, (tp.at + 1) * queries)"
KEYS = "first = tp.at * kv_heads // tp.size"
SEEN = "seen = (positions[mine][:, None] >= positions[theirs][None, :]) & valid[:, None, theirs]"
SHARE = "share = received.float().sum(0).to(x.dtype)"
CHUNKS = "return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))"
ROWS = "return tp.sum(rows * own[..., None])"

RANK_BUGS = (
    RankBug(
        "no all-reduce after o_proj",
        TP2,
        "attn.out",
        "the sum over the ranks is missing",
        ((O_PROJ, "return self.o_proj(context)"),),
    ),
    RankBug(
        "two all-reduces after o_proj",
        TP2,
        "attn.out",
        "sharded_sum_twice",
        ((O_PROJ, 'return Axis("tp").sum(Axis("tp").sum(self.o_proj(context)))'),),
    ),
    RankBug(
        "no all-reduce after the experts",
        TP2,
        "mlp.out",
        "the sum over the ranks is missing",
        ((EXPERTS, "made = super().forward(x).flatten(0, 1)"),),
    ),
    RankBug(
        "a mean after the experts",
        TP2,
        "mlp.out",
        "a mean over tp in place of the sum",
        ((EXPERTS, EXPERTS.replace(".flatten", ".div(2).flatten")),),
    ),
    RankBug(
        "norm of a rank's own heads",
        TP2,
        "attn.q_norm",
        "qk_norm_per_shard",
        ((MEAN, "mean = wide.square().mean(-1, keepdim=True)"),),
    ),
    RankBug(
        "norm by the sum of the means",
        TP2,
        "attn.q_norm",
        "It is 0.707 times what it should be, everywhere",
        ((MEAN, "mean = tp.sum(wide.square().mean(-1, keepdim=True))"),),
    ),
    RankBug(
        "rank 0 baked into the queries",
        TP2,
        "attn.q",
        "all 2 ranks have the same part of it",
        ((QUERIES, "slice(0, queries)"),),
    ),
    RankBug(
        "queries of the ranks in reverse",
        TP2,
        "attn.q",
        "tp 0 has the part of tp 1",
        ((QUERIES, "slice((tp.size - 1 - tp.at) * queries, (tp.size - tp.at) * queries)"),),
    ),
    RankBug(
        "queries of the next rank",
        TP4,
        "attn.q",
        "tp 0 has the part of tp 1",
        ((QUERIES, "slice((tp.at + 1) % tp.size * queries, ((tp.at + 1) % tp.size + 1) * queries)"),),
    ),
    RankBug(
        "fewer key/value heads than ranks, taken in turn",
        TP4,
        "attn.context",
        "Only heads 2, 3, 4 and 5 of 8 are wrong",
        ((KEYS, "first = tp.at % kv_heads"),),
    ),
    RankBug(
        "fewer key/value heads than ranks, all the first",
        TP4,
        "attn.k",
        "all 4 ranks have the same part of it",
        ((KEYS, "first = 0"),),
    ),
    RankBug(
        "vocabulary offset by one",
        TP2,
        "out",
        "",
        (("own = (ids >= first)", "first = first + tp.at\n        own = (ids >= first)"),),
        "embed",
    ),
    RankBug("words of other ranks not masked", TP2, "out", "", ((ROWS, "return tp.sum(rows)"),), "embed"),
    RankBug(
        "no all-reduce after the embedding",
        TP2,
        "out",
        "the sum over the ranks is missing",
        ((ROWS, "return rows * own[..., None]"),),
        "embed",
    ),
    RankBug(
        "two all-reduces after the embedding",
        TP2,
        "out",
        "sharded_sum_twice",
        ((ROWS, "return tp.sum(tp.sum(rows * own[..., None]))"),),
        "embed",
    ),
    RankBug(
        "logits of the ranks in reverse",
        TP2,
        "out",
        "shards_out_of_order",
        (("zip(parts, sizes, strict=True)", "zip(parts[::-1], sizes, strict=True)"),),
        "lm_head",
    ),
    RankBug(
        "no gather of the logits",
        TP2,
        "out",
        "It has shape [4, 76, 256] where the golden has [4, 76, 512]",
        (
            (
                "return tp.gathered(super().forward(own_tokens(x), positions, valid), sizes_of(self.words, tp.size))",
                "return super().forward(own_tokens(x), positions, valid)",
            ),
        ),
        "lm_head",
    ),
    RankBug(
        "weights of the other rank's experts",
        EP2,
        "mlp.out",
        "",
        (
            (
                'return Axis("ep").part(super().route(x), -1)',
                'return super().route(x).tensor_split(2, -1)[1 - Axis("ep").at]',
            ),
        ),
    ),
    RankBug(
        "uneven experts: the last ones are dropped",
        EP3,
        "mlp.out",
        "Only tokens that go to experts 6 and 7 are wrong",
        (
            (
                "return tensor.tensor_split(self.size, dim)[self.at]",
                "return tensor.narrow(dim, self.at * (tensor.shape[dim] // self.size), tensor.shape[dim] // self.size)",
            ),
        ),
    ),
    RankBug(
        "all-to-all transposed",
        EP2,
        "mlp.out",
        "its tokens are in another order",
        ((".view(ep.size, -1, x.shape[-1])", ".view(-1, ep.size, x.shape[-1]).transpose(0, 1).contiguous()"),),
    ),
    RankBug(
        "a mean over the experts' ranks",
        EP2,
        "mlp.out",
        "a mean over ep in place of the sum",
        ((SHARE, "share = received.float().mean(0).to(x.dtype)"),),
    ),
    RankBug("the experts of one rank alone", EP2, "mlp.out", "expert_shard_missing", ((SHARE, "share = received[0]"),)),
    RankBug(
        "no all-to-all after the experts",
        EP2,
        "mlp.out",
        "the sum over the ranks is missing",
        (("if ep.size == 1:", "if ep.size:"),),
    ),
    RankBug(
        "all-to-all and an all-reduce",
        EP2,
        "mlp.out",
        "2 times what it should be: the sum over ep",
        (
            (
                "return torch.cat(shares)[: len(made)].view_as(x)",
                "return ep.sum(torch.cat(shares)[: len(made)].view_as(x))",
            ),
        ),
    ),
    RankBug(
        "mask at the borders of chunks",
        CP2,
        "attn.context",
        "",
        ((SEEN, SEEN.replace("positions[theirs][None, :]", "positions[theirs][None, :] + 2 * (step > 0)")),),
    ),
    RankBug(
        "mask by places in the chunks",
        CP2,
        "attn.context",
        "",
        (
            (
                SEEN,
                SEEN.replace(
                    "positions[mine][:, None] >= positions[theirs][None, :]",
                    "torch.arange(own)[:, None] >= torch.arange(len(theirs))[None, :]",
                ),
            ),
        ),
    ),
    RankBug(
        "one step of the ring too few",
        CP2,
        "attn.context",
        "",
        (("for step in range(cp.size):", "for step in range(cp.size - 1):"),),
    ),
    RankBug(
        "the ring turns the other way",
        CP3,
        None,
        "It was in irecv(",
        (("for step in (1, -1))", "for step in (-1, 1))"),),
    ),
    RankBug(
        "chunks one after the other, declared in zigzag",
        CP2,
        "input_norm",
        "chunks of tokens are those that belong at",
        ((CHUNKS, "return torch.arange(seq).tensor_split(ranks)[rank]"),),
    ),
    RankBug(
        "rotated by places in the chunks",
        CP2,
        "attn.q_rot",
        "",
        (("rotary_tables(positions[mine],", "rotary_tables(positions[:own],"),),
    ),
    RankBug(
        "blocks of the softmax not scaled",
        CP2,
        "attn.context",
        "",
        (("(top - base).exp()", "(top > float('-inf')).float()"),),
    ),
    RankBug(
        "the rank of another axis",
        {"cp": 2, "tp": 2},
        "attn.q",
        "all 2 ranks along tp have the same part of it",
        ((QUERIES, 'slice(Axis("cp").at * queries, (Axis("cp").at + 1) * queries)'),),
    ),
)
