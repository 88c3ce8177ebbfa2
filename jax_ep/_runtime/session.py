"""The native side of a started group: what it answers, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from jax_ep import _config, _extension
from jax_ep._group import Group, Health, closed_message, forked_message
from jax_ep._runtime import elsewhere
from jax_ep._runtime.agree_page import AgreePage
from jax_ep._runtime.drain import Drain
from jax_ep._runtime.elastic import Elastic, LeftOutError, losses
from jax_ep._runtime.topology import Layout

# In the order of their creation, which is the same on all processes: at exit each waits for the
# same group of the others. Strong, as a program may drop a Group that others still use.
_open_sessions: dict[NativeSession, None] = {}
_sessions: weakref.WeakSet[NativeSession] = weakref.WeakSet()  # open and closed


class NativeSession:
    """The native side of one allocated Group in this process."""

    def __init__(
        self,
        session: Any,
        name: str,
        group: Group,
        layout: Layout,
        transport: str,
        elastic: Elastic | None = None,
    ):
        """Wraps a started `_core.Session` of that name; `elastic` is for groups that are."""
        self._session = session
        self._elastic = elastic
        self._agreeing: AgreePage | None = None  # while inside agree
        self._left_out = ""  # why this process takes part no more
        self.name = name
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.RLock()  # a signal handler may close while its thread does
        self._devices = layout.devices
        self._timeout_s = group.config.timeout_s
        self._peer_timeout_s = _config.peer_timeout_s(group.config)
        self._drain = Drain(self._devices) if group.platform == "cpu" else None
        self.transport = transport
        self.node_size = layout.node_size
        _open_sessions[self] = None
        _sessions.add(self)

    @property
    def heap_bytes(self) -> int:
        """Bytes of this process's ranks; 0 after close."""
        return int(self._session.heap_bytes)

    @property
    def closed(self) -> bool:
        """Whether it holds nothing any more, or is about to; in a forked child it never did."""
        return self._closed or self._is_forked

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def close(self, *, program_ended: bool = False) -> None:
        """Waits for the executions that use the group, then for the other ranks' close; frees.

        Idempotent. Does nothing in a forked child: the group is its parent's.

        Args:
            program_ended: what ranks are told that still use the group: this program has ended.
        """
        if self._is_forked:
            return
        # Who comes second must not cut off what the first waits for.
        with self._close_lock, elsewhere.shown("close", self.name):
            if not self._closed:
                self._closed = True
                self._drain_or_abort()
            self._session.close(program_ended)
            if self._elastic is not None:
                self._elastic.close()
            _open_sessions.pop(self, None)

    def _drain_or_abort(self) -> None:
        try:
            if self._elastic is not None:
                self._elastic.leave()
            self._wait_for_executions()
        except BaseException:  # Ctrl-C: as _core.Session does where it waits itself
            process = self._devices[0].process_index
            self._session.abort(f"group {self.name}: process {process} was interrupted by a signal")
            _open_sessions.pop(self, None)
            raise

    def _wait_for_executions(self) -> None:
        for device in self._devices:
            with contextlib.suppress(Exception):  # a failed execution is the caller's to see
                device.synchronize_all_activity()
        if self._drain is None:
            return
        session = self._session
        begin = time.monotonic()

        def give_up() -> bool:
            waited = time.monotonic() - begin
            limit = self._timeout_s if session.is_balanced() else self._peer_timeout_s
            return bool(session.failure_text()) or waited > limit

        self._drain.run(give_up)

    @property
    def active(self) -> Any:
        """As `Group.active`."""
        return None if self._elastic is None else self._elastic.active.copy()

    def agree(self, timeout_s: float | None) -> Any:
        """As `Group.agree`; None if the group is not elastic."""
        if self._elastic is None:
            return None
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with self._close_lock, elsewhere.shown("agree", self.name):
            if self._closed or self._left_out:
                raise RuntimeError(self._trouble())
            with self._agree_page() as page:
                return self._agree(deadline, page)

    @contextlib.contextmanager
    def _agree_page(self) -> Iterator[AgreePage]:
        """What reports say meanwhile: the session knows nothing of it, and may have ended."""
        page = AgreePage(self.name, self._devices[0].process_index, self._timeout_s)
        try:
            self._agreeing = page
            yield page
        finally:
            self._agreeing = None
            page.end()

    def _agree(self, deadline: float, page: AgreePage) -> Any:
        """`agree` under its lock."""
        assert self._elastic is not None
        self._await_executions(deadline)
        page.asks()
        session = self._session
        failure = str(session.failure_text())
        ended_early = None
        if failure:  # nobody needs it any more, and a proxy may take seconds to stop
            ended_early = threading.Thread(target=session.end_to_agree, name="jax_ep-agree")
            ended_early.start()

        def end_session() -> None:
            if ended_early is not None:
                ended_early.join()
            # Again, if a session that could not be built has left its own reason.
            session.end_to_agree()

        try:
            if not failure:
                session.begin_to_agree()
            lost = losses(failure, int(session.blamed_rank()))
            self._session = self._elastic.agree(deadline, lost, end_session, page.waits_for)
        except BaseException as error:
            if isinstance(error, LeftOutError):
                self._left_out = str(error)
            end_session()  # the others may have been told
            if self._left_out:  # what executions are told, too
                session.abort(self._left_out)
            raise
        return self.active

    def readmit(self, rank: int, timeout_s: float | None) -> None:
        """As `Group.readmit`."""
        assert self._elastic is not None
        if self._closed or self._left_out:
            raise RuntimeError(self._trouble())
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._elastic.readmit(rank, time.monotonic() + limit_s)

    def _await_executions(self, deadline: float) -> None:
        """Until all that was enqueued has ended, which a failed group lets it do at once."""
        has_ended = False

        def run() -> None:
            nonlocal has_ended
            for device in self._devices:
                with contextlib.suppress(Exception):  # a failed execution is the caller's to see
                    device.synchronize_all_activity()
            has_ended = self._drain is None or self._drain.run(lambda: time.monotonic() > deadline)

        # A native collective over a process that is gone never ends, nor who waits for it.
        waiter = threading.Thread(target=run, name="jax_ep-drain", daemon=True)
        waiter.start()
        waiter.join(max(0.0, deadline - time.monotonic()))
        if not has_ended:
            raise TimeoutError(
                f"group {self.name}: agree: executions of this process did not end in time; "
                "collectives of XLA over a process that is gone never do"
            )

    def release(self) -> None:
        """After close, at exit: lets go of the native object, which may outlive its module.

        A class that JAX has registered as a pytree is never freed, nor what its module names: a
        Group there would leave nanobind with a live instance to complain of.
        """
        if not self._is_forked:  # a child has not closed it
            self._session = _Released(self._session)

    def check(self) -> None:
        """Raises RuntimeError with the first failure if there is one, or if it is closed."""
        if message := self._trouble():
            raise RuntimeError(message)

    def _trouble(self) -> str:
        """The first failure, else that it is closed, else nothing; to a child, that it is one."""
        if self._is_forked:
            return forked_message(self.name)
        if self._left_out:
            return self._left_out
        failure = str(self._session.failure_text())
        # Others agree: that text says to call agree, which a closed group cannot.
        if failure and self._closed and self._blames_an_agreement():
            failure = ""
        return failure or (closed_message(self.name) if self._closed else "")

    def _blames_an_agreement(self) -> bool:
        """Whether the first failure only says that processes agree anew."""
        return bool(self._session.blamed_rank() == _extension.load().AGREEMENT)

    def health(self) -> Health:
        """State of the group as this process sees it."""
        message = self._trouble()
        return Health(
            ok=not message,
            message=message,
            details=(
                ("closed", self._closed),
                ("transport", self.transport),
                ("data_path", getattr(self._session, "data_path", "heap")),
            ),
        )

    def stats(self) -> dict[str, Any]:
        """Counters: totals, per local rank, per proxy flow."""
        ranks = self._session.rank_stats()
        totals = {
            name: sum(rank[name] for rank in ranks)
            for name in (ranks[0] if ranks else {})
            if name not in ("team", "rank", "pairs_per_expert", "wait_by_peer")
        }
        return {**totals, "ranks": ranks, "flows": self._session.flow_stats()}

    def report(self) -> str:
        """As `Group.report`."""
        page = self._page_of_agree()
        if page is not None:
            return page.text + str(self._session.report())
        # Its session says why it ended, which is not why this process takes part no more.
        return f"{self._left_out}\n" if self._left_out else str(self._session.report())

    def _page_of_agree(self) -> AgreePage | None:
        """That of an agree that runs; not a parent's, whose lock may have been held at the fork."""
        return None if self._is_forked else self._agreeing

    def dump_state(self) -> str:
        """The report and more, for a bug report."""
        page = self._page_of_agree()
        first = page.text if page is not None else f"{self._left_out}\n" if self._left_out else ""
        return first + str(self._session.dump_state())


