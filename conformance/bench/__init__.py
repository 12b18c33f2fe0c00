"""Speed beside ceilings and peers: equal inputs, L2-cold, outputs judged during the timed runs. DESIGN section 9."""
