"""Sources of a configuration: a YAML or JSON file, inline JSON, or a mapping."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

_LARGEST_FILE = 1 << 20


class ConfigError(ValueError):
    """Error in a configuration; the message says where, what was found and what is expected."""


def read(source: str | Path | Mapping[str, object] | None) -> tuple[str, object]:
    """Reads a configuration, without validating it.

    Returns:
        The name of the source for messages, and its content.

    Raises:
        ConfigError: the source cannot be read.
    """
    if source is None:
        return "defaults", {}
    if isinstance(source, Mapping):
        return "ext_config", dict(source)
    if not isinstance(source, str | Path) or not str(source).strip():
        raise ConfigError(f"expected a file, inline JSON or a mapping, found {source!r}")
    text = str(source).strip().removeprefix("\ufeff")
    # On hostile input, parsers raise various errors, from ValueError to RecursionError.
    if text.startswith(("{", "[")):
        try:
            return "inline configuration", json.loads(text, object_pairs_hook=_without_duplicates)
        except ConfigError:
            raise
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"inline configuration is not JSON: {_one_line(error)}; correct it, or give the "
                "path of a file"
            ) from None
    try:
        path = Path(text).expanduser()
        if path.exists() and not path.is_file():
            raise OSError(0, "it is not a regular file")
        if path.exists() and path.stat().st_size > _LARGEST_FILE:
            raise OSError(0, f"it has more than {_LARGEST_FILE} bytes")
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else _one_line(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "it is not UTF-8 text"
        raise ConfigError(
            f"cannot read the configuration file {text}: {reason}; give the path of a YAML or JSON "
            "file, or inline JSON in braces"
        ) from None
    try:
        data = yaml.load(content, _StrictLoader)  # noqa: S506  (a SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is neither YAML nor JSON: {_one_line(error)}; correct the file"
        ) from None
    return str(path), {} if data is None else data


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigError(
            f"inline configuration has the keys {sorted(twice)} more than once; keep one of each"
        )
    return dict(pairs)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a duplicate key instead of keeping its last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
