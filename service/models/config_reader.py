"""Typed access to config.json, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A key of config.json is missing, has a bad value, or asks for something that is not supported."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"config.json: {key}: {problem}")
        self.key = key
        self.problem = problem


class ConfigReader:
    """Typed access to the keys of config.json; a key that is absent or null takes the family's default."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = defaults

    def raw(self, key: str) -> Any:
        """The value as it stands, the default where it is absent, None where there is neither."""
        value = self._values.get(key)
        return self._defaults.get(key) if value is None else value

    def has(self, key: str) -> bool:
        """Whether config.json itself holds the key, be it null."""
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Whether config.json holds the key with null, which switches some options off."""
        return key in self._values and self._values[key] is None

    def size(self, key: str) -> int:
        """A required whole number of 1 or more."""
        value = self.optional_size(key)
        if value is None:
            raise ConfigError(key, "is missing")
        return value

    def optional_size(self, key: str) -> int | None:
        """A whole number of 1 or more, or None."""
        value = self.raw(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(key, f"must be a whole number of 1 or more, not {value!r}")
        return value

    def number(self, key: str) -> float:
        """A required number above 0."""
        value = self.raw(key)
        if value is None:
            raise ConfigError(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(key, f"must be a number above 0, not {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false where absent."""
        value = self.raw(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ConfigError(key, f"must be true or false, not {value!r}")
        return value

    def per_layer(self, key: str, layers: int) -> list[Any] | None:
        """A list with one item for each layer, or None."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < layers:
            raise ConfigError(key, f"must be a list with an item for each of the {layers} layers")
        return value[:layers]
