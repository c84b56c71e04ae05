# SPDX-License-Identifier: Apache-2.0
"""The check that no file imports a test module and that ``bench`` imports nothing from ``tests``."""

from __future__ import annotations

import pytest

from tests.support.tools import load_tool

check = load_tool("check_test_imports")


def complaints(source: str, module: str) -> list[str]:
    return [reason for _, name in check.imported(source, module) if (reason := check.complaint(module, name))]


@pytest.mark.parametrize(
    "source",
    [
        "import tests.unit.test_config",
        "from tests.unit import test_config",
        "from tests.unit.test_config import whatever",
        "from tests.compile import conftest",
        "from tests.compile.conftest import two",
        "def f():\n    from tests.unit import test_config",
        "from . import test_config",
        "from .test_config import whatever",
        "from ..unit.test_config import whatever",
    ],
)
def test_an_imported_test_module_is_reported(source: str) -> None:
    assert len(complaints(source, "tests.unit.test_other")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from tests.support.fake_group import fake_group",
        "from tests.support import hand_graph",
        "from tests.gpu.check_faults import judge",
        "from bench.timing import test_clock",
        "import pytest",
    ],
)
def test_a_helper_may_be_imported(source: str) -> None:
    assert complaints(source, "tests.unit.test_other") == []


def test_bench_imports_nothing_from_tests() -> None:
    assert complaints("from tests.support.fake_group import fake_group", "bench.models") != []
    assert complaints("import tests", "bench.support.gpu_ranks") != []
    assert complaints("from bench.support import gpu_ranks", "bench.models") == []
