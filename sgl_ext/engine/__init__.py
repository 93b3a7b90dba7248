"""Package that connects sgl_ext to SGLang.

Outside of this package, only :mod:`sgl_ext.bench.harness.load_generator` imports SGLang. This
module stays empty: SGLang's plugin loader, a ``.pth`` line and the command line import single
modules, most of them before SGLang may be imported.
"""
