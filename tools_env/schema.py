"""Typed Python functions as tool schemas, and arguments checked against a schema.

`tool_schema` reads a function's annotations and its Google-style docstring; what it
cannot express is a ValueError that names the function and the parameter, so that a
user's mistake shows at start-up. `validate_arguments` is exact: nothing is converted,
so "false" is never True and "3.7" never 3; its error text is meant for the model.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?):"
)
_ARGUMENT = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_MAX_SHOWN = 80  # characters of a wrong value that an error repeats


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Give the OpenAI schema of a typed, documented function.

    Parameters may be str, int, float, bool, None, Any, Literal, Enum, list[T],
    dict[str, T] and unions of these; those with a default are optional. Raises
    ValueError for a missing annotation, docstring or argument description, and for
    what a model cannot pass by name (*args, **kwargs, positional-only).
    """
    name = getattr(function, "__name__", None)
    if name is None:
        raise ValueError(f"{function!r} has no name, so it cannot be a tool")
    description, documented = _read_docstring(name, inspect.getdoc(function))
    hints = _hints(name, function)
    parameters = inspect.signature(function).parameters
    if extra := sorted(set(documented) - set(parameters)):
        raise ValueError(f"tool {name}: the docstring describes no such {extra}")
    properties = {
        key: _property(name, parameter, hints, documented)
        for key, parameter in parameters.items()
    }
    required = [k for k, p in parameters.items() if p.default is p.empty]
    body = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": body},
    }


