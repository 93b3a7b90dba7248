"""Measurements of a model on this machine for restoring prefixes (``sgl-ext calibrate``)."""
