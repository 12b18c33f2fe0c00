"""Localisation of a fault in any black box: what is wrong, in which row, token, page, tile, split, channel or request,
in a few extra launches (GATES.md section 7, docs/localise.md).
"""
