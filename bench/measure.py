# SPDX-License-Identifier: Apache-2.0
"""Measures one case. Before and after the timing, each provider's result on random data is compared with
``Site.expected``."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import torch

from bench.providers import Provider
from bench.providers import Variant
from bench.providers import chosen
from bench.providers import providers
from bench.rows import rows_of
from bench.shapes import Case
from bench.site import TOLERANCE
from bench.site import Site
from bench.timing import Clock
from bench.timing import in_turn
from bench.timing import worst


class WrongResult(Exception):
    """A provider's result differs from the expected result by more than is allowed."""


def measure(
    case: Case,
    names: Sequence[str],
    variants: Sequence[Variant],
    settings: Sequence[str],
    clock: Clock,
    repeats: int,
    seconds: float,
    where: Mapping[str, Any],
) -> Iterator[list[dict[str, Any]]]:
    """Yields one list of result rows for each of ``settings``. A setting is ``hidden`` or ``compiled``
    (``bench.providers``). All ranks call this together.

    Raises:
        WrongResult: a provider's result is wrong. All ranks raise it, and it names the provider.
    """
    site = Site(case, clock.device)
    expected, names = site.expected(), chosen(names, variants, case, clock.device)
    made: dict[str, Provider] = {}
    found = {setting: providers(site, names, variants, setting, made) for setting in settings}
    # Load every kernel before the timing. A load waits until all running kernels have ended, even those that wait for a
    # peer. So ranks that load during the timing could wait for each other forever.
    for setting in settings:
        for provider in found[setting]:
            provider.call()
    checks = {setting: {p.name: _checked(p, site, expected, clock) for p in found[setting]} for setting in settings}
    for setting in settings:
        calls = {p.name: p.call for p in found[setting]} | {"matmul": site.matmul, "collective": site.collective}
        times = in_turn(clock, calls, setting == "hidden", repeats, seconds)
        # Some errors appear only when calls follow each other.
        after = {p.name: _checked(p, site, expected, clock) for p in found[setting]}
        errors = {name: max(error, after[name][0]) for name, (error, _) in checks[setting].items()}
        yield rows_of(
            case, setting, found[setting], times, errors, {name: extra for name, (_, extra) in after.items()}, where
        )


def _checked(provider: Provider, site: Site, expected: torch.Tensor, clock: Clock) -> tuple[float, float | None]:
    """Make one more call. Returns ``(error, extra bytes)``, each the maximum over ranks. ``Clock.with_extra_bytes``
    measures the extra bytes. On a CPU, they are ``None``.

    Raises:
        WrongResult: the error is larger than allowed.
    """
    result, extra = clock.with_extra_bytes(provider.call)
    error, most = worst([site.error(result, expected), -1.0 if extra is None else extra])
    if error > TOLERANCE[site.case.result]:
        raise WrongResult(
            f"{provider.name} is wrong for {site.case}: off by {error:.3g} of the largest element; allowed is"
            f" {TOLERANCE[site.case.result]:g}"
        )
    return error, None if extra is None else most