def _hints(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        raise ValueError(f"tool {name}: unresolved annotation: {error}") from error


def _property(
    name: str,
    parameter: inspect.Parameter,
    hints: Mapping[str, Any],
    documented: Mapping[str, str],
) -> dict[str, Any]:
    where = f"tool {name}, parameter {parameter.name!r}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ValueError(f"{where}: {parameter.kind.description} is not supported")
    if parameter.name not in hints:
        raise ValueError(f"{where}: has no type annotation")
    if not documented.get(parameter.name):
        raise ValueError(f"{where}: is not described under 'Args:' in the docstring")
    schema = _type_schema(hints[parameter.name], where)
    schema["description"] = documented[parameter.name]
    if parameter.default is not parameter.empty and parameter.default is not None:
        default = parameter.default
        schema["default"] = default.value if isinstance(default, enum.Enum) else default
        try:
            json.dumps(schema["default"], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: its default is not JSON: {error}") from error
    return schema


def _type_schema(annotation: Any, where: str) -> dict[str, Any]:
    if annotation is Any:
        return {}
    if annotation is None or annotation is type(None):
        return {"type": "null"}
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _enum_schema([member.value for member in annotation], where)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_schema(args[0], where)
    if origin is typing.Literal:
        return _enum_schema(list(args), where)
    if origin in (typing.Union, types.UnionType):
        return _union_schema([_type_schema(arg, where) for arg in args])
    if annotation is list or origin is list:
        items = {"items": _type_schema(args[0], where)} if args else {}
        return {"type": "array", **items}
    if annotation is dict or (origin is dict and args[0] is str):
        values = {"additionalProperties": _type_schema(args[1], where)} if args else {}
        return {"type": "object", **values}
    raise ValueError(f"{where}: the type {annotation!r} has no JSON schema here")


def _enum_schema(values: list[Any], where: str) -> dict[str, Any]:
    kinds = list(dict.fromkeys(_type_name(value) for value in values))
    if not set(kinds) <= {"string", "integer", "number", "boolean", "null"}:
        raise ValueError(f"{where}: enum values must be plain JSON values: {values}")
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _union_schema(options: list[dict[str, Any]]) -> dict[str, Any]:
    """Write `T | None` and unions of scalars as one type list; others as anyOf."""
    rich = [option for option in options if set(option) != {"type"}]
    others = [option for option in options if option != {"type": "null"}]
    if any("type" not in option for option in options) or (rich and len(others) > 1):
        return {"anyOf": options}
    kinds: list[str] = []
    for option in options:
        kind = option["type"]
        kinds += [kind] if isinstance(kind, str) else kind
    merged = {**(rich[0] if rich else {}), "type": list(dict.fromkeys(kinds))}
    if "enum" in merged and None not in merged["enum"] and "null" in merged["type"]:
        merged["enum"] = [*merged["enum"], None]
    return merged


def _read_docstring(name: str, text: str | None) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into its description and argument texts."""
    if not text or not text.strip():
        raise ValueError(f"tool {name}: has no docstring")
    head: list[str] = []
    arguments: dict[str, str] = {}
    section, indent, current = "", None, None
    for line in text.splitlines():
        stripped = line.strip()
        if not line.startswith(" ") and (match := _SECTION.fullmatch(stripped)):
            section, indent, current = match[1], None, None
        elif not section:
            head.append(stripped)
        elif section in ("Args", "Arguments", "Parameters") and stripped:
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            match = _ARGUMENT.fullmatch(stripped) if depth <= indent else None
            if match:
                current = match[1]
                arguments[current] = match[2].strip()
            elif current is not None:
                arguments[current] = f"{arguments[current]} {stripped}".strip()
    description = re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(head).strip())
    if not description:
        raise ValueError(f"tool {name}: its docstring does not say what it does")
    return description, arguments


def validate_arguments(
    schema: Mapping[str, Any], arguments: Any
) -> tuple[dict[str, Any] | None, str | None]:
    """Check a call's arguments; give (arguments, None) or (None, error text).

    `schema` is a tool's whole schema or its "parameters" object. Values are never
    converted. An integer fits "number"; a boolean fits neither number nor integer.
    """
    function = schema.get("function", schema)
    parameters = function.get("parameters", function)
    problems = _object_problems(parameters, arguments, "")
    if not problems:
        return arguments, None
    return None, "; ".join(problems[:8])


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Make arguments that fit a tool's schema: the required ones, smallest values."""
    function = schema.get("function", schema)
    return _example({**function.get("parameters", function), "type": "object"})


def _example(schema: Mapping[str, Any]) -> Any:
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _example(options[0])
    if "enum" in schema:
        return schema["enum"][0]
    kinds = schema.get("type", "null")
    match kinds if isinstance(kinds, str) else kinds[0]:
        case "string":
            return "0"
        case "integer" | "number":
            return schema.get("minimum", min(0, schema.get("maximum", 0)))
        case "boolean":
            return False
        case "array":
            return []
        case "object":
            properties = schema.get("properties", {})
            required = schema.get("required", [])
            return {key: _example(properties.get(key, {})) for key in required}
    return None


def _object_problems(schema: Mapping[str, Any], value: Any, path: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{_label(path)} must be an object, not {_shown(value)}"]
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties", bool(not properties and path))
    problems = []
    for key in schema.get("required", []):
        if key not in value:
            kind = _kind(properties.get(key, {}))
            problems.append(f"missing argument {_join(path, key)!r} ({kind})")
    for key, item in value.items():
        where = _join(path, key)
        if key in properties:
            problems += _problems(properties[key], item, where)
        elif isinstance(extra, Mapping):
            problems += _problems(extra, item, where)
        elif not extra:
            known = ", ".join(properties) or "none"
            problems.append(f"unknown argument {_cut(where)!r}; known: {known}")
    return problems


def _problems(schema: Mapping[str, Any], value: Any, path: str) -> list[str]:
    if "anyOf" in schema or "oneOf" in schema:
        options = schema.get("anyOf") or schema["oneOf"]
        if any(not _problems(option, value, path) for option in options):
            return []
        return [f"{_label(path)} must be {_kind(schema)}, not {_shown(value)}"]
    if not _has_type(schema, value):
        return [f"{_label(path)} must be {_kind(schema)}, not {_shown(value)}"]
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        options = ", ".join(_json(option) for option in schema["enum"])
        return [f"{_label(path)} must be one of {options}, not {_shown(value)}"]
    if isinstance(value, dict):
        return _object_problems(schema, value, path)
    if isinstance(value, list) and "items" in schema:
        return [
            problem
            for index, item in enumerate(value)
            for problem in _problems(schema["items"], item, f"{path}[{index}]")
        ]
    return _range_problems(schema, value, path)


def _range_problems(schema: Mapping[str, Any], value: Any, path: str) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    problems = []
    if "minimum" in schema and value < schema["minimum"]:
        problems.append(f"{_label(path)} must be at least {schema['minimum']}")
    if "maximum" in schema and value > schema["maximum"]:
        problems.append(f"{_label(path)} must be at most {schema['maximum']}")
    return problems


def _has_type(schema: Mapping[str, Any], value: Any) -> bool:
    kinds = schema.get("type")
    if kinds is None or (value is None and schema.get("nullable")):
        return True
    kinds = [kinds] if isinstance(kinds, str) else kinds
    name = _type_name(value)
    return name in kinds or (name == "integer" and "number" in kinds)


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {**_SCALARS, list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def _same(value: Any, option: Any) -> bool:
    return type(value) is type(option) and value == option


def _kind(schema: Mapping[str, Any]) -> str:
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_kind(option) for option in options)
    kinds = schema.get("type", "any value")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _label(path: str) -> str:
    return f"argument {_cut(path)!r}" if path else "arguments"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shown(value: Any) -> str:
    return f"{_type_name(value)} {_cut(_json(value))}"


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # too deep or too long to show
        return "..."


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
