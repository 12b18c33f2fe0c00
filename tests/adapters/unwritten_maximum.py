"""The bundled kernel, but the merge takes the maximum of all splits, those that were never written too."""

from sacts.kernels_under_test.faults import Fault, patched

MASKED = 'tl.where(some, tl.load(partial_m_ptr + part, mask=inside, other=0.0), float("-inf"))'
PLAIN = "tl.load(partial_m_ptr + part, mask=inside, other=0.0)"
FAULT = Fault("unwritten_maximum", "an empty split's maximum", "merge.py", MASKED, PLAIN, ("merge",), "")
Adapter = __import__(f"{patched(FAULT, 'paged')}.adapter", fromlist=["Adapter"]).Adapter
