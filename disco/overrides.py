"""Settings of an experiment file, given on the command line."""

from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from disco.schema import ConfigError


def apply(raw: dict, words: Iterable[str]) -> None:
    """Put overrides, in any form that `joined` takes, into what a file says. Values are YAML."""
    for override in joined(words):
        _override(raw, override)


def joined(words: Iterable[str]) -> Iterator[str]:
    """Overrides as `key=value`, whether they came with dashes, and in one word or two.

    Raises ConfigError for one without a value.
    """
    rest = iter(words)
    for word in rest:
        key = word.removeprefix("--")
        if key == word or "=" in word:
            yield key
            continue
        value = next(rest, "--")
        if value.startswith("--"):
            raise ConfigError(f"override '{word}' has no value, and is no option either: give it as {word}=value")
        yield f"{key}={value}"


def _override(raw: dict, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{text}' is not of the form section.key=value, and no option either")
    *parents, last = key.split(".")
    here: Any = raw
    for step, parent in enumerate(parents):
        if isinstance(here, list):
            here = _item(here, parent, key)
            continue
        if here.get(parent) is None:
            here[parent] = {}
        here = here[parent]
        if not isinstance(here, (dict, list)):
            raise ConfigError(f"override '{text}': {'.'.join(parents[: step + 1])} is a value, not a section")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override '{text}': the value is not YAML: {error}") from None
    if isinstance(here, list):
        _item(here, last, key)
        here[int(last)] = parsed
    else:
        here[last] = parsed


def _item(items: list, index: str, key: str):
    if not index.isdigit() or int(index) >= len(items):
        raise ConfigError(f"override '{key}': '{index}' is not a position in a list of {len(items)}")
    return items[int(index)]
