"""Compiled parts of the package; their sources lie in ``kernels/native``."""
