# SPDX-License-Identifier: Apache-2.0
"""Every exception that the package raises on purpose. Each message says what was wrong, what was expected and what to
do."""

from __future__ import annotations


class OverlapError(RuntimeError):
    """Base of all errors raised by overlap_inductor."""


class ConfigError(OverlapError, ValueError):
    """A switch has a value that is not allowed; the message names the variable, the value and what is allowed.

    Attributes:
        field: the field of ``OverlapConfig`` whose value is not allowed; empty if the error is about something else.
        problem: what is wrong with the value and what is allowed, as the end of a sentence.
    """

    field: str = ""
    problem: str = ""


class StrictError(OverlapError):
    """In ``strict`` mode, a site that could have been overlapped was refused, or its rewrite failed."""


class AgreementError(OverlapError):
    """The ranks of a group do not run the same overlap plan. Raised before any overlap op moves data."""


class TransferError(OverlapError):
    """A point-to-point transfer failed or timed out (a peer died, or left the group)."""


class UnsupportedError(OverlapError):
    """A combination that overlap_inductor does not support (export, cpp_wrapper, an unknown torch version, ...)."""
