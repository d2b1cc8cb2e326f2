"""An S3 server of this machine alone: OpenStack Swift with one disk, by its own S3 API."""

import getpass
import os
import socket
import subprocess
import time
from pathlib import Path

import boto3
from botocore.config import Config
from runs import REPOSITORY

from environments import install

PINNED = REPOSITORY / "requirements/swift.txt"
RINGS = ("account", "container", "object")
CLUSTER = """
[swift-hash]
swift_hash_path_prefix = layerproof
swift_hash_path_suffix = layerproof
[storage-policy:0]
name = only
default = yes
"""
COMMON = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
workers = 0
user = {user}
"""
STORE = """
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper listing_formats bulk s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = secret .admin
[filter:slo]
use = egg:swift#slo
"""
USER = {"aws_access_key_id": "test:tester", "aws_secret_access_key": "secret"}
PATIENCE = 60
"""Seconds."""


class Swift:
    """Its four servers, started on entry and ended on exit, with one bucket."""

    def __init__(self, folder: Path, bucket: str) -> None:
        self.folder, self.bucket = folder, bucket
        self.processes: list[subprocess.Popen] = []
        self.endpoint = ""

    def __enter__(self) -> "Swift":
        self.programs = install(PINNED)
        ports = dict(zip((*RINGS, "proxy"), _free_ports(4), strict=True))
        (self.folder / "devices/disk").mkdir(parents=True)
        (self.folder / "swift.conf").write_text(CLUSTER)
        for name, port in ports.items():
            if name in RINGS:
                builder = self.folder / f"{name}.builder"
                for command in (
                    ("create", "4", "1", "1"),
                    ("add", f"r1z1-127.0.0.1:{port}/disk", "1"),
                    ("rebalance",),
                ):
                    subprocess.run(
                        [self.programs / "swift-ring-builder", builder, *command], check=True, capture_output=True
                    )
            settings = (COMMON + (STORE if name in RINGS else PROXY)).format(
                name=name, port=port, folder=self.folder, user=getpass.getuser()
            )
            (self.folder / f"{name}.conf").write_text(settings)
            with open(self.folder / f"{name}.log", "wb") as log:
                command = [self.programs / f"swift-{name}-server", self.folder / f"{name}.conf", "-v"]
                environment = os.environ | {"SWIFT_DIR": str(self.folder)}
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        self.endpoint = f"http://127.0.0.1:{ports['proxy']}"
        try:
            self._create_bucket()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def environment(self) -> dict[str, str]:
        """How a user tells the storage plugin of a server that is not Amazon's."""
        keys = {name.upper(): value for name, value in USER.items()}
        return {"SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": self.endpoint, **keys}

    def objects(self) -> dict[str, bytes]:
        """What the bucket holds, by key."""
        found = self._client().list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return {entry["Key"]: self.get(entry["Key"]) for entry in found}

    def get(self, key: str) -> bytes:
        return self._client().get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        self._client().put_object(Bucket=self.bucket, Key=key, Body=content)

    def _client(self):
        config = Config(request_checksum_calculation="when_required", response_checksum_validation="when_required")
        return boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1", config=config, **USER)

    def _create_bucket(self) -> None:
        for _ in range(PATIENCE):
            try:
                self._client().create_bucket(Bucket=self.bucket)
                return
            except Exception:  # no server yet, or none behind it
                time.sleep(1)
        logs = "".join(f"\n== {path}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
        raise AssertionError(f"no bucket can be made{logs}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
