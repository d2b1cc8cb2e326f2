# What every job's shell gets, and the processes that jobs share.

import secrets
import shlex
import tempfile

from layerproof import devices

# Jobs share processes, which end with this one. Not in containers, where they would end with the first job; nor if code comes
# with the checkpoint: what it keeps is not told from what the library's own stages keep.
WORKERS = os.path.join(tempfile.gettempdir(), f"layerproof-{secrets.token_hex(8)}-{os.getpid()}")
IS_SHARED = not (workflow.deployment_settings.deployment_method or SETTINGS["model"]["trust_remote_code"])
SHARED = f"LAYERPROOF_WORKERS={shlex.quote(WORKERS)}" if IS_SHARED else ""
LIBRARY = shlex.quote(os.path.join(workflow.basedir, "workflow"))
shell.executable("bash")
shell.prefix(
    # USE_TORCH_XLA: accelerate would start the XLA runtime in golden jobs, which have no use for it.
    f"set -euo pipefail; export PYTHONPATH={LIBRARY}${{{{PYTHONPATH:+:$PYTHONPATH}}}} USE_TORCH_XLA=0 {SHARED}; "
)


RUN_PORTS = ("port_stage", "force_stage", "chain_", "bisect")


def prepare_port():
    """Has the process of ports import what it needs while other jobs run, if this call runs one that can."""
    if (
        IS_SHARED
        and workflow.local_exec
        and not workflow.touch
        and devices.is_cpu(SETTINGS["port"]["device"])
        and any(job.rule.name.startswith(RUN_PORTS) for job in workflow.dag.needrun_jobs())
    ):
        # In the environment that jobs get, or they would look for another process. Without it they start theirs.
        shell("python -m layerproof.server.client || true", resources={"tmpdir": tempfile.gettempdir()})
