"""Devices with their memory, peaks and dated prices: a built-in table, and the user's own over it."""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BUILT_IN = Path(__file__).with_name("hardware.yaml")


class HardwareError(ValueError):
    """A table or a device name that cannot be used; the message names value, place and remedy."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device. Peaks are dense TFLOP/s; `price` is dollars a device-hour, as `source` had it `as_of`
    (YYYY-MM or YYYY-MM-DD)."""

    name: str
    memory_gb: float
    bf16_tflops: float
    fp32_tflops: float
    price: float
    source: str
    as_of: str

    def dollars(self, seconds: float, devices: int = 1) -> float:
        """What `devices` of this kind cost, held for `seconds`."""
        return seconds * devices * self.price / 3600


NUMBERS = ("memory_gb", "bf16_tflops", "fp32_tflops", "price")
FIELDS = tuple(field.name for field in dataclasses.fields(Device) if field.name != "name")


def load(table: str | Path | None = None) -> dict[str, Device]:
    """The built-in devices, with the entries of the YAML file `table` laid over them field by field.

    Whoever gives a price gives its source and date with it. Raises HardwareError naming file, entry and field.
    """
    entries = _read(BUILT_IN)
    for name, changes in _read(Path(table)).items() if table else ():
        if "price" in changes and not {"source", "as_of"} <= changes.keys():
            raise HardwareError(f"{table}: {name}: a price needs its source and its date: add source and as_of")
        entries[name] = entries.get(name, {}) | changes
    return {name: _device(name, entry, table or BUILT_IN) for name, entry in entries.items()}


def lookup(name: str, devices: dict[str, Device] | None = None, place: str = "device") -> Device:
    """The device called `name`. Raises HardwareError with the nearest name, or with all of them."""
    devices = load() if devices is None else devices
    if name in devices:
        return devices[name]
    plain = {_plain(known): known for known in devices}
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.5)
    hint = f"did you mean '{plain[close[0]]}'?" if close else f"known devices: {', '.join(devices)}"
    raise HardwareError(f"{place} is '{name}', which the hardware table does not have: {hint}")


def _plain(name: str) -> str:
    return "".join(character for character in str(name).lower() if character.isalnum())


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HardwareError(f"{path}: no such hardware table: set hardware.table to a YAML file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise HardwareError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(raw, dict) or not all(isinstance(entry, dict) for entry in raw.values()):
        raise HardwareError(f"{path}: must map device names to fields ({', '.join(FIELDS)})")
    for name, entry in raw.items():
        for key in entry:
            if key not in FIELDS:
                close = difflib.get_close_matches(str(key), FIELDS, n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"fields are {', '.join(FIELDS)}"
                raise HardwareError(f"{path}: {name}: unknown field {key}: {hint}")
    return {str(name): entry for name, entry in raw.items()}


def _device(name: str, entry: dict[str, Any], table: str | Path) -> Device:
    missing = [field for field in FIELDS if entry.get(field) in (None, "")]
    if missing:
        raise HardwareError(f"{table}: {name}: {', '.join(missing)} missing: a new device gives every field")
    for field in NUMBERS:
        value = entry[field]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and field != "price"):
            kind = "a number of dollars, 0 or more" if field == "price" else "a number above 0"
            raise HardwareError(f"{table}: {name}: {field} is {value!r}: it must be {kind}")
    numbers = {field: float(entry[field]) for field in NUMBERS}
    return Device(name=name, **numbers, source=str(entry["source"]), as_of=str(entry["as_of"]))
