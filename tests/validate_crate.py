"""Checks an RO-Crate against all that a profile requires, and prints what is violated: exit code 0 if nothing is.

    python validate_crate.py CRATE.zip PROFILE

It runs in the environment of requirements/crate.txt and needs no network: rocrate brings the JSON-LD context of RO-Crate.
"""

import sys
import tempfile
from pathlib import Path

import requests
import rocrate
from requests_cache import CachedRequest, CachedResponse, CachedSession
from rocrate_validator import models, services

CONTEXT = "https://w3id.org/ro/crate/1.1/context"


def keep_context(cache: Path) -> None:
    """Writes the context into the cache of what the validator has downloaded."""
    content = (Path(rocrate.__file__).parent / "data/ro-crate.jsonld").read_bytes()
    with CachedSession(str(cache), backend="sqlite") as session:
        request = CachedRequest.from_request(session.prepare_request(requests.Request("GET", CONTEXT)))
        answer = {"url": CONTEXT, "status_code": 200, "headers": {"Content-Type": "application/ld+json"}}
        session.cache.save_response(CachedResponse(content=content, request=request, **answer))


def main(crate: str, profile: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "contexts"
        keep_context(cache)
        settings = models.ValidationSettings(crate, profile_identifier=profile, offline=True, cache_path=cache)
        result = services.validate(settings)
    for issue in result.get_issues():
        print(issue.check.identifier, issue.message)
    print(f"{len(result.executed_checks)} checks")
    return 0 if result.passed() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
