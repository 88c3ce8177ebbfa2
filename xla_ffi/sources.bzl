"""Files that CMake (bazel/sources.cmake) and Bazel both compile."""

# No XLA, no Python.
SESSION = [
    "continuation_watch.cc",
    "departure.cc",
    "executor.cc",
    "gpu_library.cc",
    "gpu_network.cc",
    "gpu_session.cc",
    "gpu_session_close.cc",
    "gpu_session_failures.cc",
    "gpu_session_memory.cc",
    "gpu_session_report.cc",
    "gpu_session_trace.cc",
    "monitor.cc",
    "order.cc",
    "rank_records.cc",
    "report.cc",
    "report_clients.cc",
    "reporter.cc",
    "session.cc",
    "session_barrier.cc",
    "session_close.cc",
    "session_connect.cc",
    "session_options.cc",
    "session_report.cc",
    "totals.cc",
    "worker_pool.cc",
]

# The Python module _core.
EXTENSION = [
    "buffers.cc",
    "handlers_cpu.cc",
    "handlers_gpu.cc",
    "module.cc",
    "module_gpu.cc",
    "quantize.cc",
]
