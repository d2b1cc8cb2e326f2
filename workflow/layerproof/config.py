"""config.yaml, checked against its schema and against what is there, before any job runs."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jsonschema.validators
import yaml

from layerproof.errors import UserError
from layerproof.files import canonical_json

SCHEMA = Path(__file__).resolve().parents[1] / "schemas" / "config.schema.yaml"


def read(path: Path) -> dict[str, Any]:
    """What a config file says, as YAML does.

    Raises:
        UserError: if it cannot be read, has no keys, or one is twice in a section: YAML would take the last without a word.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node, content = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Name a text file that is there.") from None
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f"line {mark.line + 1}: " if mark else ""
        reason = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise UserError(f"{path}: {where}is not YAML ({reason}). Correct that line or the one before it.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: has no keys. Begin with the config.yaml that is shipped.")
    _check_keys_once(path, node)
    return content


def _check_keys_once(path: Path, node: yaml.Node | None) -> None:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if key.value in keys:
                    line = key.start_mark.line + 1
                    raise UserError(f"{path}: line {line}: {key.value} is there twice in this section. Remove one.")
                keys.add(key.value)
                waiting.append(value)


def fill_defaults(values: Any, schema: Mapping[str, Any]) -> None:
    if not isinstance(values, dict):
        return
    for key, part in schema.get("properties", {}).items():
        if key not in values and "default" in part:
            values[key] = copy.deepcopy(part["default"])
        if key in values:
            fill_defaults(values[key], part)


def name_gpus(values: dict[str, Any]) -> None:
    """Takes the numbers of GPUs in golden.max_memory as accelerate spells them, `0: 70GiB`, which in JSON are text."""
    golden = values.get("golden")
    if isinstance(golden, dict) and isinstance(golden.get("max_memory"), dict):
        golden["max_memory"] = {
            str(name) if type(name) is int else name: most for name, most in golden["max_memory"].items()
        }


def check_schema(values: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    draft = jsonschema.Draft202012Validator
    types = draft.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # it would take 2.0
    validator = jsonschema.validators.extend(draft, type_checker=types)(schema)
    errors = sorted(validator.iter_errors(values), key=lambda error: list(map(str, error.absolute_path)))
    if errors:
        raise UserError(f"config.yaml: {_explain(errors[0])}")


def _explain(error: jsonschema.ValidationError) -> str:
    key = ".".join(map(str, error.absolute_path))
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        known = list(schema["properties"])
        unknown = sorted(str(name) for name in cast("dict", error.instance) if name not in known)[0]
        guess = difflib.get_close_matches(unknown, known, n=1)
        remedy = f'Did you mean "{guess[0]}"?' if guess else f"The keys are {', '.join(known)}."
        return f"{f'{key}.' if key else ''}{unknown}: is no key. {remedy}"
    if error.validator == "required":
        return f"{f'{key}: ' if key else ''}{error.message}. See workflow/schemas/config.schema.yaml."
    wanted = {
        "type": f"must be {_words(schema.get('type'))}",
        "enum": f"must be one of {', '.join('null' if value is None else str(value) for value in schema.get('enum', []))}",
        "minimum": f"must be at least {schema.get('minimum')}",
        "maximum": f"must be at most {schema.get('maximum')}",
        "exclusiveMinimum": f"must be above {schema.get('exclusiveMinimum')}",
        "minLength": "must not be empty",
        "uniqueItems": "must not name the same twice",
        "pattern": "is not of the form that is wanted",
    }.get(str(error.validator), error.message)
    hint = _number_meant(error)
    return f"{key}: {error.instance!r} {wanted}. {hint}{' '.join(str(schema.get('description', '')).split())}"


def _number_meant(error: jsonschema.ValidationError) -> str:
    """What to write where YAML took for text what its writer meant as a number, such as 1e1."""
    if error.validator != "type" or error.validator_value != "number":
        return ""
    try:
        return f"Write {float(cast('str', error.instance))!r}. "
    except (TypeError, ValueError):
        return ""


def _words(types: Any) -> str:
    return " or ".join(types) if isinstance(types, list) else str(types)


def check_plain(value: Any, key: str = "") -> None:
    """Raises UserError at the first value that JSON cannot say: NaN, infinity, a date, a set."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        check_plain(child, f"{key}.{name}" if key else str(name))
    if not isinstance(value, dict | list):
        try:
            canonical_json(value)
        except (TypeError, ValueError):
            raise UserError(
                f"config.yaml: {key}: {value!r} is no value that JSON knows. Write a number, a text or a list."
            ) from None
