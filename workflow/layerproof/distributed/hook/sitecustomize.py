"""Python runs this file when it starts if `layerproof watch` put its folder on PYTHONPATH: it watches torch.distributed.

It loads this copy of the package `distributed` by its path, because the program may have an environment without Layerproof.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = "layerproof_watch"
WATCHED = "torch.distributed"


class AfterImport:
    """A finder that runs `watch` once torch.distributed has been imported, and does nothing else."""

    def find_spec(self, name, path=None, target=None):
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec and spec.loader, "it is being imported"
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if module.is_available():
                watch()

        spec.loader.exec_module = exec_module
        return spec


def watch():
    folder = os.path.dirname(HERE)
    file = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(PACKAGE, file, submodule_search_locations=[folder])
    assert spec and spec.loader, "its file is there"
    package = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    package.watch()


def run_the_one_behind():
    """Runs the sitecustomize that this file hides, if there is one."""
    others = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, AfterImport())
run_the_one_behind()
