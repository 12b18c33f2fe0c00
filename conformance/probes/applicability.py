"""Which probes keep their meaning under which terms of a spec. What is not named here is not made: the record says
`not applicable`. Whether a probe that is made could have failed is another question, which its margin answers.
"""

from __future__ import annotations

from sacts.reference.spec import AttentionSpec, CandidateKind, EpilogueKind, ListsPer

POSITIONAL = frozenset({"rope", "alibi", "buckets"})
CODECS = frozenset({"k_codec", "v_codec"})

# `random` and `count` are made of every cell: their bounds and margins come from the reference's own weights.
# dither: numerator and denominator must hold the same equal weights, and V what a format holds.
# select: one key must get the mass; a capped logit cannot rise so far above the others.
# cliff, stair: logits must be whole octaves, which any other term disturbs.
# comb: any weights do, as long as out is their sum over one-hot V.
# Of the gradients' probes `bw_null` alone needs query heads that share a list: their d_k and d_v must cancel.
SURVIVES = {
    "dither": frozenset({"rope", "logits_soft_cap", "sequence", "empty_row", "k_codec", "query_head_lists"}),
    "select": POSITIONAL | {"sink_logits", "multiset", "sequence", "empty_row", "query_head_lists"},
    "cliff": frozenset({"sequence", "empty_row", "query_head_lists"}),
    "stair": frozenset({"sequence", "empty_row", "query_head_lists"}),
    "comb": POSITIONAL
    | {"logits_soft_cap", "sink_logits", "dropout", "multiset", "sequence", "empty_row", "query_head_lists"},
}


def terms_of(spec: AttentionSpec) -> frozenset[str]:
    """What of a spec goes beyond the plain row, by name."""
    kind = spec.candidate_kind
    return frozenset(
        name
        for name, there in (
            ("rope", spec.rope),
            ("logits_soft_cap", spec.logits_soft_cap),
            ("alibi", spec.alibi_slopes),
            ("buckets", spec.buckets),
            ("sink_logits", spec.sink_logits),
            ("dropout", spec.dropout),
            ("k_codec", spec.k_codec),
            ("v_codec", spec.v_codec),
            ("multiset", kind is CandidateKind.MULTISET),
            ("sequence", kind is CandidateKind.SEQUENCE),
            ("empty_row", spec.empty_row.forces),
            ("epilogue", spec.epilogue.kind is not EpilogueKind.NONE),
            ("query_head_lists", spec.lists is ListsPer.QUERY_HEAD and spec.group_size > 1),
        )
        if there
    )


def keeps_meaning(probe: str, spec: AttentionSpec) -> bool:
    """Whether a probe of `SURVIVES` means under the terms of a spec what it means in the plain row."""
    return terms_of(spec) <= SURVIVES[probe]
