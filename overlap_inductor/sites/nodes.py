"""The FX side of a site: ``GatherNodes`` and ``ReduceNodes``. The JSON-able side is
``overlap_inductor.facts.site.SiteFacts``."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

from torch import fx

from overlap_inductor.facts.decision import Decision
from overlap_inductor.facts.decision import Reason
from overlap_inductor.facts.site import SiteFacts
from overlap_inductor.sites.layouts import Atom
from overlap_inductor.sites.layouts import Layout
from overlap_inductor.sites.layouts import ShardedDim
from overlap_inductor.sites.layouts import Size
from overlap_inductor.sites.matmuls import MatmulNode


@dataclass(frozen=True)
class CollectiveNode:
    """A functional collective and its wait. ``node.args[0]`` is the input; ``wait`` has the result."""

    node: fx.Node
    wait: fx.Node
    kind: str
    group_name: str
    ranks: tuple[int, ...] | None
    reduce_op: str | None = None

    @property
    def input(self) -> fx.Node:
        return self.node.args[0]  # type: ignore[return-value]

    @property
    def world_size(self) -> int:
        return len(self.ranks) if self.ranks else 0


@dataclass(frozen=True)
class GatherConsumer:
    """A matmul one of whose operands is the gathered tensor. ``layout`` is the operand's, without the padding of uneven
    shards where that was cut off."""

    matmul: MatmulNode
    operand: str
    role: str
    layout: Layout
    sharded: ShardedDim

    @property
    def operand_node(self) -> fx.Node:
        return self.matmul.lhs if self.operand == "lhs" else self.matmul.rhs

    @property
    def other_node(self) -> fx.Node:
        return self.matmul.rhs if self.operand == "lhs" else self.matmul.lhs


@dataclass(frozen=True)
class Epilogue:
    """Pointwise ``nodes`` (and views among them, in graph order) behind the matmuls ``base``, to be computed piece by
    piece.

    ``outputs`` are the nodes and matmuls that others read, ``externals`` the rows and scalars that the nodes read
    besides.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    externals: list[fx.Node] = field(default_factory=list)
    base: list[fx.Node] = field(default_factory=list)


@dataclass
class GatherNodes:
    """all-gather -> views and pointwise ops -> matmuls -> epilogue. ``through[n]`` is the source of a view-like node
    ``n``.

    Where a row-wise op other than an element-wise one stands between (``row_wise``), ``layouts`` holds the layout of
    the gathered tensor and of all nodes between, and ``whole`` the dims that such an op needs whole; else both are
    empty.
    """

    collective: CollectiveNode
    raw: Layout
    consumers: list[GatherConsumer]
    through: dict[fx.Node, fx.Node] = field(default_factory=dict)
    epilogue: Epilogue = field(default_factory=Epilogue)
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    whole: list[Atom] = field(default_factory=list)


@dataclass(frozen=True)
class Region:
    """Sums over a dim of the matmuls and ``cat`` of several, between matmuls and collective (``passes.find_region``);
    pieces are computed over the dims of a matmul.

    ``reduced``: dims that a node sums over; ``joined``: the dim along which a ``cat`` joins; ``places``: layouts over
    those dims of what is read from elsewhere; ``cut``: the dim that is cut; ``layout``: of what the collective is
    given, over those dims but for the ones that are summed over.
    """

    reduced: dict[fx.Node, list[int]]
    joined: dict[fx.Node, int]
    places: dict[fx.Node, Layout]
    cut: int
    layout: Layout


@dataclass(frozen=True)
class Padding:
    """``node`` appends zeros to a rank's output before it is gathered, where other ranks have more: ``columns`` to the
    matmul's columns; where that is 0, rows, which ``ReduceNodes.sharded`` counts as missing."""

    node: fx.Node
    columns: int

    @property
    def source(self) -> fx.Node:
        return self.node.args[0]  # type: ignore[return-value]


@dataclass
class ReduceNodes:
    """matmuls -> views and pointwise ops -> collective(s). ``collectives`` are several where all-reduces are added
    afterwards; ``layouts`` holds every region node's layout in the atoms of the collective's input, ``sharded`` the
    matmuls' output dim to cut, ``unfolded`` biases of matmuls that are sums of other ones (``matmuls.folded``)."""

    collectives: list[CollectiveNode]
    result: fx.Node
    leaves: list[MatmulNode]
    layouts: dict[fx.Node, Layout]
    through: dict[fx.Node, fx.Node]
    externals: list[fx.Node]
    sharded: ShardedDim
    role: str
    unfolded: set[fx.Node] = field(default_factory=set)
    region: Region | None = None
    padding: Padding | None = None

    @property
    def computed(self) -> list[fx.Node]:
        """What the region computes for each collective: its input, or that before it was padded."""
        return [self.padding.source] if self.padding is not None else [c.input for c in self.collectives]

    def rename(self, replaced: dict[fx.Node, fx.Node]) -> None:
        """Follow a rewrite before: what is read from outside may be another node now."""
        self.externals = [replaced.get(n, n) for n in self.externals]
        for old, new in replaced.items():
            if old in self.layouts:
                self.layouts[new] = self.layouts[old]
                # (Inside the region until now: an epilogue that another site's kernel has computed.)
                if new not in self.externals and old not in {m.node for m in self.leaves}:
                    self.externals.append(new)
                if self.region is not None and old in self.region.places:
                    self.region.places[new] = self.region.places[old]
        self.through = {n: replaced.get(source, source) for n, source in self.through.items()}

    def bias_of(self, matmul: MatmulNode) -> fx.Node | None:
        """A matmul's bias, if that is no sum of other ones of them, which are added up with it."""
        return None if matmul.bias in self.unfolded else matmul.bias

    @property
    def leaf_layout(self) -> Layout:
        """The layout in which pieces are computed: the matmuls'."""
        return self.layouts[self.leaves[0].node] if self.region is None else self.region.layout

    @property
    def shape(self) -> list[Size]:
        """The sizes of ``leaf_layout``."""
        return list(self.leaves[0].node.meta["val"].shape) if self.region is None else self.region.layout.shape()


@dataclass
class OverlapSite:
    """A site found in one graph: facts for reports and plans, nodes for the rewrite, and what became of it."""

    facts: SiteFacts
    nodes: GatherNodes | ReduceNodes
    decision: Decision | None = None
    obstacle: Reason | None = None

    @property
    def collectives(self) -> list[CollectiveNode]:
        return [self.nodes.collective] if isinstance(self.nodes, GatherNodes) else self.nodes.collectives

    @property
    def matmuls(self) -> list[MatmulNode]:
        if isinstance(self.nodes, GatherNodes):
            return [c.matmul for c in self.nodes.consumers]
        return self.nodes.leaves
