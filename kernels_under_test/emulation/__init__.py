"""A vectorised CPU model of a low-precision kernel, with its arithmetic as parameters: a right backend of any
precision, and the ground on which faults of backward and of the terms are seeded.
"""
