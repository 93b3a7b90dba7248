"""SGLang on a machine without an accelerator: platform, attention, HiCache copies.

These stand in for what SGLang has only for accelerators, so they are in force with and without
``--enable-ext`` wherever SGLang would otherwise find no platform at all.
"""
