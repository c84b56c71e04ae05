# SPDX-License-Identifier: Apache-2.0
"""The meaning of each reason code: ``{group: {code: meaning}}``. ``report.advice`` has the advice for users."""

from __future__ import annotations

GROUPS: dict[str, dict[str, str]] = {
    "You asked for it": {
        "switched_off": "The pattern is not in `OVERLAP_INDUCTOR_PATTERNS`, or the schedule is `keep`.",
        "report_mode": "Mode `report` finds and plans sites, and leaves the graph as it is.",
        "schedule_not_available": (
            "The schedule or transport that you forced does not compute this site, or no schedule computes it. The text"
            " says why."
        ),
    },
    "It does not pay, or does not fit": {
        "too_small": (
            "No schedule is estimated to be fast enough, or the sequence-parallel rewrite is not. The text has the"
            " estimates."
        ),
        "host_bound": (
            "The GPUs are estimated to need less than 2.2 times as long as the host needs to launch the graph. So the"
            " GPUs may wait for the host, and hiding transfers may save nothing. (`passes/host_time.py` says how both"
            " times are estimated.) A graph that Inductor captures as a CUDA graph gets this code if the GPUs are"
            " estimated to need less than 1 ms. If the token count is dynamic, the counts at which the host is the"
            " limit have a graph of their own, which stays as written. On GPUs, experts between two all-to-alls get"
            " this code unless schedule `chunked` is estimated to pay. The ring never pays there: the host launches"
            " the ops of each of its pieces, which takes longer than the layer. Lookups before an all-to-all get this"
            " code, too, unless schedule `fused` is estimated to pay: rings of lookups were mostly slower on GPUs."
        ),
        "workspace": (
            "The sites of the group would hold more symmetric memory than `OVERLAP_INDUCTOR_WORKSPACE_LIMIT`. So sites"
            " are left as written, those with the largest requests first, until the others fit."
        ),
        "too_many_steps": (
            "The unrolled steps would add more nodes to the graph than `OVERLAP_INDUCTOR_STEP_NODE_BUDGET` allows, and"
            " no looping op computes this site. Looping ops compute no batched or scaled matmuls. Between a matmul that"
            " is not grouped and a later collective, they compute only sums, biases and one cast. Between a gather and"
            " a later matmul, they compute only ops that read no other tensor, do not widen the dtype, and have no"
            " reader outside the site. Some looping ops compute no bias, or not every layout."
        ),
        "moving_pass": (
            "An option of Inductor moves nodes after this pass. The option buckets collectives"
            " (`bucket_all_gathers_fx`, ...), or lets Inductor schedule the overlap (`enable_overlap_scheduling`)."
            " Rings then run as looping ops, and no looping op computes this site."
        ),
        "world_size_one": "The group has one rank: nothing is moved.",
        "few_tokens": (
            "The stretch has fewer tokens than the group has ranks. Or the stretch has so few tokens that the"
            " reduce-scatters and all-gathers of the sequence-parallel rewrite would cost more than the all-reduces."
        ),
    },
    "There is no matmul to overlap with": {
        "no_matmul": (
            "No matmul stands beside the collective, so nothing could hide it. Examples are an exchange of the numbers"
            " of rows that experts get, and a gather of a norm's weight. Another is a sum of the gradient of a norm, a"
            " bias or an embedding, which no matmul computes."
        ),
        "no_token_wise_work": (
            "The sequence-parallel rewrite has nothing to divide among the ranks: no op behind the all-reduce can be"
            " computed on some of the tokens alone."
        ),
        "no_wait": "The collective has no wait, or has more than one. Or its result is used without a wait.",
        "grouped_matmul": (
            "The matmul beside the collective is grouped, as in a mixture of experts. A grouped matmul is cut in two"
            " cases only. Before a reduction, it is cut into blocks of tokens. One index must then stand before the"
            " reduction and bring the rows back into the order of the tokens. Only pointwise ops may stand between the"
            " matmul and this index. Between two all-to-alls, the matmul is cut by ranks. Each row must then be"
            " computed by itself, and the second all-to-all must return the rows to the ranks from which the first"
            " all-to-all brought them."
        ),
        "fsdp_weight_gather": "The collective gathers a weight (FSDP), and a setting of Inductor hides this gather.",
        "data_parallel_gradient": (
            "The collective sums the gradient of a weight over the ranks (FSDP, DDP), and a setting of Inductor hides"
            " this sum: later work runs before the wait."
        ),
    },
    "The matmul or the ops beside it cannot be cut": {
        "other_users": (
            "An op outside the site needs the matmul's whole result before the collective. Or an op needs a result of"
            " attention other than its output. In training, the forward graph saves the log-sum-exp of attention for"
            " the backward graph. So attention after a gather is overlapped at inference only."
        ),
        "op_between": "An op between matmul and collective cannot be computed in pieces. The text names the op.",
        "one_table": (
            "Each rank exchanges the results or the gradients of one embedding table, so no other table's work can hide"
            " the exchange. One table is enough only if its results are plain rows that can be looked up rank by rank."
        ),
        "split_contraction": "The sharded dim is the contracted one (K), and the operands are scaled (fp8).",
        "matmul_form": (
            "This form of matmul is not cut: a product with a vector, `alpha` or `beta` other than 1, or a kind that"
            " is not known. Or this form of attention is not cut: it has dropout, or a mask or `is_causal` that the op"
            " cannot apply to pieces."
        ),
        "layout": ("A reshape splits the sharded dim, or no cut of the matmul matches the collective's shards."),
        "not_plain_gather": "The gathered shards are joined out of order, with gaps or with overlaps.",
        "not_plain_scatter": (
            "The scattered shards are taken out of order. Or a bias or another op stands between the matmul and the"
            " padding of the matmul's result."
        ),
        "weight_depends_on_collective": "More than one operand of the matmul is computed from the collective's result.",
    },
    "The nodes cannot be moved": {
        "shares_nodes": (
            "A matmul already belongs to another site, because a second gather or a reduction stands beside it. The"
            " first site has the matmul, or a later one that is estimated to save over 1.25 times as much. Or the"
            " pattern needs two collectives, and one of them already belongs to another site."
        ),
        "hoist": (
            "The site's operands must be computed before the site's steps. But a node that would have to be moved for"
            " this must stay where it is, or an accepted site stands in the way."
        ),
        "mutation": "A tensor that the site reads is written in place between the site's nodes.",
        "stream_boundary": "The site's nodes stand on different CUDA streams.",
    },
    "Types, sizes and strides": {
        "reduce_op": "The reduction is neither `sum` nor `avg`.",
        "dtype": "The matmul or the collective has a dtype that is not supported, or partial sums would be in fp8.",
        "strides": "The collective's input is not a strided tensor.",
        "uneven_splits": (
            "The parts that an all-to-all sends are not known to have equal sizes. Each row that is sent or received"
            " must then be one row of a matmul. Between a matmul and a later all-to-all, only views, casts and sums may"
            " stand. Between an all-to-all and a later matmul, only views may stand. Or a DTensor changes its shard dim"
            " (`shard_dim_alltoall`), and the new shard dim's size is not a multiple of the number of ranks."
        ),
        "not_divisible": "The number of rows of a reduce-scatter is not a multiple of the number of ranks.",
        "dynamic_shape": (
            "A size is only known when the graph runs (unbacked), so the pass cannot estimate the site's time. (Some"
            " such sites are overlapped with a forced `ring`. The others cannot be cut.) Or a size is dynamic, and no"
            " single op can choose a schedule by this size at run time."
        ),
    },
    "The collective itself is not supported": {
        "coalesced": (
            "A coalesced collective moves several tensors at once. Or the gradients of several parameters are joined"
            " into one tensor, which one collective sums."
        ),
        "out_variant": "The collective works in place or writes into the caller's buffer.",
        "pattern_not_available": "No pattern starts at this kind of collective, for example broadcast.",
        "taken_by_async_tp": "Inductor's own async TP replaced the site before this pass ran.",
        "group_not_resolved": "The process group does not exist in this process.",
        "backend_not_supported": (
            "The graph is compiled ahead of time (AOTInductor) or with `cpp_wrapper`. Or a copy of the graph cannot be"
            " kept for a run without overlap. The sequence-parallel rewrite also leaves nested compile regions as"
            " written. If Inductor's freezing is on, the rewrite leaves every graph as written."
        ),
    },
    "A bug": {
        "rewrite_failed": "The rewrite raised an exception. The graph was restored and runs as written.",
    },
}
