"""Paged sparse attention in Triton: one kernel for decode and prefill, and the merge of its splits."""
