"""The metadata of an archive, as a Provenance Run Crate (https://w3id.org/ro/wfrun/provenance/0.5).

It says who made which file from which others, when, where and with what: the workflow, a tool for each verb, an action
for each job, and the digest of each file. It does not say which call of Snakemake started a job, because no record does.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from rocrate.model import ComputationalWorkflow, ContextEntity
from rocrate.rocrate import ROCrate

from layerproof.files import digest_of, read_json
from layerproof.report.member import Member
from layerproof.rerun.records import Record

Entity = Any  # rocrate's entities; it has no types

RO_CRATE_VERSION = "1.1"
"""The version of RO-Crate that the profiles below extend."""
RO_CRATE = f"https://w3id.org/ro/crate/{RO_CRATE_VERSION}"
WORKFLOW_CRATE = "https://w3id.org/workflowhub/workflow-ro-crate/1.0"
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": "Process Run Crate",
    "https://w3id.org/ro/wfrun/workflow/0.5": "Workflow Run Crate",
    "https://w3id.org/ro/wfrun/provenance/0.5": "Provenance Run Crate",
    WORKFLOW_CRATE: "Workflow RO-Crate",
}
NAMESPACE = "https://w3id.org/ro/terms/workflow-run#"
TERMS = ("sha256", "containerImage", "ContainerImage", "registry", "resourceUsage")
"""Terms of the profiles that RO-Crate 1.1 lacks. The metadata defines them itself, so readers need not download them."""
WORKFLOW = "code/Snakefile"
OUTPUTS = ("results/report.html", "results/verdicts.json", "results/bisect.json")
"""What the run as a whole makes; the last only if it was asked for."""
FORMATS = {
    ".diff": "text/x-diff",
    ".h5": "application/x-hdf5",
    ".html": "text/html",
    ".json": "application/json",
    ".md": "text/markdown",
    ".py": "text/x-python",
    ".svg": "image/svg+xml",
    ".tsv": "text/tab-separated-values",
    ".yaml": "application/yaml",
}
"""Media types by the ending of a file's name; the others are plain text."""
DESCRIPTIONS = {
    "config.yaml": "The configuration of the run, with every key",
    "uncommitted.diff": "What was not committed in the workflow's repository; git apply adds it to the commit",
    "MANIFEST.sha256": "The digest of every other file, for sha256sum -c",
    "results/report.html": "The report: start here",
    "results/verdicts.json": "The verdict, for programs",
    "results/manifest.json": "Settings, command, versions, host and times of every job, and the digest of every file",
}
LICENCE = "No licence is stated: ask the author of the run"
SNAKEMAKE = "https://w3id.org/workflowhub/workflow-ro-crate#snakemake"
COMPLETED, FAILED = "http://schema.org/CompletedActionStatus", "http://schema.org/FailedActionStatus"


def metadata(listed: Mapping[str, Any], records: Mapping[str, Record], members: Mapping[str, Member]) -> dict[str, Any]:
    """The content of ro-crate-metadata.json.

    `listed` is the manifest's content, `records` are those of its jobs, and `members` the other files of the archive by
    name. Nothing here depends on the time of the call.
    """
    return _Crate(listed, records, members).generate()


def public_metadata(listed: Mapping[str, Any], members: Mapping[str, Member]) -> dict[str, Any]:
    """The content of ro-crate-metadata.json of an archive for the public: its files, without jobs, hosts and users."""
    crate: Any = ROCrate(version=RO_CRATE_VERSION)
    for name, member in sorted(members.items()):
        about = _about(name, member.path) | {"contentSize": str(member.bytes), "sha256": member.sha256}
        crate.add_file(dest_path=name, properties=about)
    crate.add_file(dest_path="MANIFEST.sha256", properties=_about("MANIFEST.sha256", "MANIFEST.sha256"))
    root = crate.root_dataset
    root["name"] = "Layerproof: a report to share"
    root["description"] = "The report of a run of Layerproof, without the port's source, prompts and local paths"
    root["datePublished"] = listed["written"]
    licence = {"@type": "CreativeWork", "name": "Licence", "description": LICENCE}
    root["license"] = crate.add(ContextEntity(crate, "#licence", properties=licence))
    crate.metadata.extra_terms.update({"sha256": NAMESPACE + "sha256"})
    return crate.metadata.generate()


