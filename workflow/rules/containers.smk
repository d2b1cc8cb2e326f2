# Images: what is bound into them, and the digest of each.

import functools

from snakemake.settings.types import DeploymentMethod

from layerproof.host import containers

CONTAINERS = SETTINGS["containers"]
IN_CONTAINERS = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method

if IN_CONTAINERS:
    USED = [
        workflow.basedir,
        CHECKPOINT,
        SETTINGS["inputs"]["prompts"],
        SETTINGS["inputs"]["token_ids"],
        SETTINGS["port"]["module"],
        SETTINGS["port"]["captured"],
    ]
    for argument in containers.arguments(
        [Path(path) for path in [*USED, *os.environ.get("PYTHONPATH", "").split(":")] if path]
    ):
        # It is there already in jobs that a cluster runs.
        if f" {argument} " not in f" {workflow.deployment_settings.apptainer_args} ":
            workflow.deployment_settings.apptainer_args += f" {argument}"


@functools.cache
def image_digest(image):
    return or_exit(containers.digest, image, Path(".layerproof/images"))
