"""One thread for each process: pytest-xdist runs one per core, and threads that wait for each other cost most."""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
