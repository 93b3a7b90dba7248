"""Check of a GPU machine: kernels, served powers against stock SGLang, and measurements.

``scripts/gpu_check.sh`` runs it. Each part is a process of its own (:mod:`.parts`).
"""
