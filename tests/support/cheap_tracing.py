# SPDX-License-Identifier: Apache-2.0
"""Makes traces in a test process faster: leaves out work that each trace would repeat."""

from __future__ import annotations

import logging

import torch._dynamo.trace_rules
import torch._inductor.codecache


def trace_cheaply() -> None:
    """Leave out two kinds of work in this process and its forks:

    - Dynamo lists the functions of torch that a graph may call. Each new process group would drop this list, because
      the list may be older than the import of ``torch.distributed``. Here the list is made once, after this import.
    - torch writes each event of a compile to a log. pytest would give this log a handler that keeps all events. Here
      pytest does not find the log.
    """
    import torch.distributed.tensor  # noqa: F401

    torch._dynamo.trace_rules.clear_lru_cache()
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    torch._dynamo.trace_rules.clear_lru_cache = lambda: None
    logging.Logger.manager.loggerDict.pop("torch.__trace", None)


def hash_torch() -> None:
    """Compute the hash of torch's source, so that forks need not. The hash is part of every key of Inductor's
    caches."""
    torch._inductor.codecache.torch_key()
