# SPDX-License-Identifier: Apache-2.0
"""A site is named by the path at which the model holds the site's module, even if a decorator wraps a ``forward``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch import nn

from overlap_inductor.sites.naming import module_of


def _renaming_keywords(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator like Hugging Face's for renamed arguments: its wrapper receives ``self`` as ``args[0]``."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        return forward(*args, **keywords)

    return wrapped


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


class Decorated(Plain):
    @_renaming_keywords
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("kind", [Plain, Decorated])
def test_a_module_has_the_name_that_its_user_gives_it(kind: type[nn.Module]) -> None:
    names: list[str] = []

    def read(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        names.extend(module_of(node) for node in graph.graph.nodes if "linear" in str(node.target))
        return graph

    torch._dynamo.reset()
    torch.compile(kind(), backend=read)(torch.ones(2, 4))
    assert names == ["layers.0.0"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("G['___unnamed_scope_139614768975296_c0']['layer']", "G.___unnamed_scope_c0.layer"),
        ("G['fn_4391234567_c0']", "G.fn_c0"),
        ("L['self'].experts_12345678", "experts_12345678"),
        ("L['self'].conv0xbad", "conv0xbad"),
    ],
)
def test_addresses_are_left_out_of_names(path: str, name: str) -> None:
    """They differ between processes. Other numbers belong to the user's names."""
    node = torch.fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"": (path, torch.nn.Module)}
    assert module_of(node) == name
