"""Lets the ranks of an engine sleep at once when they have nothing to do, instead of in a second.

They wait for each other in a loop that yields and never sleeps. With two engines of two ranks on
two cores that takes the cores from those that have work: turns took half a minute. On the path of
an engine's Python this file is run at its start; it changes the default of one argument. Nothing in
the installed package is touched.
"""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

QUEUES = "vllm.distributed.device_communicators.shm_broadcast"


class Finder(importlib.abc.MetaPathFinder):
    """Lets the module load as ever, then changes it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != QUEUES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            initial = module.SpinCondition.__init__
            assert initial.__defaults__ == (1,), "busy_loop_s is no longer the last argument"
            initial.__defaults__ = (0.002,)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
