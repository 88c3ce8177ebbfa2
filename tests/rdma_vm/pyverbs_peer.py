"""A peer of our verbs transport that shares no code with it: pyverbs and the wire format.

Writes into its region with immediate, lets it write into ours, and breaks things: a wrong key, a
queue pair that is gone, no receive posted. Needs Debian's python3-pyverbs, so /usr/bin/python3:

    /usr/bin/python3 pyverbs_peer.py PATH/TO/verbs_target
"""

import os
import queue
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ADDRESS_MAGIC = 0x3142524556504541
KEY_MAGIC = 0x3259454B42524556
SIDE_MAGIC = 0x3145444953504541
REGION_BYTES = 1 << 16
RANK = 3
U64 = struct.Struct("<Q")


def text(value):
    return U64.pack(len(value)) + value


class Reader:
    def __init__(self, blob):
        self.blob = blob

    def u64(self):
        (value,) = U64.unpack_from(self.blob)
        self.blob = self.blob[U64.size :]
        return value

    def text(self):
        size = self.u64()
        value, self.blob = self.blob[:size], self.blob[size:]
        return value


def receive(connection, size):
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


class Peer:
    """One device, one region, and as many queue pairs as tests want."""

    def __init__(self):
        self.context = Context(name=os.environ["RXE_DEV"])
        self.gid_index = int(os.environ["RXE_GID_INDEX"])
        self.gid = self.context.query_gid(1, self.gid_index)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 256)
        self.mr = MR(self.pd, REGION_BYTES, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
        self.token = secrets.token_bytes(32)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.accepted = queue.Queue()  # receiving queue pairs: one at the first write to us
        threading.Thread(target=self._serve, daemon=True).start()

    def new_qp(self):
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        return QP(self.pd, init)

    def join(self, qp, qp_number, sequence, mtu, gid):
        attr = QPAttr(port_num=1)
        attr.dest_qp_num = qp_number
        attr.path_mtu = mtu
        attr.rq_psn = sequence
        attr.sq_psn = 0
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        attr.min_rnr_timer = 12
        attr.timeout = 14
        attr.retry_cnt = attr.rnr_retry = 7
        route = GlobalRoute(dgid=gid, sgid_index=self.gid_index)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route, dlid=0)
        qp.to_rts(attr)

    def handshake(self, qp):
        gid = socket.inet_pton(socket.AF_INET6, str(self.gid))
        parts = (RANK, 1, 1, qp.qp_num, 0, 0, e.IBV_MTU_4096)
        return b"".join(map(U64.pack, parts)) + text(gid)

    @staticmethod
    def read_handshake(blob):
        reader = Reader(blob)
        rank, rails, qps = reader.u64(), reader.u64(), reader.u64()
        assert (rails, qps) == (1, 1), (rails, qps)
        qp_number, sequence, _, mtu = (reader.u64() for _ in range(4))
        gid = GID(reader.text().hex(":", 2))
        assert reader.blob == b""
        return rank, (qp_number, sequence, mtu, gid)

    def _serve(self):
        while True:
            connection, _ = self.listener.accept()
            with connection:
                assert receive(connection, 32) == self.token
                question = receive(connection, U64.unpack(receive(connection, 8))[0])
                _, theirs = self.read_handshake(question)
                qp = self.new_qp()
                self.join(qp, *theirs)
                self.accepted.put(qp)
                answer = U64.pack(0) + text(self.handshake(qp))
                connection.sendall(U64.pack(len(answer)) + answer)

    def address(self):
        side = U64.pack(SIDE_MAGIC) + text(b"127.0.0.1")
        side += U64.pack(self.listener.getsockname()[1]) + text(self.token)
        rails = queue_pairs = 1
        return b"".join(map(U64.pack, (ADDRESS_MAGIC, RANK, rails, queue_pairs))) + text(side)

    def key(self, rkey=None):
        values = (KEY_MAGIC, REGION_BYTES, self.mr.buf, 1, self.mr.rkey if rkey is None else rkey)
        return b"".join(map(U64.pack, values))

    def connect(self, address):
        """Joins a new queue pair of ours to the target's; returns it."""
        reader = Reader(address)
        assert reader.u64() == ADDRESS_MAGIC
        rank = reader.u64()
        assert (reader.u64(), reader.u64()) == (1, 1)  # rails, queue pairs
        side = Reader(reader.text())
        assert side.u64() == SIDE_MAGIC
        host, port, token = side.text().decode(), side.u64(), side.text()
        qp = self.new_qp()
        question = self.handshake(qp)
        with socket.create_connection((host, port)) as connection:
            connection.sendall(token + U64.pack(len(question)) + question)
            answer = Reader(receive(connection, U64.unpack(receive(connection, 8))[0]))
        assert answer.u64() == 0, answer.text()
        their_rank, theirs = self.read_handshake(answer.text())
        assert their_rank == rank == 7
        self.join(qp, *theirs)
        return qp

    def post_receive(self, qp):
        qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.mr.buf, 64, self.mr.lkey)]))

    def write(self, qp, key, offset, length, immediate):
        reader = Reader(key)
        assert reader.u64() == KEY_MAGIC
        size, base, rails, rkey = (reader.u64() for _ in range(4))
        assert (size, rails) == (REGION_BYTES, 1)
        request = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            sg=[SGE(self.mr.buf, length, self.mr.lkey)],
            imm_data=socket.htonl(immediate),
        )
        request.set_wr_rdma(rkey, base + offset)
        request.send_flags = e.IBV_SEND_SIGNALED
        qp.post_send(request)

    def poll(self, seconds=20.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            count, completions = self.cq.poll(1)
            if count:
                return completions[0]
            time.sleep(0.0005)
        return None


class Target:
    def __init__(self, program):
        self.process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address, self.key = map(bytes.fromhex, self.process.stdout.readline().split())

    def send(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def ask(self, *words):
        self.send(*words)
        return self.answer()

    def answer(self):
        return self.process.stdout.readline().strip()

    def connect(self, peer, rkey=None):
        answer = self.ask("connect", peer.address().hex(), peer.key(rkey).hex())
        assert answer.startswith("connected "), answer
        return answer.split()[1]


def main():
    peer, target = Peer(), Target(sys.argv[1])
    pattern = bytes(i * 7 % 251 for i in range(7168))

    qp = peer.connect(target.address)
    peer.mr.write(pattern, len(pattern))
    target.send("await")
    peer.write(qp, target.key, 4096, len(pattern), 0xDEADBEEF)
    assert peer.poll().status == e.IBV_WC_SUCCESS
    answer = target.answer()
    assert answer == f"arrived {0xDEADBEEF} {sum(pattern)}", answer
    print("pyverbs wrote into our region: bytes and immediate are right")

    handle = target.connect(peer)
    target.ask("fill", 5)
    assert peer.accepted.empty()  # nothing was written yet
    target.send("write", handle, 100, 200, 5000, 12345)
    accepted = peer.accepted.get(timeout=20)
    peer.post_receive(accepted)
    assert target.answer() == "sent"
    got = peer.poll()
    assert got.status == e.IBV_WC_SUCCESS, got.status
    assert (got.byte_len, socket.ntohl(got.imm_data)) == (5000, 12345)
    assert peer.mr.read(5000, 200) == bytes((5 + 100 + i) % 256 for i in range(5000))
    print("pyverbs read what we wrote: bytes and immediate are right")

    target.send("write", handle, 0, 0, 16, 1)
    time.sleep(0.5)
    peer.post_receive(accepted)
    assert target.answer() == "sent"
    assert peer.poll().status == e.IBV_WC_SUCCESS
    print("no receive posted: the write waits until there is one")

    accepted.close()
    answer = target.ask("write", handle, 0, 0, 16, 1)
    assert answer == "sent", answer  # its bytes are free; the peer is gone
    answer = target.ask("write", handle, 0, 0, 16, 1)
    assert answer.startswith("error ") and "rank 3" in answer and "queue pair" in answer, answer
    print(f"queue pair gone: {answer}")

    handle = target.connect(peer, rkey=peer.mr.rkey ^ 0x55)
    target.send("write", handle, 0, 0, 16, 1)
    accepted = peer.accepted.get(timeout=20)
    peer.post_receive(accepted)
    answer = target.answer()
    assert "rank 3" in answer and "remote access error" in answer, answer
    print(f"wrong key: {answer}")

    target.send("quit")
    assert target.process.wait(10) == 0
    print("pyverbs: all passed")


if __name__ == "__main__":
    main()
