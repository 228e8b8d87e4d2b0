"""Devices with their memory, peaks, links and dated prices: a built-in table, and the user's own over it."""

import dataclasses
import difflib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

BUILT_IN = Path(__file__).with_name("hardware.yaml")
DATE = re.compile(r"20\d\d-(0[1-9]|1[0-2])(-(0[1-9]|[12]\d|3[01]))?")


class HardwareError(ValueError):
    """A table, a device or a price that cannot be used; the message names value, place and remedy."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device; hardware.yaml says what each field means.

    Prices are dollars a device-hour, None where none is known; sources and dates (YYYY-MM or YYYY-MM-DD) go
    with them. Bandwidths are GB/s, None where not known.
    """

    name: str
    memory_gb: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gb_s: float | None = None
    link_gb_s: float | None = None
    network_gb_s: float | None = None
    utilization: float = 0.35
    price: float | None = None
    source: str | None = None
    as_of: str | None = None
    spot_price: float | None = None
    spot_source: str | None = None
    spot_as_of: str | None = None

    def rate(self, spot: bool = False) -> float:
        """Dollars a device-hour. Raises HardwareError, saying how to give one, where none is known."""
        price = self.spot_price if spot else self.price
        if price is None:
            prefix, kind = ("spot_", "spot price") if spot else ("", "price")
            fields = f"{prefix}price: DOLLARS, {prefix}source: WHOSE, {prefix}as_of: YYYY-MM"
            raise HardwareError(
                f"no {kind} of '{self.name}' is known: write '{self.name}: {{{fields}}}' to a YAML file and set "
                "hardware.table to it"
            )
        return price

    def priced(self, spot: bool = False) -> str:
        """The price with source and date: `$0.35/h (source, 2026-01)`."""
        source, as_of = (self.spot_source, self.spot_as_of) if spot else (self.source, self.as_of)
        return f"${self.rate(spot):g}/h{' spot' if spot else ''} ({source}, {as_of})"

    def dollars(self, seconds: float, devices: int = 1, spot: bool = False) -> float:
        """What `devices` of this kind cost, held for `seconds`. Raises HardwareError without a price."""
        return seconds * devices * self.rate(spot) / 3600

    def peak(self, precision: str) -> float:
        """Dense FLOP/s in `bf16` or `fp32`."""
        if precision not in ("bf16", "fp32"):
            raise HardwareError(f"precision is '{precision}': peaks are known for bf16 and fp32")
        return 1e12 * (self.bf16_tflops if precision == "bf16" else self.fp32_tflops)


REQUIRED = ("memory_gb", "bf16_tflops", "fp32_tflops")
POSITIVE = (*REQUIRED, "memory_gb_s", "link_gb_s", "network_gb_s", "utilization")
PRICES = ("price", "spot_price")
FIELDS = tuple(field.name for field in dataclasses.fields(Device) if field.name != "name")


def load(table: str | Path | None = None) -> dict[str, Device]:
    """The built-in devices, with the entries of the YAML file `table` laid over them field by field.

    Whoever gives a price gives its source and date with it. Raises HardwareError naming file, entry and field.
    """
    entries = _read(BUILT_IN)
    for name, changes in _read(Path(table)).items() if table else ():
        for price in PRICES:
            stem = price.removesuffix("price")
            if changes.get(price) is not None and not {f"{stem}source", f"{stem}as_of"} <= changes.keys():
                raise HardwareError(
                    f"{table}: {name}: a {price} needs its source and its date: add {stem}source and {stem}as_of"
                )
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


def identify(card: str, memory_gb: float | None = None, devices: dict[str, Device] | None = None) -> str | None:
    """The table's name of what a driver calls `card` (`NVIDIA A100-SXM4-40GB`), or None.

    Among entries of one model (`a100`, `a100-40`) the one with the nearest memory; none whose memory is off by
    more than a fifth.
    """
    devices = load() if devices is None else devices
    fitting = [device for device in devices.values() if _plain(device.name.partition("-")[0]) in _plain(card)]
    if memory_gb is not None:
        fitting = [device for device in fitting if abs(device.memory_gb / memory_gb - 1) < 0.2]
        fitting.sort(key=lambda device: abs(device.memory_gb - memory_gb))
    return fitting[0].name if fitting else None


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
    entry = {field: value for field, value in entry.items() if value is not None}
    missing = [field for field in REQUIRED if field not in entry]
    if missing:
        raise HardwareError(
            f"{table}: {name}: {', '.join(missing)} missing: a new device gives {', '.join(REQUIRED)}"
        )
    for field in (*POSITIVE, *PRICES):
        if field not in entry:
            continue
        value = entry[field]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and field not in PRICES):
            kind = "a number of dollars, 0 or more" if field in PRICES else "a number above 0"
            raise HardwareError(f"{table}: {name}: {field} is {value!r}: it must be {kind}")
        entry[field] = float(value)
    if entry.get("utilization", 0) > 1:
        raise HardwareError(f"{table}: {name}: utilization is {entry['utilization']}: it must be 1 or less")
    for field in ("as_of", "spot_as_of"):
        if field in entry and not DATE.fullmatch(str(entry[field])):
            raise HardwareError(f"{table}: {name}: {field} is {entry[field]!r}: it must be YYYY-MM or YYYY-MM-DD")
    for price in PRICES:
        for field in (price.removesuffix("price") + other for other in ("source", "as_of")):
            if price in entry and not str(entry.get(field, "")).strip():
                raise HardwareError(
                    f"{table}: {name}: {price} without {field}: every price has a source and a date"
                )
    texts = {field: str(entry[field]) for field in FIELDS if field.endswith(("source", "as_of")) and field in entry}
    return Device(name=name, **entry | texts)
