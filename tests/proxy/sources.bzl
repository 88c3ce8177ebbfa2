"""Files that CMake (bazel/sources.cmake) and Bazel both compile."""

# One executable each.
TESTS = [
    "base_test.cc",
    "choose_nics_test.cc",
    "command_test.cc",
    "command_ring_test.cc",
    "faulty_test.cc",
    "imm_test.cc",
    "inbox_test.cc",
    "loopback_test.cc",
    "ofi_fault_test.cc",
    "ofi_stranger_test.cc",
    "ofi_test.cc",
    "progress_model_test.cc",
    "protocol_model_test.cc",
    "proxy_failure_test.cc",
    "proxy_faulty_test.cc",
    "proxy_help_test.cc",
    "proxy_processes_test.cc",
    "proxy_test.cc",
    "sequencer_test.cc",
    "shm_test.cc",
    "side_channel_test.cc",
    "topology_test.cc",
    "verbs_fault_test.cc",
    "verbs_test.cc",
]
