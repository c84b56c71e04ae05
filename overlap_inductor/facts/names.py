# SPDX-License-Identifier: Apache-2.0
"""``SCHEDULES``, ``TRANSPORTS`` and ``PATTERNS`` hold the names that switches accept, besides ``auto`` and ``keep``.

The configuration checks switches against these names. The registries import the configuration, so the configuration
cannot import the registries when it is loaded. Instead, each registry adds its names here.
"""

from __future__ import annotations

from importlib import import_module


class Names:
    """The names of one kind of thing, in the order of their addition.

    Args:
        kind: the kind of thing, for error texts, for example ``"schedule"``.
        registry: the module that adds the package's own names when it is imported.
    """

    def __init__(self, kind: str, registry: str) -> None:
        self._kind, self._registry = kind, registry
        self._names: list[str] = []

    def add(self, *names: str) -> None:
        """Add ``names``. Raises ``ValueError`` if a name is taken, reserved (``auto``, ``keep``) or not an
        identifier."""
        for name in names:
            if not name.isidentifier() or name in ("auto", "keep") or name in self._names:
                raise ValueError(
                    f"{name!r} cannot be the name of a {self._kind}: it is taken, or not an identifier; choose another"
                    " name"
                )
            self._names.append(name)

    def remove(self, name: str) -> None:
        """Remove ``name``. Raises ``ValueError`` if it is not among the names."""
        self._names.remove(name)

    def known(self) -> tuple[str, ...]:
        """All names. First imports the registry, which adds the package's own names."""
        import_module(self._registry)
        return tuple(self._names)


SCHEDULES = Names("schedule", "overlap_inductor.lowerings.registry")
TRANSPORTS = Names("transport", "overlap_inductor.transports.registry")
PATTERNS = Names("pattern", "overlap_inductor.passes.patterns")
