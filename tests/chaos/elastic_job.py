"""The job of `elastic.py`: its ranks from outside, and each way to lose one."""

import contextlib
import dataclasses
import json
import os
import pathlib
import select
import signal
import socket
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import elastic_rank  # imports JAX before the forks, which saves each rank its seconds

# The channel before whose first signal the victim stands while it is killed, or what else happens.
STALLS = {
    "plan": "plan",
    "rows": "dispatch",
    "combine": "reduce",
    "ll rows": "ll-dispatch",
    "ll combine": "ll-combine",
}
KILLS = (*STALLS, "between calls", "anywhere", "joined", "decided", "building")
# Of a rank that lives: it is stopped, others go on, and it finds out when it continues; or it does
# not come to an agreement in time.
MASKED = ("stopped", "late")
PHASES = (*KILLS, *MASKED, "all others")
ON_GPUS = tuple(phase for phase in PHASES if phase not in STALLS)  # which the CPU's kernels know


class Child:
    """The runner's end of a rank."""

    def __init__(self, pid, commands, reports, log, reply_s):
        self.pid, self.commands, self.reports, self.log = pid, commands, reports, log
        self.reply_s = reply_s
        self._partial = b""

    def tell(self, *command):
        os.write(self.commands, json.dumps(command).encode() + b"\n")

    def hear(self):
        """The next report."""
        deadline = time.monotonic() + self.reply_s
        while b"\n" not in self._partial:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.reports], [], [], left)[0]:
                os.kill(self.pid, signal.SIGUSR2)  # where are its threads?
                time.sleep(1.0)
                raise AssertionError(f"no answer within {self.reply_s:g} s\n{self.text()}")
            data = os.read(self.reports, 1 << 16)
            if not data:
                raise AssertionError(f"it ended\n{self.text()}")
            self._partial += data
        line, _, self._partial = self._partial.partition(b"\n")
        record = json.loads(line)
        if "raised" in record:
            raise AssertionError(f"{record['raised']}\n{self.text()}")
        return record

    def result(self):
        return self.hear()["result"]

    def text(self):
        return self.log.read_text(errors="replace")[-4000:]

    def end(self, number=signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        os.waitpid(self.pid, 0)
        os.close(self.commands)
        os.close(self.reports)


class Job:
    """Ranks that are killed and started again."""

    def __init__(self, setup, folder):
        self.setup, self.folder = setup, folder
        self.ranks = setup.ranks
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.children = {}
        self.num_read = {}  # characters of logs that check_logs has read
        self.witness = self.ranks - 1  # is never lost
        lifeline, self.lifeline = os.pipe()  # which this process holds to its end
        self.coordinator = os.fork()
        if self.coordinator == 0:
            os.close(self.lifeline)
            elastic_rank.serve_store(self.port, self.ranks, lifeline)
        os.close(lifeline)
        self.starts = 0
        self.seconds = []  # from each kill to the last survivor's agreement
        for index in range(self.ranks):
            self.start(index)
        for index in range(self.ranks):
            assert self.children[index].hear()["made"] == [1] * self.ranks

    def start(self, index, setup=None):
        self.starts += 1
        log = self.folder / f"rank{index}.{self.starts}.log"
        command_out, command_in = os.pipe()
        report_out, report_in = os.pipe()
        fd = os.open(log, os.O_CREAT | os.O_WRONLY)
        pid = os.fork()
        if pid == 0:
            for child in self.children.values():
                os.close(child.commands)
                os.close(child.reports)
            os.close(self.lifeline)
            os.close(command_in)
            os.close(report_out)
            setup = setup or self.setup
            elastic_rank.run(index, setup, self.port, (command_out, report_in), fd)
        for end in (command_out, report_in, fd):
            os.close(end)
        # A rank that waits in vain says so itself before.
        self.children[index] = Child(pid, command_in, report_out, log, 2 * self.setup.timeout_s)

    def check_logs(self, phase):
        """Each failure that ranks heard of has a name; that others agree anew is none.

        Not where a session could not be made: why not, the ranks learn by the store.
        """
        for log in self.folder.glob("*.log"):
            text = log.read_text(errors="replace")
            lines = text[self.num_read.get(log.name, 0) :].splitlines()
            self.num_read[log.name] = len(text)
            nameless = [line for line in lines if "reported a failure;" in line]
            is_known = phase in (*STALLS, "between calls", "anywhere", "a node")
            assert not nameless or not is_known, f"{log.name}: {nameless}"

    def all(self, *command, but=()):
        """The results of a command that all do at once."""
        doing = [i for i in self.children if i not in but]
        for index in doing:
            self.children[index].tell(*command)
        return {index: self.children[index].result() for index in doing}

    def masks(self, results):
        """The one mask that all have agreed on, which must name the living."""
        living = [int(index in self.children) for index in range(self.ranks)]
        for index, active in results.items():
            assert active == living, f"rank {index} has {active}, living are {living}"

    def lose(self, victim, phase, rng):
        """Kills `victim` in that phase; the others go on. Who was lost."""
        child = self.children[victim]
        if phase in STALLS:
            child.tell("stall", STALLS[phase])
            child.result()
            self.masks(self.all("agree"))  # all live, and a session that will stand is made
        others = [index for index in self.children if index != victim]
        if phase in MASKED:
            self.mask(victim, phase, others)
            return [victim]
        if phase == "all others":
            return self.lose_all_others()
        if phase in ("joined", "decided", "building"):
            child.tell("die_in", phase)
            child.result()
            for index in self.children:
                self.children[index].tell("agree")
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            struck_at = time.monotonic()
            self.drop(victim)
            said = {index: self.children[index].result() for index in others}
            self.seconds.append(time.monotonic() - struck_at)
            if any(active[victim] for active in said.values()):  # it had been agreed on with it
                said = {i: r["active"] for i, r in self.all("lose").items()}
            self.masks(said)
            self.all("steps", 2)
            return [victim]
        for index in others:
            self.children[index].tell("lose")
        if phase != "between calls":
            child.tell("until_it_fails")
            time.sleep(rng.uniform(0.0, 0.2) if phase == "anywhere" else 0.15)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        struck_at = time.monotonic()
        self.drop(victim)
        said = {index: self.children[index].result() for index in others}
        self.masks({index: record["active"] for index, record in said.items()})
        for index, record in said.items():
            assert f"rank {victim}" in record["error"], f"rank {index}: {record['error']}"
        self.seconds.append(max(record["agreed_at"] for record in said.values()) - struck_at)
        return [victim]

    def lose_all_others(self):
        """Kills all ranks but one, which goes on alone."""
        me = self.witness
        victims = [index for index in self.children if index != me]
        self.children[me].tell("lose")
        struck_at = time.monotonic()
        for victim in victims:
            self.drop(victim)
        record = self.children[me].result()
        alone = [int(index == me) for index in range(self.ranks)]
        while record["active"] != alone:  # one died later than the others
            record = self.all("lose")[me]
        self.seconds.append(record["agreed_at"] - struck_at)
        return victims

    def mask(self, victim, phase, others):
        """The others go on without `victim`, which lives and finds out."""
        child = self.children.pop(victim)
        if phase == "stopped":
            child.tell("find_out")
            time.sleep(0.1)
            os.kill(child.pid, signal.SIGSTOP)
            struck_at = time.monotonic()
            said = self.all("lose")
            for record in said.values():
                assert f"rank {victim}" in record["error"], record["error"]
            self.masks({index: record["active"] for index, record in said.items()})
            self.seconds.append(max(r["agreed_at"] for r in said.values()) - struck_at)
        else:
            begun = time.monotonic()
            self.masks(self.all("agree", 1.0))
            self.seconds.append(time.monotonic() - begun)
        for index in others:  # while its late writes come
            self.children[index].tell("steps", 100)
        if phase == "stopped":
            os.kill(child.pid, signal.SIGCONT)
        else:
            child.tell("find_out")
        error = child.result()
        for index in others:
            self.children[index].result()
        assert "rank" in error, error
        child.end()
        # Who forgets the mask is told so, and the group goes on after another agreement.
        # (Between nodes, who hears of another's mistake first only says whose it was.)
        errors = self.all("wrong_mask").values()
        assert any(f"an expert of rank {victim}" in error for error in errors), errors
        self.masks(self.all("agree"))
        errors = self.all("wrong_mask", self.witness).values()
        assert any(f"a mask without rank {self.witness}" in error for error in errors), errors
        self.masks(self.all("agree"))
        self.all("steps", 2)

    def drop(self, victim):
        self.children.pop(victim).end()

    def refuse_another_config(self, rank):
        """Who is started again with another Config is told so, before anything moves."""
        self.start(rank, dataclasses.replace(self.setup, align=2))
        try:
            self.children[rank].hear()
        except AssertionError as error:
            assert "align=2" in str(error) and "the group was created with config" in str(error)
        else:
            raise AssertionError(f"rank {rank} was taken with another Config")
        finally:
            self.drop(rank)
        self.all("steps", 1)

    def take_back(self, *ranks):
        for rank in ranks:
            self.start(rank)
        said = self.all("take_back", ranks, but=ranks)
        self.masks(said | {rank: self.children[rank].hear()["made"] for rank in ranks})
        self.all("steps", 3)

    def lose_a_node(self, victim):
        """Kills a rank of a node: where rows travel by rails, its mates are left out with it."""
        size = self.setup.node_size
        mates = [r for r in range(self.ranks) if r // size == victim // size and r != victim]
        begun = time.monotonic()
        self.drop(victim)
        for mate in mates:
            self.children[mate].tell("find_out")
        said = self.all("lose", but=mates)
        for mate in mates:
            self.children[mate].result()
            self.drop(mate)
        self.masks({index: record["active"] for index, record in said.items()})
        self.seconds.append(max(record["agreed_at"] for record in said.values()) - begun)
        self.all("sweep", 2)
        self.take_back(victim, *mates)

    def texts(self):
        """What the living ranks have written last."""
        return "\n".join(f"--- rank {i}\n{child.text()}" for i, child in self.children.items())

    def close(self):
        self.all("close")

    def end(self):
        for index in list(self.children):
            self.drop(index)
        os.kill(self.coordinator, signal.SIGKILL)
        os.waitpid(self.coordinator, 0)
        os.close(self.lifeline)

    def ask_witness(self, *command):
        self.children[self.witness].tell(*command)
        return self.children[self.witness].result()
