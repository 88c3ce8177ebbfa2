"""Files of the GPU kernels' tests. But for HOST_TESTS CMake alone compiles them, for CUDA."""

# Need neither a GPU nor its compiler: built and run everywhere, by both builds. The names of all
# other tests end in _gpu_test.cc.
HOST_TESTS = [
    "combine_tree_test.cc",
    "divisor_test.cc",
    "heap_layout_test.cc",
    "plan_slices_test.cc",
    "round_reuse_test.cc",
    "sm_budget_test.cc",
    "token_slices_test.cc",
]

TESTING = [
    "gpu_network.cc",
    "gpu_team.cc",
    "push_scenario.cc",
    "scenario.cc",
    "wire_scenario.cc",
]

TESTS = [
    "active_gpu_test.cc",
    "closed_gpu_test.cc",
    "exchange_gpu_test.cc",
    "failure_gpu_test.cc",
    "few_sms_gpu_test.cc",
    "held_gpu_test.cc",
    "large_gpu_test.cc",
    "launch_gpu_test.cc",
    "many_ranks_gpu_test.cc",
    "programs_gpu_test.cc",
    "push_gpu_test.cc",
    "view_gpu_test.cc",
    "wire_gpu_test.cc",
    "wrap_gpu_test.cc",
]
