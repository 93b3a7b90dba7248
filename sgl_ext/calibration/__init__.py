"""Measurements of a model on this machine for the cost model (``sgl-ext calibrate``)."""
