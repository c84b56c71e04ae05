"""Every exception that the package raises on purpose, each saying what was wrong, what was expected, what to do."""

from __future__ import annotations


class OverlapError(RuntimeError):
    """Base of all errors raised by overlap_inductor."""


class ConfigError(OverlapError, ValueError):
    """A switch has a value that is not allowed; the message names the variable, the value and what is allowed."""


class StrictError(OverlapError):
    """``strict`` mode: a site that could have been overlapped was refused or failed."""


class AgreementError(OverlapError):
    """The ranks of a group do not run the same overlap plan; raised before any overlap op moves data."""


class TransferError(OverlapError):
    """A point-to-point transfer failed or timed out (a peer died, or left the group)."""


class UnsupportedError(OverlapError):
    """A combination that overlap_inductor does not support (export, cpp_wrapper, an unknown torch version, ...)."""
