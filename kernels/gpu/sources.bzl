"""Files of the GPU library, compiled by CMake where there is a GPU compiler."""

KERNELS_GPU = [
    # These take longest, so they come first: no core waits for the last of them.
    "lanes/slot_combine.cu",
    "ll/dispatch/ll_dispatch.cu",
    "ll/combine/ll_combine.cu",
    "lanes/combine_rows.cu",
    "network/combine.cu",
    "api.cc",
    "calls.cc",
    "checks.cc",
    "ht/combine/combine_rows_in_bulk.cu",
    "ht/dispatch/enter_operation.cu",
    "ht/dispatch/pull_rows.cu",
    "ht/dispatch/pull_weighted_rows.cu",
    "ht/dispatch/stage_dispatch.cu",
    "ht/plan/plan.cu",
    "launch.cc",
    "memory/device_memory.cc",
    "network/combine_halves.cu",
    "network/dispatch.cu",
    "network/plan.cu",
    "network/slots.cu",
    "protocol/abandon_operation.cu",
    "rank.cc",
]