class _Released:
    """What a NativeSession still answers when the interpreter exits: its last words."""

    heap_bytes = 0

    def __init__(self, session: Any):
        """Takes what a closed `_core.Session` says."""
        self._failure = str(session.failure_text())
        self._blamed_rank = int(session.blamed_rank())
        self._ranks = session.rank_stats()
        self._flows = session.flow_stats()
        self._report = str(session.report())
        self._state = str(session.dump_state())
        self.data_path = getattr(session, "data_path", "heap")

    def close(self, program_ended: bool = False) -> None:
        """Was done."""

    def failure_text(self) -> str:
        """Of the time of the release, as all below."""
        return self._failure

    def blamed_rank(self) -> int:
        """Of that failure."""
        return self._blamed_rank

    def rank_stats(self) -> Any:
        """Counters of each rank."""
        return self._ranks

    def flow_stats(self) -> Any:
        """Counters of each flow."""
        return self._flows

    def report(self) -> str:
        """That it is closed."""
        return self._report

    def dump_state(self) -> str:
        """For a bug report."""
        return self._state


@functools.cache
def close_at_exit() -> None:
    """Has the process close its groups when it exits."""
    # After this, before JAX's own exit handlers: a process that ends while others still use the
    # group must say good-bye, or they take it for dead.
    atexit.register(close_all)


def close_all() -> None:
    """Closes what the program has left open, and lets go of native objects; again is harmless."""
    for session in list(_open_sessions):
        session.close(program_ended=True)
    for session in list(_sessions):
        session.release()
