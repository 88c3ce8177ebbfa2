"""What the network libraries below us must not do to the process that loads them."""

import subprocess
import sys
import textwrap

PROGRAM = textwrap.dedent(
    """
    import faulthandler, os, signal
    from jax_ep import _core

    def caught():
        with open("/proc/self/status") as status:
            return next(line.split()[1] for line in status if line.startswith("SigCgt"))

    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: print("terminated"))
    before = caught()
    print("usable:", *(name for name, usable, _ in _core.transports() if usable))
    print("changed" if caught() != before else "kept")
    os.kill(os.getpid(), signal.SIGTERM)
    """
)


def test_loading_the_transports_keeps_the_handlers_of_the_process():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[1:] == ["kept", "terminated"], done.stdout + done.stderr
