"""Breaks single parts of SGLang in every process of a server under test; see SABOTAGE below.

Python imports this file by its name at start when its directory is on PYTHONPATH.
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
    sys.meta_path.insert(0, AfterImport(name, change))


def version():
    """``version X``: SGLang says it is X."""
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: ARGUMENTS[0] if name == "sglang" else real(name)


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
        if "sglang.srt.managers.scheduler" in sys.modules:
            module.__version__ = "0.0.0"

    after_import("sgl_ext.engine.core.activation", change)


globals()[WHAT]()
