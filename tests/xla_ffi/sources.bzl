"""Files that CMake (bazel/sources.cmake) and Bazel both compile."""

# One executable each.
TESTS = [
    "departure_test.cc",
    "executor_test.cc",
    "gpu_copies_test.cc",
    "gpu_network_test.cc",
    "monitor_test.cc",
    "rank_records_test.cc",
    "report_test.cc",
    "reporter_test.cc",
    "run_names_test.cc",
    "session_options_test.cc",
    "session_table_test.cc",
    "session_test.cc",
    "site_test.cc",
    "totals_test.cc",
    "worker_pool_test.cc",
]
