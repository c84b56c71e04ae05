# SPDX-License-Identifier: Apache-2.0
"""The exceptions that users of the package may see. A message says what was wrong and, if known, what was expected and
what to do."""

from __future__ import annotations


class OverlapError(RuntimeError):
    """Base class of the package's own errors."""


class ConfigError(OverlapError, ValueError):
    """A switch has a value that is not allowed, or a name is not the name of a switch. The message names the variable
    or option, its value, and what is allowed.

    Attributes:
        field: the field of ``OverlapConfig`` with the value; empty if the error is about something else.
        problem: what is wrong with the value and what is allowed, as the end of a sentence.
    """

    field: str = ""
    problem: str = ""


class StrictError(OverlapError):
    """Overlap that was asked for in mode ``strict`` is not possible: a site was refused or its rewrite failed, the pass
    failed, the ranks' plans differ, or a workspace could not be made.

    Mode ``on`` runs the site or the graph without overlap instead.
    """


class AgreementError(OverlapError):
    """The ranks of a group differ, and they cannot all run the graph without overlap instead.

    For example, their versions differ, a rank died, or some ranks are inside the transfers of an earlier plan. Raised
    before this rank moves data for the call.
    """


class TransferError(OverlapError):
    """A transfer failed, a wait for a peer timed out, or the group was aborted. The group's results are not valid any
    more."""


class UnsupportedError(OverlapError):
    """overlap_inductor does not support what it was asked to do.

    For example, the version of torch is unknown, a kernel cannot take the operands, or a CUDA graph is captured by
    other means than ``torch.cuda.CUDAGraph``.
    """
