# SPDX-License-Identifier: Apache-2.0
"""Read the facts that a user states about a machine: a JSON object whose fields replace those of ``Machine``.

``read`` returns equal texts for equal facts, so that caches and ranks compare facts and not the paths of files.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from pathlib import Path
from typing import Any

from overlap_inductor.facts.machine import Machine

FIELDS = tuple(f.name for f in dataclasses.fields(Machine) if f.name != "name")
"""The fields that a user's JSON object may have. ``name`` is not among them, because schedule ``wave_groups``
finds its measured constants by the machine's name."""
_ITEMSIZES = ("1", "2", "4", "8")
_FLOPS = 'an object of FLOP/s by bytes of an element ("1", "2", "4" or "8"), for example {"4": 5e10}'
_ALLOWED = {
    "matmul_flops": _FLOPS,
    "least_tiles": "a whole number of at least 1",
    "overlapped_efficiency": "a number above 0 and at most 1",
}


def read(source: str) -> str:
    """The facts in ``source`` as a JSON text with sorted fields.

    Args:
        source: the path of a file, or the text of a JSON object, which begins with ``{``.

    Raises:
        ValueError: the file cannot be read, the text is not a JSON object, or a field is unknown or has a wrong value.
            The message is a sentence without its subject, which is ``source``.
    """
    expected = f"expected a JSON object of machine facts, with fields from: {', '.join(FIELDS)}"
    text = source
    if not source.lstrip().startswith("{"):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"cannot be read ({reason}); expected a file that holds a JSON object") from None
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error}); {expected}") from None
    if not isinstance(facts, dict):
        raise ValueError(f"holds no JSON object; {expected}")
    return json.dumps({name: _value(name, facts[name]) for name in sorted(facts)})


def told(machine: Machine, text: str | None) -> Machine:
    """A copy of ``machine`` with the facts in ``text``, a result of ``read`` or ``None``. Rates of
    ``matmul_flops`` that ``text`` does not name are kept."""
    if text is None:
        return machine
    facts: dict[str, Any] = json.loads(text)
    if "matmul_flops" in facts:
        facts["matmul_flops"] = machine.matmul_flops | {int(size): rate for size, rate in facts["matmul_flops"].items()}
    return dataclasses.replace(machine, **facts)


def _value(name: str, value: Any) -> Any:
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, n=1)
        meant = f". Did you mean {near[0]}?" if near else "."
        raise ValueError(f"has the field {name!r}, which is not known{meant} The fields are {', '.join(FIELDS)}")
    if name == "matmul_flops" and isinstance(value, dict) and value and set(value) <= set(_ITEMSIZES):
        return {size: _number(value[size], f"{name}[{size!r}]") for size in sorted(value)}
    if name == "matmul_flops" or name == "least_tiles" and type(value) is not int:
        raise _wrong(name, value)
    number = _number(value, name)
    if name == "overlapped_efficiency" and number > 1:
        raise _wrong(name, value)
    return value if name == "least_tiles" else number


def _number(value: Any, name: str) -> float:
    """``value`` as a float. Raises ``ValueError`` if ``value`` is not a finite number above 0 (``json.loads`` also
    reads ``NaN`` and ``Infinity``)."""
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise _wrong(name, value)
    return number


def _wrong(name: str, value: Any) -> ValueError:
    allowed = _ALLOWED.get(name, "a number above 0")
    return ValueError(f"has {name} = {json.dumps(value)}, which is not allowed; expected {allowed}")
