"""An adapter that says which GPUs its process sees."""

import os

from sacts.conformance.adapter import Outputs, Refused, refused

SEEN = os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def support(spec):
    return refused(SEEN)


def run(case, plan=None) -> Outputs:
    raise Refused(SEEN)
