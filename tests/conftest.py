# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cheap_compiles import compile_cheaply
from tests.support.cheap_compiles import set_environment
from tests.support.fork_base import DYNAMO
from tests.support.fork_base import INDUCTOR
from tests.support.fork_base import TORCH
from tests.support.fork_base import ForkBase
from tests.support.worker_base import WorkerBase

set_environment()
if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # A busy machine may take longer for an example than hypothesis allows by default.
    hypothesis.settings.register_profile("tests", deadline=None)
    hypothesis.settings.load_profile("tests")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers that pytest-xdist would start as new interpreters."""
    base = WorkerBase()
    config.add_cleanup(base.end)
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = base.python


def pytest_collection_finish(session: pytest.Session) -> None:
    if "torch._dynamo.guards" in sys.modules:
        compile_cheaply()
    if "torch._dynamo.trace_rules" in sys.modules:
        # Imported only here, because ``cheap_tracing`` imports Inductor.
        from tests.support.cheap_tracing import trace_cheaply

        trace_cheaply()
    if "tests.support.gloo_ranks" in sys.modules and session.items and not session.config.option.collectonly:
        from tests.support.rank_server import fork_server

        # The server keeps the output streams that it has when it is forked. Capturing is on for the fork, so pytest
        # captures what ranks print.
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        fork_server()
        capture.suspend_global_capture()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup``, one worker runs all programs that are forked from a ``ForkBase``: a process that has
    imported torch already. The other workers start no ``ForkBase``."""
    for item in items:
        if "torch_base" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("programs of the fork base"))


@pytest.fixture(scope="session")
def torch_base() -> Iterator[ForkBase]:
    """The base for programs in which neither Dynamo nor Inductor may be imported at first."""
    with ForkBase(TORCH) as base:
        yield base


@pytest.fixture(scope="session")
def dynamo_base(torch_base: ForkBase) -> ForkBase:
    """The base for programs that import this package first and Inductor's configuration later. The configuration
    imports Dynamo. To save time, the base has imported Dynamo already."""
    return torch_base.grown(DYNAMO)


@pytest.fixture(scope="session")
def inductor_base(dynamo_base: ForkBase) -> ForkBase:
    """The base for programs that compile. In a new interpreter, such a program would take five seconds."""
    return dynamo_base.grown(INDUCTOR)
