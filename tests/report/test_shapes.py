"""The shapes of JSON files: what the code writes has these keys, and docs/contracts.md names each."""

import inspect
import re
from typing import is_typeddict

import pytest
from pydantic import TypeAdapter, ValidationError

import reports
from configs import REPOSITORY
from layerproof import shapes

ALL = [shape for _, shape in inspect.getmembers(shapes, is_typeddict)]
CONTRACTS = (REPOSITORY / "docs/contracts.md").read_text(encoding="utf-8")


@pytest.fixture
def strict(monkeypatch):
    """Has no key that the shape does not name."""
    for shape in ALL:
        monkeypatch.setattr(shape, "__pydantic_config__", {"extra": "forbid", "strict": True}, raising=False)


@pytest.mark.parametrize("run", [reports.good, reports.bad])
def test_verdicts_have_their_shape(run, strict):
    verdicts = reports.collect(*run())
    assert verdicts["schema_version"] == 3
    TypeAdapter(shapes.Verdicts).validate_python(verdicts)
    verdicts["stages"]["embed"]["more"] = 1
    with pytest.raises(ValidationError):
        TypeAdapter(shapes.Verdicts).validate_python(verdicts)


@pytest.mark.parametrize("shape", ALL, ids=lambda shape: shape.__name__)
def test_the_contract_names_every_key(shape):
    names = set(re.findall(r"[A-Za-z_]+", CONTRACTS))
    assert set(shape.__annotations__) <= names, set(shape.__annotations__) - names
