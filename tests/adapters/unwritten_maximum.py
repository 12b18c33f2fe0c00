"""The bundled kernel, but the merge takes the maximum of all splits, those that were never written too."""

from sacts.kernels_under_test.faults import Fault, patched

MASKED = 'm_split = tl.where(l_split != 0, m_split, float("-inf"))'
PLAIN = 'm_split = tl.load(partial_m_ptr + part, mask=split < num_splits, other=float("-inf"))'
FAULT = Fault("unwritten_maximum", "an empty split's maximum", "merge.py", MASKED, PLAIN, ("merge",), "")
Adapter = __import__(f"{patched(FAULT, 'paged')}.adapter", fromlist=["Adapter"]).Adapter
