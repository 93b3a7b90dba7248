"""Properties of the device that SGLang asks the compiled kernels for."""


def is_arch_support_pdl() -> bool:
    """Returns False: the stand-in launches no kernels that could depend on each other."""
    return False
