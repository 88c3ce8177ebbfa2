"""
The native part of jax_ep: FFI handlers and sessions. Private; use jax_ep.
"""

from collections.abc import Sequence
from typing import Any

def registrations(
    platform: str,
) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    """
    (types, targets) to give to jax.ffi.register_ffi_type and register_ffi_target, in that order, for platform "cpu" or a GPU platform.
    """

AGREEMENT: int = -2

STALL_SHARE: int = 10

def check_environment(name: str) -> None:
    """
    ValueError if this variable has a value that is not allowed (base/env.h).
    """

def begin_stay(what: str, number: int) -> int:
    """
    This process enters "close", "create_group" or "agree" of group #number: for reports.
    """

def end_stay(place: int) -> None:
    """It leaves what begin_stay returned this for."""

def set_call_lines(lines: list[tuple[int, str]]) -> None:
    """Takes [(name of a call, where it stands in the program)], for reports."""

def transports(only: str = "") -> list[tuple[str, bool, str]]:
    """
    [(name, available, reason)] of every transport, or of that one; networks are tried.
    """

def gpu_distances(sysfs: str, rdma_devices: Sequence[str]) -> list[tuple[str, list[int]]]:
    """
    [(PCI address of a GPU, [distance of each RDMA device])]; 0 is nearest (topology.h).
    """

class WaitPage:
    """What Python waits for (wait_page.h)."""

    def __init__(self, who: str, why: str) -> None: ...
    def set(self, who: str, why: str) -> None:
        """Replaces both."""

    def text(self) -> str:
        """The page."""

    def warn(self) -> None:
        """Writes the page to the log."""

    def end(self) -> None:
        """Nobody who asks this process gets it any more."""

class GroupShape:
    """Sizes of a group (kernels/layout.h)."""

    def __init__(
        self,
        *,
        num_ranks: int,
        node_size: int,
        num_experts: int,
        top_k: int,
        align: int,
        hidden: int,
        max_tokens: int,
        ll_tokens: int,
        elem_type: int,
        f32_partials: bool,
        has_ht: bool,
        depth: int,
    ) -> None: ...
    @property
    def gpu_ll_round_tokens(self) -> int:
        """Tokens of every rank that a call of mode ll moves at once on GPUs."""

def heap_bytes(shape: GroupShape) -> int:
    """Bytes of a CPU rank's heap."""

class SessionOptions:
    """What a session is created from."""

    def __init__(
        self,
        *,
        session_id: int,
        name: str,
        shape: GroupShape,
        team_processes: Sequence[Sequence[int]],
        local_ranks: Sequence[tuple[int, int, int]],
        host_ranks: Sequence[tuple[int, int]],
        active: Sequence[int],
        generation: int,
        process_index: int,
        transport: str,
        timeout_s: float,
        peer_timeout_s: float,
        threads_per_rank: int,
        huge_pages: bool,
        debug: bool,
        gpu_direct: bool,
    ) -> None: ...

class Session:
    """One group in this process (session.h)."""

    def __init__(self, options: SessionOptions) -> None: ...
    def connect(self, blobs: dict[int, bytes]) -> None:
        """Takes {process index: local_blob}."""

    def barrier(self, limit_s: float) -> None:
        """Waits for every rank of the group."""

    def is_balanced(self) -> bool:
        """
        Whether the ranks of this process have been given the same number of calls.
        """

    def local_blob(self) -> bytes:
        """What other processes need (opaque)."""

    def start(self) -> None:
        """Starts it; every process must have connected."""

    def close(self, program_ended: bool = False) -> None:
        """
        Drains, says good-bye, stops, frees; idempotent. Nothing in a forked child.
        """

    def abort(self, reason: str) -> None:
        """
        close, without waiting for the others; they and late executions are told the reason.
        """

    def begin_to_agree(self) -> None:
        """Tells the others that this process takes part in no further call."""

    def end_to_agree(self) -> None:
        """abort, because the processes agree anew on who takes part."""

    def failure_text(self) -> str:
        """The first failure, or an empty string."""

    def blamed_rank(self) -> int:
        """Of the first failure, in a group of one team; negative: nobody."""

    def rank_stats(self) -> list[dict[str, Any]]:
        """Counters of each local rank."""

    def flow_stats(self) -> list[dict[str, int]]:
        """Counters of each proxy flow."""

    def report(self) -> str:
        """One page: who hangs, in the first line."""

    def dump_state(self) -> str:
        """The report and more, for a bug report."""

    @property
    def heap_bytes(self) -> int:
        """Bytes of this process's heaps; 0 after close."""

def load_gpu_library(path: str) -> None:
    """
    Loads libjax_ep_gpu.so, once; NotImplementedError if that is impossible.
    """

def gpu_memory_bytes(path: str, shape: GroupShape) -> tuple[int, int]:
    """
    Bytes of a GPU rank's heap and of its network stage; as load_gpu_library.
    """

class GpuSession:
    """One group on GPUs (gpu_session.h)."""

    def __init__(
        self,
        *,
        options: SessionOptions,
        library_path: str,
        live_pointers: Sequence[int],
        min_arena_bytes: int,
        require_arena: bool,
        max_sms: int,
        use_tma: bool,
    ) -> None: ...
    def export_fds(self) -> list[int]:
        """Descriptors for the other processes; the caller closes them."""

    def connect(self, blobs: dict[int, bytes], fds: dict[int, list[int]]) -> str:
        """
        Takes {process: local_blob} and {process: export_fds}; returns why an arena could not be mapped, or an empty string.
        """

    def forbid_arenas(self, reason: str) -> None:
        """All ranks stage their rows from now on; before start."""

    @property
    def data_path(self) -> str:
        """ "in place", or "staged: REASON"."""

    def local_blob(self) -> bytes:
        """What other processes need (opaque)."""

    def start(self) -> None:
        """Starts it; every process must have connected."""

    def close(self, program_ended: bool = False) -> None:
        """
        Drains, says good-bye, stops, frees; idempotent. Nothing in a forked child.
        """

    def abort(self, reason: str) -> None:
        """
        close, without waiting for the others; they and late executions are told the reason.
        """

    def begin_to_agree(self) -> None:
        """Tells the others that this process takes part in no further call."""

    def end_to_agree(self) -> None:
        """abort, because the processes agree anew on who takes part."""

    def failure_text(self) -> str:
        """The first failure, or an empty string."""

    def blamed_rank(self) -> int:
        """Of the first failure, in a group of one team; negative: nobody."""

    def rank_stats(self) -> list[dict[str, Any]]:
        """Counters of each local rank."""

    def flow_stats(self) -> list[dict[str, int]]:
        """Counters of each proxy flow."""

    def report(self) -> str:
        """One page: who hangs, in the first line."""

    def dump_state(self) -> str:
        """The report and more, for a bug report."""

    @property
    def heap_bytes(self) -> int:
        """Bytes of this process's heaps; 0 after close."""
