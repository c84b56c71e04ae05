# SPDX-License-Identifier: Apache-2.0
"""What a user can do about a site or collective that is not overlapped, for each reason code."""

from __future__ import annotations

from collections.abc import Iterable

_PART_OF_THE_MODEL = "Nothing to do if the model needs it this way."

ADVICE = {
    "backend_not_supported": "Compile with torch.compile and Inductor's Python wrapper.",
    "coalesced": "Call one collective for each tensor in place of the coalesced one.",
    "data_parallel_gradient": "Nothing to do: Inductor runs later work during the reductions of gradients.",
    "dtype": "Run the layer in a dtype that the reason allows.",
    "dynamic_shape": "Compile for fixed sizes: torch.compile(dynamic=False), and no size from data (.item()).",
    "few_tokens": "Nothing to do: with so few tokens, an all-reduce is faster than what could replace it.",
    "fsdp_weight_gather": "Nothing to do: Inductor moves the gathers of weights under earlier work.",
    "group_not_resolved": "Create the process group in this process before the model is compiled.",
    "grouped_matmul": "Between two all-to-alls, compute each row by itself and return it to the rank that sent it.",
    "hoist": "Move the op that the reason names before the collective, if the model allows it.",
    "host_bound": "Use more tokens in a call. Without CUDA graphs, try torch.compile(mode='reduce-overhead').",
    "layout": "Gather or scatter along one whole dim. Do not reshape across this dim between collective and matmul.",
    "matmul_form": "Write the product as a matmul of matrices, for example with torch.nn.functional.linear. Pass"
    " a causal mask as attn_mask.",
    "moving_pass": "Switch off the option of torch._inductor.config that the reason names.",
    "mutation": "Move the in-place write that the reason names before or behind the site.",
    "no_matmul": "Nothing to do: no matmul beside this collective could hide it.",
    "no_wait": "Wait for the collective once, with wait_tensor, before its result is used.",
    "no_token_wise_work": "Nothing to do: no work behind the all-reduce can be divided among the ranks.",
    "not_divisible": "Pad the rows to a multiple of the number of ranks.",
    "not_plain_gather": "Concatenate every rank's shard once, whole, in the order of the ranks.",
    "not_plain_scatter": "Scatter equal pieces of consecutive rows, in the order of the ranks.",
    "one_table": "Give each rank several tables, or leave the exchange as it is.",
    "op_between": f"Move the op that the reason names to the collective's other side. {_PART_OF_THE_MODEL}",
    "other_users": f"Read the result behind the collective, not before it. {_PART_OF_THE_MODEL}",
    "out_variant": "Call the functional collective of torch.distributed._functional_collectives.",
    "pattern_not_available": "Call a functional collective of a kind that is overlapped, if the model allows it.",
    "reduce_op": "Reduce with sum or avg.",
    "report_mode": "Set OVERLAP_INDUCTOR=on to change the graph.",
    "rewrite_failed": "This is a bug of overlap_inductor; the site runs as written. The notices say how to report it.",
    "schedule_not_available": "Leave OVERLAP_INDUCTOR_SCHEDULE and OVERLAP_INDUCTOR_TRANSPORT at auto, or change what"
    " the reason names.",
    "shares_nodes": "Nothing to do: another site holds the matmul or collective that the reason names.",
    "split_contraction": "Gather along a dim that the scaled matmul does not contract.",
    "stream_boundary": "Put the matmul and its collective on one stream.",
    "strides": "Make the tensor that the reason names dense, for example with .to_dense().",
    "switched_off": "Set OVERLAP_INDUCTOR_PATTERNS or OVERLAP_INDUCTOR_SCHEDULE so that this site is allowed.",
    "taken_by_async_tp": "Set torch._inductor.config._micro_pipeline_tp to False, so that this pass can take the site.",
    "too_many_steps": "Raise OVERLAP_INDUCTOR_STEP_NODE_BUDGET, or lower OVERLAP_INDUCTOR_SUB_CHUNKS.",
    "too_small": "If much could be saved, use more tokens in a call; else change nothing."
    " OVERLAP_INDUCTOR_SCHEDULE=<name> forces a schedule, to measure it.",
    "uneven_splits": "Send every rank an equal part of a known size, or move the op that the reason names elsewhere.",
    "weight_depends_on_collective": "Compute the operand that the reason names without the collective's result."
    f" {_PART_OF_THE_MODEL}",
    "workspace": "Raise OVERLAP_INDUCTOR_WORKSPACE_LIMIT or, for dynamic sizes, lower OVERLAP_INDUCTOR_MAX_TOKENS.",
    "world_size_one": "Nothing to do: a group of one rank moves nothing.",
}
"""Reason code -> what to do."""


def advice_for(codes: Iterable[str]) -> list[tuple[str, str]]:
    """``(code, advice)`` of each code that has advice, once, in order. Codes from outside the package may have none."""
    return [(code, ADVICE[code]) for code in dict.fromkeys(codes) if code in ADVICE]
