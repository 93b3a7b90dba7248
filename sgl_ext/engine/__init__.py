"""Everything that touches SGLang; no other package of sgl_ext imports it.

The package itself stays empty: SGLang's plugin loader, a ``.pth`` line and the command line
reach into single modules, most of them before SGLang may be imported.
"""
