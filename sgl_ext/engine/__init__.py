"""Package that connects sgl_ext to SGLang.

Outside of this package, only modules of :mod:`sgl_ext.bench.harness` that wrap parts of SGLang
import it; ``test_layers.py`` names them. This module stays empty: SGLang's plugin loader, a
``.pth`` line and the command line import single modules, most of them before SGLang may be
imported.
"""
