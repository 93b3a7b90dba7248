"""Breaks single parts of SGLang in every process of a server under test.

``forked.py`` runs this file in each process of a server whose environment has ``SABOTAGE``: the
name of a function below, and its arguments. ``CHILD`` is True in children of the launcher.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys

WHAT, *ARGUMENTS = os.environ["SABOTAGE"].split()


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``change(module)`` once ``name`` has been imported."""

    def __init__(self, name, change):
        self.name, self.change = name, change

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(name, change):
    """Calls ``change(module)``, as soon as ``name`` is imported if it is not yet."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, change))


def version():
    """``version X``: SGLang says it is X."""

    def change(module):
        real = importlib.metadata.version
        module.version = lambda name: ARGUMENTS[0] if name == "sglang" else real(name)

    after_import("sgl_ext.engine.core.hooks", change)


def hook():
    """``hook TARGET``: SGLang's registry fails to apply this hook, and swallows that."""

    def change(module):
        apply_target = module.HookRegistry._apply_target.__func__

        def failing(cls, target, hooks):
            if target == ARGUMENTS[0]:
                raise AttributeError(f"sabotaged: {target}")
            return apply_target(cls, target, hooks)

        module.HookRegistry._apply_target = classmethod(failing)

    after_import("sglang.srt.plugins.hook_registry", change)


def seam():
    """``seam``: the HTTP server takes no launch_callback."""

    def change(module):
        real = module.launch_server

        def launch_server(server_args):
            real(server_args)

        module.launch_server = launch_server

    after_import("sglang.srt.entrypoints.http_server", change)


def report():
    """``report``: schedulers run another version of the extension than their launcher."""

    def change(module):
        if CHILD:  # noqa: F821
            module.__version__ = "0.0.0"

    after_import("sgl_ext.engine.core.activation", change)


globals()[WHAT]()
