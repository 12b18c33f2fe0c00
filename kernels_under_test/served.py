"""What the dense backend serves of a spec: the plain row. Everything else is refused by name, "not yet: rope", never
silently ignored.
"""

from __future__ import annotations

from sacts.reference.spec import AttentionSpec, CandidateKind, EmptyRowRule, Epilogue


def unserved(spec: AttentionSpec) -> str:
    """The first field of the spec that goes beyond the plain row, in words; empty where there is none.

    Causal rules are all served: they come down to `token_position`.
    """
    for beyond, reason in (
        (spec.candidate_kind is not CandidateKind.SET, f"candidate_kind {spec.candidate_kind}"),
        (spec.empty_row is not EmptyRowRule.ZERO, f"empty_row {spec.empty_row}"),
        (spec.query_ordinals, "query_ordinals"),
        (spec.rope, "rope"),
        (spec.logits_soft_cap, "logits_soft_cap"),
        (spec.alibi_slopes, "alibi_slopes"),
        (spec.buckets, "buckets"),
        (spec.sink_logits, "sink_logits"),
        (spec.dropout, "dropout"),
        (spec.k_codec, f"k_codec {spec.k_codec.format if spec.k_codec else ''}"),
        (spec.v_codec, f"v_codec {spec.v_codec.format if spec.v_codec else ''}"),
        (spec.epilogue != Epilogue(), f"epilogue {spec.epilogue.kind}"),
    ):
        if beyond:
            return f"not yet: {reason}"
    return ""
