"""SGLang on a machine without an accelerator: platform, attention, HiCache copies.

These modules replace parts that SGLang has only for accelerators. They are active with and without
``--enable-ext`` wherever SGLang would otherwise find no platform.
"""
