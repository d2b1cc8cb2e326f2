"""Loads the port and the device that the stages of one process share."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from layerproof.distributed import process_group
from layerproof.errors import StageError, UserError
from layerproof.model.tokens import Tokens
from layerproof.port.contract import Port
from layerproof.taps import check_canonical


@dataclass(frozen=True)
class Runner:
    """What the stages of one process share: the device, so that equal graphs are compiled once, and the port's code."""

    directory: Path
    tokens: Tokens
    settings: Mapping[str, Any]
    environment: process_group.Environment
    port: Port | None

    @classmethod
    def start(cls, directory: Path, tokens: Tokens, settings: Mapping[str, Any]) -> Runner:
        """Initialises the device, then imports the port, if that was not done, and has torch as it was after that.

        `settings` are the config's `port` with `trust_remote_code`.

        Raises:
            StageError: if the port cannot be imported.
        """
        importlib.import_module("torch_xla")  # which takes long to record
        is_nxdi = settings["backend"] == "nxdi"
        on_cpu = process_group.is_on_host(settings["device"]) or (is_nxdi and settings["nxdi"]["cpu_mode"])
        if is_nxdi:
            os.environ["NXD_CPU_MODE"] = str(int(on_cpu))  # before anything of it is imported
        try:
            environment = process_group.initialise("cpu" if on_cpu else "xla", settings["device"])
        except process_group.DistributedError as error:
            raise UserError(str(error)) from error.__cause__
        module, default_dtype = (None, torch.float32)
        if settings["backend"] != "transformers":
            module, default_dtype = _loaded(settings["module"])
        torch.set_default_dtype(default_dtype)
        return cls(directory, tokens, settings, environment, module and _port(settings, module))


def _port(settings: Mapping[str, Any], module: ModuleType) -> Port:
    """The port that a module is, or of which it holds the model."""
    if settings["backend"] == "nxdi":
        from layerproof.port import nxdi

        return nxdi.load(module, settings["nxdi"])
    check_module(settings["module"], module)
    return cast("Port", module)


def load_module(name: str) -> ModuleType:
    """Imports a module by the path of its Python file or by its dotted name.

    Raises:
        StageError: if it cannot be imported; names the file and, if it has one, the line.
    """
    try:
        if name.endswith(".py"):
            path = Path(name).resolve()
            # A name of its own: a port called torch.py must not stand for torch.
            spec = importlib.util.spec_from_file_location(f"layerproof_port_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            sys.path.insert(0, str(path.parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
    except SyntaxError as error:
        raise StageError(f"{error.filename}: line {error.lineno}: {error.msg}. Correct port.module.") from error
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name != name else None
        remedy = f"Install {missing}, or name its folder in PYTHONPATH." if missing else "Correct port.module."
        raise StageError(f"{name}: cannot be imported ({type(error).__name__}: {error}). {remedy}") from error
    return module


def check_module(name: str, module: ModuleType) -> None:
    """Whether a module is a port.

    Raises:
        StageError: if it lacks `build` or `convert`, or its TAPS are not what docs/ports.md says.
    """
    for function in ("build", "convert"):
        if not callable(getattr(module, function, None)):
            raise StageError(f"{name}: has no function {function}. See docs/ports.md for what a port defines.")
    taps = getattr(module, "TAPS", {})
    if not isinstance(taps, Mapping) or not all(isinstance(text, str) for text in (*taps, *taps.values())):
        raise StageError(f'{name}: TAPS must map canonical taps to submodules: {{"attn.q": "attention.q_proj"}}.')
    check_canonical(taps, f"{name}: TAPS")


def _loaded(name: str) -> tuple[ModuleType, torch.dtype]:
    """A port, imported by the first stage of a process that needs it as it is, and the default dtype that this left."""
    path = Path(name)
    return _load_version(name, path.stat().st_mtime_ns if name.endswith(".py") and path.exists() else None)


@functools.cache
def _load_version(name: str, mtime_ns: int | None) -> tuple[ModuleType, torch.dtype]:
    torch.set_default_dtype(torch.float32)
    return load_module(name), torch.get_default_dtype()
