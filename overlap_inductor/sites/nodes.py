"""``GatherNodes`` and ``ReduceNodes`` hold the FX nodes of a site. ``overlap_inductor.facts.site.SiteFacts`` holds its
JSON-able facts."""

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
    """A functional collective and its wait. ``node.args[0]`` is the input; ``wait`` is the result. ``ranks``: global
    ranks of the group."""

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
    """A matmul with the gathered tensor as one operand.

    Attributes:
        operand: ``lhs`` or ``rhs``.
        role: role of the gathered dim: M, N, K or B.
        layout: the operand's layout. If the padding of uneven shards was cut off, it is without that padding.
        sharded: the operand's dim that holds the rank.
    """

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
    """Pointwise nodes after a gather's matmuls that are computed piece by piece.

    Attributes:
        nodes: the pointwise nodes and the views among them, in graph order.
        outputs: the nodes and matmuls that nodes outside read.
        externals: the rows and scalars that ``nodes`` read besides.
        base: the matmuls.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    externals: list[fx.Node] = field(default_factory=list)
    base: list[fx.Node] = field(default_factory=list)


@dataclass
class GatherNodes:
    """all-gather -> views and pointwise ops -> matmuls -> epilogue.

    Attributes:
        raw: layout of the gathered tensor.
        through: source of each view-like node.
        layouts: layouts of the gathered tensor and of all nodes between it and the matmuls, if one of these is row-wise
            but not element-wise (``sites.row_wise``); else empty.
        whole: the dims that such row-wise ops need whole.
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
    """Sums and ``cat`` between matmuls and collective (``passes.find_region``). Pieces are computed over the dims of
    the matmuls, and all dims here are dims of the matmuls.

    Attributes:
        reduced: dims that each node sums over.
        joined: the dim along which each ``cat`` joins.
        places: layouts of the tensors that are read from elsewhere.
        cut: the dim that is cut.
        layout: layout of the collective's input, over the dims that are not summed over.
    """

    reduced: dict[fx.Node, list[int]]
    joined: dict[fx.Node, int]
    places: dict[fx.Node, Layout]
    cut: int
    layout: Layout


@dataclass(frozen=True)
class Padding:
    """``node`` appends zeros to a rank's output before it is gathered, because other ranks have more. It appends
    ``columns`` to the matmul's columns, or if that is 0, rows, which ``ReduceNodes.sharded`` counts as missing."""

    node: fx.Node
    columns: int

    @property
    def source(self) -> fx.Node:
        return self.node.args[0]  # type: ignore[return-value]


@dataclass
class ReduceNodes:
    """matmuls -> views and pointwise ops -> collectives.

    Attributes:
        collectives: several if the results of all-reduces are added to each other.
        result: the wait, or the sum of the waits.
        leaves: the matmuls.
        layouts: every region node's layout in the atoms of the collective's input.
        through: source of each view-like node.
        externals: tensors that the region reads and does not compute.
        sharded: the matmuls' output dim that is cut; ``role`` is its role.
        unfolded: biases that are sums of other matmuls of the site (``matmuls.folded``).
    """

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
        """The node that the region computes for each collective: its input, or the input before padding."""
        return [self.padding.source] if self.padding is not None else [c.input for c in self.collectives]

    def rename(self, replaced: dict[fx.Node, fx.Node]) -> None:
        """Update the site after another site's rewrite, which replaced the keys of ``replaced`` by its values."""
        self.externals = [replaced.get(n, n) for n in self.externals]
        for old, new in replaced.items():
            if old in self.layouts:
                self.layouts[new] = self.layouts[old]
                # A node of the region that another site's kernel now computes, as its epilogue, is read from outside.
                if new not in self.externals and old not in {m.node for m in self.leaves}:
                    self.externals.append(new)
                if self.region is not None and old in self.region.places:
                    self.region.places[new] = self.region.places[old]
        self.through = {n: replaced.get(source, source) for n, source in self.through.items()}

    def bias_of(self, matmul: MatmulNode) -> fx.Node | None:
        """The matmul's bias, or ``None`` if the bias is a sum of other matmuls of the site, which the site adds up
        itself."""
        return None if matmul.bias in self.unfolded else matmul.bias

    @property
    def leaf_layout(self) -> Layout:
        """The layout in which pieces are computed: that of the first matmul, or of the region."""
        return self.layouts[self.leaves[0].node] if self.region is None else self.region.layout

    @property
    def shape(self) -> list[Size]:
        """The sizes of ``leaf_layout``."""
        return list(self.leaves[0].node.meta["val"].shape) if self.region is None else self.region.layout.shape()


@dataclass
class OverlapSite:
    """A site found in one graph: facts for reports and plans, nodes for the rewrite, and the decision. ``obstacle``:
    what the finder met that speaks against the site."""

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
