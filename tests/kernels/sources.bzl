"""Files that CMake (bazel/sources.cmake) and Bazel both compile."""

# What the tests share.
TESTING = [
    "exchange.cc",
    "network.cc",
    "oracle.cc",
    "team.cc",
]

# One executable each.
TESTS = [
    "epoch_test.cc",
    "exchange_test.cc",
    "failure_test.cc",
    "fp8_rows_test.cc",
    "huge_pages_test.cc",
    "layout_test.cc",
    "plan_test.cc",
    "rows_test.cc",
    "tree_test.cc",
    "zones_test.cc",
]
