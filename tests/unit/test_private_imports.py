# SPDX-License-Identifier: Apache-2.0
"""The check that allows private torch APIs in two folders only. It must find each private spelling in the tests below,
and no public one."""

from __future__ import annotations

import ast

import pytest

from tests.support.tools import load_tool

check = load_tool("check_private_imports")


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor",
        "from torch._inductor import config",
        "from torch import _guards",
        "from torch.utils import _pytree",
        "isinstance(x, torch._ops.OpOverload)",
        "x = torch.utils._pytree.tree_map",
        "node.target._schema.name",
        "f(x)._private",
        "torch.ops.aten.mm.default._schema",
        "aten.mm.default._schema",
        "self.graph._codegen",
    ],
)
def test_private_parts_are_seen(source: str) -> None:
    assert len(check.private_parts(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch.fx",
        "from torch import fx",
        "torch.ops._c10d_functional.wait_tensor",
        "aten._to_copy.default",
        "torch.ops.aten._to_copy.default",
        "self._own",
        "os._exit(1)",
        "x.__class__.__name__",
        "from overlap_inductor.passes import _own",
    ],
)
def test_public_parts_are_left_alone(source: str) -> None:
    assert check.private_parts(source) == []


def test_kernels_know_no_graphs() -> None:
    """Kernels import nothing of FX."""
    kernels = sorted((check.ROOT / "kernels").glob("*.py"))
    imports = [
        node
        for path in kernels
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = [
        f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".") for node in imports for alias in node.names
    ]
    assert "triton" in names and not [name for name in names if name.startswith("torch.fx")]