@dataclass(frozen=True)
class _Execution:
    """One execution of a job: digests by path of what it read and wrote, and what its record says of the run."""

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    run: Mapping[str, Any]
    error: str | None = None
    image: str | None = None

    @property
    def verb(self) -> str:
        """The verb of its command."""
        return shlex.split(self.run["command"])[1]

    @property
    def started(self) -> datetime:
        return datetime.fromisoformat(self.run["started"])

    @property
    def ended(self) -> datetime:
        return self.started + timedelta(seconds=self.run["wall_s"])

    @property
    def packages(self) -> set[tuple[str, str]]:
        """Name and version of each."""
        return {*self.run["packages"].items(), ("Python", self.run["python"])}


def _executions(records: Mapping[str, Record]) -> Iterator[_Execution]:
    """Those of this run, and those on another host that made an imported golden."""
    for name, record in sorted(records.items()):
        outputs = {path: output["sha256"] for path, output in record.outputs.items()}
        image = record.job.versions.get("container")
        yield _Execution(name, record.inputs, outputs, record.run, record.error, image)
        if made := record.run.get("made"):
            yield _Execution(f"{name}/made", made["inputs"], made["outputs"], made)


class _Crate:
    """The crate while entities are added to it. An entity is known by an identifier that says what it is."""

    def __init__(self, listed: Mapping[str, Any], records: Mapping[str, Record], members: Mapping[str, Member]) -> None:
        self.listed, self.records, self.members = listed, records, members
        self.executions = list(_executions(records))
        self.crate: Any = ROCrate(version=RO_CRATE_VERSION)
        self.files: dict[str, Entity] = {}
        self.by_path = {member.path: name for name, member in members.items()}

    def generate(self) -> dict[str, Any]:
        for name, member in sorted(self.members.items()):
            about = _about(name, member.path) | {"contentSize": str(member.bytes), "sha256": member.sha256}
            self.files[name] = self._add_workflow(about) if name == WORKFLOW else self._add_file(name, about)
        self._add_file("MANIFEST.sha256", _about("MANIFEST.sha256", "MANIFEST.sha256"))
        workflow = self.files[WORKFLOW]
        tools = self._add_tools(workflow)
        actions = [self._add_action(execution, tools[execution.verb]) for execution in self.executions]
        self._describe_root(workflow, [self._add_run(workflow), *actions])
        self.crate.metadata["conformsTo"] = [{"@id": RO_CRATE}, {"@id": WORKFLOW_CRATE}]
        self.crate.metadata.extra_terms.update({term: NAMESPACE + term for term in TERMS})
        return self.crate.metadata.generate()

    def _describe_root(self, workflow: Entity, actions: list[Entity]) -> None:
        config, root = self.listed["config"], self.crate.root_dataset
        port = config["port"].get("module") or config["port"].get("backend")
        root["name"] = f"Layerproof: {port} compared with {config['model']['checkpoint']}"
        root["description"] = "A run of Layerproof, which compares the port of a language model with the original"
        root["datePublished"] = self.listed["written"]
        root["author"] = self._users()
        root["license"] = self._thing("#licence", "CreativeWork", name="Licence", description=LICENCE)
        root["conformsTo"] = [
            self._thing(url, "CreativeWork", name=name, version=url.rpartition("/")[2])
            for url, name in PROFILES.items()
        ]
        root["mainEntity"], root["mentions"] = workflow, actions

    def _add_file(self, name: str, about: Mapping[str, Any]) -> Entity:
        return self.crate.add_file(dest_path=name, properties=about)

    def _add_workflow(self, about: Mapping[str, Any]) -> Entity:
        git, packages = self.listed["git"], self.listed["packages"]
        state = {True: ", with uncommitted changes", False: ", without uncommitted changes", None: ""}
        properties = {
            **about,
            "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"],
            "name": "Layerproof",
            "version": packages["layerproof"],
            "identifier": git["commit"],
            "description": f"Commit {git['commit']}{state[git['dirty']]}",
        }
        workflow = self.crate.add(ComputationalWorkflow(self.crate, dest_path=WORKFLOW, properties=properties))
        version = packages.get("snakemake", "unknown")
        language = self._thing(SNAKEMAKE, "ComputerLanguage", name="Snakemake", version=version)
        workflow["programmingLanguage"] = language
        return workflow

    def _add_tools(self, workflow: Entity) -> dict[str, Entity]:
        """A tool and a step for each verb, with the packages that its jobs had."""
        packages: dict[str, set[tuple[str, str]]] = {}
        for execution in self.executions:
            packages.setdefault(execution.verb, set()).update(execution.packages)
        tools = {verb: self._tool(verb, packages[verb]) for verb in sorted(packages)}
        workflow["hasPart"] = list(tools.values())
        workflow["step"] = [
            self._thing(f"#step/{verb}", "HowToStep", name=verb, workExample=tool) for verb, tool in tools.items()
        ]
        return tools

    def _tool(self, verb: str, packages: set[tuple[str, str]]) -> Entity:
        return self._thing(
            f"#tool/{verb}",
            "SoftwareApplication",
            name=f"layerproof {verb}",
            softwareVersion=self.listed["packages"]["layerproof"],
            softwareRequirements=[
                self._thing(f"#package/{name}/{version}", "SoftwareApplication", name=name, softwareVersion=version)
                for name, version in sorted(packages)
            ],
        )

    def _add_action(self, execution: _Execution, tool: Entity) -> Entity:
        """What a job read and wrote, when, by whom, where, and with which command."""
        run, identifier = execution.run, f"#job/{execution.name}"
        properties: dict[str, Any] = {
            "name": execution.name,
            "description": run["command"],
            "startTime": _iso(execution.started),
            "endTime": _iso(execution.ended),
            "agent": self._user(run["user"]),
            "location": self._host(run["host"], run["machine"]),
            "resourceUsage": self._thing(
                f"{identifier}/memory",
                "PropertyValue",
                name="peak memory",
                propertyID="peak_rss_bytes",
                value=str(run["peak_rss_bytes"]),
                unitCode="https://qudt.org/vocab/unit/BYTE",
            ),
            "actionStatus": FAILED if execution.error else COMPLETED,
        }
        if execution.error:
            properties["error"] = execution.error
        if execution.image:
            properties["containerImage"] = self._image(execution.image)
        read = [self._file(path, digest) for path, digest in execution.inputs.items()]
        written = [self._file(path, digest) for path, digest in execution.outputs.items()]
        return self.crate.add_action(tool, identifier, _one_or_all(read), _one_or_all(written), properties)

    def _add_run(self, workflow: Entity) -> Entity:
        """The run as a whole: from config and inputs to report and verdict."""
        outputs = [name for name in OUTPUTS if name in self.files]
        workflow["input"] = self._parameter("config.yaml")
        workflow["output"] = [self._parameter(name) for name in outputs]
        inputs = [file for name, file in sorted(self.files.items()) if name.startswith("inputs/")]
        properties = {
            "name": "The run",
            "description": f"{len(self.records)} jobs, which one or several calls of Snakemake started",
            "startTime": _iso(min(execution.started for execution in self.executions)),
            "endTime": _iso(max(execution.ended for execution in self.executions)),
            "agent": self._users(),
            "actionStatus": COMPLETED,
        }
        read = [self.files["config.yaml"], *inputs, self._checkpoint()]
        return self.crate.add_action(workflow, "#run", read, [self.files[name] for name in outputs], properties)

    def _parameter(self, name: str) -> Entity:
        """The parameter of the workflow whose value in this run is a file of the archive."""
        stem, value = PurePosixPath(name).stem, self.files[name]
        parameter = self.crate.add_formal_parameter(
            stem, "File", f"#parameter/{stem}", properties={"workExample": value}
        )
        value["exampleOfWork"] = parameter
        return parameter

    def _checkpoint(self) -> Entity:
        return self._thing(
            "#checkpoint",
            "CreativeWork",
            name=self.listed["config"]["model"]["checkpoint"],
            description="The weights are not in the archive. results/manifest.json has the digest of each stage's weights"
            " (checkpoint); sha256 is the digest of these",
            sha256=digest_of(self.listed["checkpoint"]),
        )

    def _file(self, path: str, digest: str) -> Entity:
        """A file of the archive by the path that the run knew it by, or a mention of one that is not in the archive."""
        if path in self.by_path:
            return self.files[self.by_path[path]]
        identifier = f"#absent/{quote(path.lstrip('/'))}"
        return self._thing(identifier, "CreativeWork", name=path, description="Not in the archive", sha256=digest)

    def _users(self) -> Entity | list[Entity]:
        return _one_or_all([self._user(name) for name in sorted({one.run["user"] for one in self.executions})])

    def _user(self, name: str) -> Entity:
        return self._thing(f"#user/{quote(name)}", "Person", name=name)

    def _host(self, name: str, machine: str) -> Entity:
        """The machine of a job, with the hardware that a preflight found there."""
        identifier = f"#host/{quote(name)}"
        found = [
            self._thing(f"{identifier}/{quote(key)}", "PropertyValue", name=key, value=value)
            for key, value in self._hardware.get(name, {}).items()
        ]
        more = {"additionalProperty": found} if found else {}
        return self._thing(identifier, "Place", name=name, description=machine, **more)

    @functools.cached_property
    def _hardware(self) -> dict[str, dict[str, str]]:
        """By host, what preflights found of its hardware."""
        hosts = {}
        for execution in self.executions:
            name = f"results/{execution.name.removesuffix('/made')}.json"
            if name.startswith("results/preflight/") and "made" not in execution.run and name in self.members:
                hosts[execution.run["host"]] = read_json(Path(self.members[name].path))["hardware"]
        return hosts

    def _image(self, digest: str) -> Entity:
        """A container's image: a file, or one that was pulled by its digest."""
        pulled = [name for name in self.listed["config"]["containers"].values() if "://" in name and digest in name]
        kind, registry = ("DockerImage", pulled[0].split("/")[2]) if pulled else ("SIFImage", "none: a file")
        return self._thing(
            f"#image/{digest}",
            "ContainerImage",
            name=pulled[0] if pulled else digest,
            additionalType={"@id": NAMESPACE + kind},
            registry=registry,
            sha256=digest.removeprefix("sha256:"),
        )

    def _thing(self, identifier: str, kind: str, **properties: Any) -> Entity:
        """The entity of this identifier, added when it is first asked for."""
        known = self.crate.get(identifier)
        return known or self.crate.add(ContextEntity(self.crate, identifier, {"@type": kind, **properties}))


def _about(name: str, path: str) -> dict[str, Any]:
    description = {"description": DESCRIPTIONS[name]} if name in DESCRIPTIONS else {}
    return {"name": path, "encodingFormat": FORMATS.get(PurePosixPath(name).suffix, "text/plain"), **description}


def _one_or_all(entities: list[Entity]) -> Entity | list[Entity]:
    """The entity of a list of one, as RO-Crate asks for, otherwise the list."""
    return entities[0] if len(entities) == 1 else entities


def _iso(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds")
