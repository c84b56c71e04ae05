# SPDX-License-Identifier: Apache-2.0
"""Registers the transports. To add one, write a file and add a line here, or call ``register`` from another package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from typing import TypeVar
from typing import cast

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.facts import names
from overlap_inductor.transports.copy_engine import CopyEngine
from overlap_inductor.transports.nccl import Nccl
from overlap_inductor.transports.p2p import P2P
from overlap_inductor.transports.sm_push import SmPush
from overlap_inductor.transports.transport import Exchanges
from overlap_inductor.transports.transport import PeerCopies
from overlap_inductor.transports.transport import PeerReads
from overlap_inductor.transports.transport import Transport
from overlap_inductor.transports.transport import WholeCollectives

PROTOCOLS = (PeerCopies, Exchanges, WholeCollectives, PeerReads)
_BY_PROTOCOL: dict[Any, dict[str, Transport]] = {protocol: {} for protocol in PROTOCOLS}
"""The transports by protocol and name. ``isinstance`` takes 0.1 ms, too long for each call of an op."""

T = TypeVar("T")


def register(transport: Transport) -> None:
    """Offer ``transport`` to every schedule that drives its protocol. Loading the transport's module must not import
    Triton.

    Raises:
        TypeError: ``transport`` implements none of the protocols.
        ValueError: its name is taken, reserved or not an identifier.
    """
    implemented = [protocol for protocol in PROTOCOLS if isinstance(transport, protocol)]
    if not implemented:
        protocols = " or ".join(p.__name__ for p in PROTOCOLS)
        raise TypeError(f"{transport!r} is not a transport: it must have all members of {protocols}")
    names.TRANSPORTS.add(transport.name)
    for protocol in implemented:
        _BY_PROTOCOL[protocol][transport.name] = transport


def unregister(transport: Transport) -> None:
    """Undo ``register``. Raises ``ValueError`` if the transport is not registered."""
    names.TRANSPORTS.remove(transport.name)
    for found in _BY_PROTOCOL.values():
        found.pop(transport.name, None)


def transports() -> tuple[Transport, ...]:
    """All transports, in the order of their registration."""
    known = {name: transport for found in _BY_PROTOCOL.values() for name, transport in found.items()}
    return tuple(known[name] for name in names.TRANSPORTS.known())


def of_kind(protocol: Callable[..., T]) -> list[T]:
    """The transports that implement ``protocol``, in the order of their registration."""
    return [cast(T, t) for t in _BY_PROTOCOL[protocol].values()]


def transport_named(protocol: Callable[..., T], name: str = "") -> T:
    """The transport ``name`` of ``protocol``; without a name, the first one registered.

    Raises:
        UnsupportedError: no transport of the protocol has this name in this process.
    """
    found = _BY_PROTOCOL[protocol]
    transport = found.get(name) if name else next(iter(found.values()), None)
    if transport is None:
        known = ", ".join(found)
        raise UnsupportedError(f"transport {name!r} is not registered in this process; expected one of: {known}")
    return cast(T, transport)


def names_of(protocol: Callable[..., Transport]) -> tuple[str, ...]:
    return tuple(t.name for t in of_kind(protocol))


register(P2P())
register(CopyEngine())
register(SmPush())
register(Nccl())
