# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import pytest

from tests.support.cheap_compiles import compile_cheaply
from tests.support.cheap_compiles import probe_vector_instructions
from tests.support.cheap_compiles import set_environment

set_environment()


def pytest_collection_finish() -> None:
    if "torch._dynamo.guards" in sys.modules:
        compile_cheaply()


@pytest.fixture(scope="session")
def known_vector_instructions() -> None:
    """For tests that start processes which compile."""
    probe_vector_instructions()
