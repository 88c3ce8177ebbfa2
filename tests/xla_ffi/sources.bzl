"""Files that CMake (bazel/sources.cmake) and Bazel both compile."""

# One executable each.
TESTS = [
    "epoch_test.cc",
    "executor_test.cc",
    "session_options_test.cc",
    "session_test.cc",
    "site_test.cc",
    "worker_pool_test.cc",
]
