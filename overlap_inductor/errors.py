# SPDX-License-Identifier: Apache-2.0
"""The exceptions that users of the package may see. A message says what was wrong and, if known, what was expected and
what to do."""

from __future__ import annotations


class OverlapError(RuntimeError):
    """Base class of the package's own errors."""


class ConfigError(OverlapError, ValueError):
    """A switch or an option of a command has a value that is not allowed, or a name is not the name of a switch. The
    message names the variable or option and what is allowed.

    Attributes:
        field: the field of ``OverlapConfig`` with the value, or empty.
        problem: what is wrong and what is allowed, as the end of a sentence.
    """

    field: str = ""
    problem: str = ""


class StrictError(OverlapError):
    """Overlap that was asked for in mode ``strict`` is not possible. Mode ``on`` runs the site or the graph without
    overlap instead.

    Causes: a site was refused, a rewrite or the pass failed, the ranks' plans differ, or a workspace could not be
    made.
    """


class AgreementError(OverlapError):
    """The ranks of a group differ, and they cannot all run the graph without overlap instead. Raised before this rank
    moves data for the call.

    For example, their versions differ, a rank died, or some ranks are inside the transfers of an earlier plan.
    """


class TransferError(OverlapError):
    """A transfer failed, a wait for a peer timed out, or the group was aborted. The group's results are not valid any
    more."""


class UnsupportedError(OverlapError):
    """overlap_inductor does not support what it was asked to do. Examples: this version of torch, the operands of a
    kernel, or a CUDA graph that is captured without ``torch.cuda.CUDAGraph``."""
