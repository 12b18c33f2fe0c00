"""The bundled kernel, but a split without keys leaves its maximum unwritten, and the merge takes the maximum of all."""

from sacts.kernels_under_test.faults import BACKENDS, Fault, patched

STORED = "tl.store(partial_m_ptr + part, m, mask=in_group)"
MASKED = 'tl.where(some, tl.load(partial_m_ptr + part, mask=inside, other=0.0), float("-inf"))'
TEXT = (BACKENDS / "paged" / "kernels.py").read_text(encoding="utf-8")
assert TEXT.count(STORED) == TEXT.count(MASKED) == 1
WRONG = TEXT.replace(STORED, "tl.store(partial_m_ptr + part, m, mask=in_group & (l > 0))").replace(
    MASKED, "tl.load(partial_m_ptr + part, mask=inside, other=0.0)"
)
FAULT = Fault("unwritten_maximum", "an empty split's maximum", "kernels.py", TEXT, WRONG, ("merge",), "")
Adapter = __import__(f"{patched(FAULT, 'paged')}.adapter", fromlist=["Adapter"]).Adapter
