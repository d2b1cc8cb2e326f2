"""Loads the port and the device that the stages of one process share."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import cast

import torch

from layerproof import config
from layerproof.config import Config
from layerproof.distributed import process_group
from layerproof.distributed.errors import DistributedError
from layerproof.errors import StageError, UserError
from layerproof.model.tokens import Tokens
from layerproof.port import placements
from layerproof.port.contract import Patch, Port
from layerproof.port.placements import Declared
from layerproof.rerun.recorder import FromSource
from layerproof.taps import check_known


@dataclass(frozen=True)
class Runner:
    """State shared by the stages of one process: the device, so that equal graphs compile once, and the port's code."""

    directory: Path
    tokens: Tokens
    settings: Config
    environment: process_group.Environment
    port: Port | None
    patch: Patch | None
    placements: Declared = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)

    @classmethod
    def start(cls, directory: Path, tokens: Tokens, settings: Config) -> Runner:
        """Initialises the device, imports the port if necessary, and restores the default dtype that the import left.

        `settings` contain the config's `port`, `golden.taps` and `model.trust_remote_code`.

        Raises:
            StageError: if the port cannot be imported.
        """
        importlib.import_module("torch_xla")
        port = settings.port
        is_nxdi = port.backend == "nxdi"
        on_cpu = process_group.is_on_host(port.device) or (is_nxdi and port.nxdi.cpu_mode)
        if is_nxdi:
            os.environ["NXD_CPU_MODE"] = str(int(on_cpu))  # before any of its modules is imported
        try:
            environment = process_group.initialise("cpu" if on_cpu else "xla", port.device)
        except DistributedError as error:
            raise UserError(str(error)) from error.__cause__
        module, default_dtype = _loaded(port.module) if port.module else (None, torch.float32)
        torch.set_default_dtype(default_dtype)
        started = cls(directory, tokens, settings, environment, None, None)
        if module is None:
            return started
        if port.backend == "transformers":
            return replace(started, patch=_patch(port.module or "", module))
        own_taps = settings.golden.taps
        said = placements.declared(module, port.module or "", own_taps)
        return replace(started, port=_port(port, module, own_taps), placements=said)


def _patch(name: str, module: ModuleType) -> Patch:
    if not callable(patch := getattr(module, "patch", None)):
        raise StageError(f"{name}: the function patch is missing. See docs/ports.md for what it does.")
    return patch


def _port(settings: config.Port, module: ModuleType, own_taps: Collection[str]) -> Port:
    """The port: the module itself, or the NxD Inference model that it defines."""
    assert settings.module is not None
    if settings.backend == "nxdi":
        from layerproof.port import nxdi

        return nxdi.load(module, settings.nxdi, own_taps)
    check_module(settings.module, module, own_taps)
    return cast("Port", module)


def load_module(name: str) -> ModuleType:
    """Imports a module by the path of its Python file or by its dotted name.

    Raises:
        StageError: if it cannot be imported; names the file and, if known, the line.
    """
    try:
        if name.endswith(".py"):
            path = Path(name).resolve()
            # A name of its own: a port called torch.py must not replace torch.
            name_of_its_own = f"layerproof_port_{path.stem}"
            loader = FromSource(name_of_its_own, str(path))
            spec = importlib.util.spec_from_file_location(name_of_its_own, path, loader=loader)
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
        remedy = f"Install {missing}, or add its directory to PYTHONPATH." if missing else "Correct port.module."
        raise StageError(f"{name}: cannot be imported ({type(error).__name__}: {error}). {remedy}") from error
    return module


def check_module(name: str, module: ModuleType, own_taps: Collection[str] = ()) -> None:
    """Checks that a module is a port. `own_taps` are the names in golden.taps.

    Raises:
        StageError: if it lacks `build` or `convert`, or its TAPS do not match docs/ports.md.
    """
    for function in ("build", "convert"):
        if not callable(getattr(module, function, None)):
            raise StageError(f"{name}: the function {function} is missing. See docs/ports.md for what a port defines.")
    taps = getattr(module, "TAPS", {})
    if not isinstance(taps, Mapping) or not all(isinstance(text, str) for text in (*taps, *taps.values())):
        raise StageError(f'{name}: TAPS must map taps to submodules: {{"attn.q": "attention.q_proj"}}.')
    check_known(taps, f"{name}: TAPS", own_taps)


def _loaded(name: str) -> tuple[ModuleType, torch.dtype]:
    """A port, and the default dtype that its import left.

    The first stage of a process that needs this version imports it.
    """
    path = Path(name)
    return _load_version(name, path.stat().st_mtime_ns if name.endswith(".py") and path.exists() else None)


@functools.cache
def _load_version(name: str, mtime_ns: int | None) -> tuple[ModuleType, torch.dtype]:
    torch.set_default_dtype(torch.float32)
    return load_module(name), torch.get_default_dtype()
