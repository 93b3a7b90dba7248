"""Fakes CUDA in every Python process that has this folder on its path and SGLEXT_FAKED_CUDA=1."""

import os

if os.environ.get("SGLEXT_FAKED_CUDA") == "1":
    from faked_cuda import after_import

    after_import.install()
