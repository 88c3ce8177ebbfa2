"""Entry of one launched process: joins the job, then runs the user's code as ``__main__``.

Started by ``process.py`` only, as ``python -m jax_ep._launch.child SCRIPT-OR-MODULE ARGS...``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from jax_ep._launch import lifeline
from jax_ep._launch.process import SPEC_ENV

# For a process that is started again to reach the coordinator, which has been there before.
_REJOIN_S = 60
_JOIN_S = 300


def _run(command: list[str], is_module: bool) -> int:
    """Returns the exit code that ``python script.py`` or ``python -m module`` would have had."""
    sys.argv[:] = command
    try:
        if is_module:  # sys.path begins with the current folder, as with Python's -m
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(command[0]).resolve().parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 128 + signal.SIGINT
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and _is_before_users_code(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        if frames is None and is_module and isinstance(error, ImportError):
            print(f"-m {command[0]}: {error}", file=sys.stderr)
        else:
            traceback.print_exception(type(error), error, frames or error.__traceback__)
        return 1
    return 0


def _is_before_users_code(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen ")  # runpy and the import system


class _End:
    """The last of this process, as an exit hook.

    It is registered after those of JAX and before the program's own, so it runs between them: a
    program finds its groups as it does under plain ``python``, where the hook of the first group
    closes them.
    """

    def __init__(self, spec: dict[str, Any], control: socket.socket):
        """Args: what the environment says, and the launcher's socket."""
        self.exit_code = 0  # of the program
        self._spec = spec
        self._control = control
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether the program has come to its end in a child: the parent goes on."""
        return os.getpid() != self._pid

    def run(self) -> None:
        """Keeps a process that the others need until they have ended."""
        if self.is_forked:
            return
        _close_groups()
        if not self._spec["has_coordinator"]:
            if self._spec["index"] == 0:
                _wait_until_alone(self._control)
        elif self._spec["waits_for_others"] and self.exit_code == 0:
            from jax_ep._launch.initialize import wait_for_others

            wait_for_others(self._spec["num_processes"])


def _close_groups() -> None:
    """What their own hook has done, unless Ctrl-C ended it; the others wait for this close."""
    runtime = sys.modules.get("jax_ep._runtime.session")
    if runtime is not None:
        try:
            runtime.close_all()
        except BaseException:  # Ctrl-C: process 0 waits for the others even so
            traceback.print_exc()


def _wait_until_alone(control: socket.socket) -> None:
    """Process 0 hosts JAX's coordinator: leaving before the others would abort them."""
    with contextlib.suppress(OSError, KeyboardInterrupt):
        control.recv(1)


def _join(spec: dict[str, Any]) -> None:
    import jax

    from jax_ep._launch.initialize import configure_jax
    from jax_ep._launch.join import join

    configure_jax()
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # It would swallow SIGTERM, with which people and the launcher end a job on one host.
        jax.config.update("jax_enable_preemption_service", False)
    address, local_device_ids = spec["address"], spec.get("local_device_ids")
    if spec["has_coordinator"]:
        limit_s = _REJOIN_S if spec["is_again"] else _JOIN_S
        join(
            address,
            spec["num_processes"],
            spec["index"],
            local_device_ids,
            limit_s,
            process_0_is_gone=spec["process_0_is_gone"],
        )
        return
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=spec["num_processes"],
        process_id=spec["index"],
        local_device_ids=local_device_ids,
        coordinator_bind_address=address,
    )


def main() -> int:
    """Joins the job that the environment describes and runs ``sys.argv[1:]``."""
    spec = json.loads(os.environ.pop(SPEC_ENV))
    control = lifeline.hold(spec)
    if "cores" in spec:
        os.sched_setaffinity(0, spec["cores"])  # before any thread is started
    _join(spec)
    from jax_ep._launch.join import leave

    with contextlib.suppress(OSError):
        control.send(b"started\n")
    end = _End(spec, control)
    atexit.register(end.run)
    exit_code = end.exit_code = _run(sys.argv[1:], spec["is_module"])
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if end.is_forked:  # the launcher is told of the parent alone
        return exit_code
    if spec["has_coordinator"]:
        leave(spec["index"])
    with contextlib.suppress(OSError):
        control.send(f"exit {exit_code}\n".encode())
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
