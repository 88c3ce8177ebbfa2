"""`python -m jax_ep info --nics`: what it names, and how it tells distances from sysfs."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jax_ep._cli import topology


def test_info_lists_interfaces_and_network_transports():
    command = [sys.executable, "-m", "jax_ep", "info", "--nics"]
    before = set(socket.if_nameindex())
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for _, name in before & set(socket.if_nameindex()):  # others may come and go meanwhile
        assert name in done.stdout
    for word in ("RDMA ports", "GPUs", "libfabric providers", "ofi", "verbs"):
        assert word in done.stdout


class _Sysfs:
    """A made-up /sys."""

    def __init__(self, root: Path):
        self.root = root
        for folder in ("bus/pci/devices", "class/infiniband"):
            (root / folder).mkdir(parents=True)

    def add_pci(self, path, node, *, vendor="0x15b3", pci_class="0x020700"):
        folder = self.root / "devices" / path
        folder.mkdir(parents=True)
        for name, text in (("numa_node", node), ("vendor", vendor), ("class", pci_class)):
            (folder / name).write_text(f"{text}\n")
        (self.root / "bus/pci/devices" / folder.name).symlink_to(folder)
        return folder

    def add_gpu(self, path, node):
        return self.add_pci(path, node, vendor="0x10de", pci_class="0x030200")

    def add_rdma(self, name, device):
        folder = self.root / "class/infiniband" / name
        folder.mkdir()
        if device is not None:
            (folder / "device").symlink_to(device)


@pytest.fixture
def sysfs(tmp_path):
    return _Sysfs(tmp_path)


def test_gpus_are_shown_with_rdma_devices_by_distance(sysfs):
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    sysfs.add_gpu(f"{switch}/0000:02:00.0/0000:03:00.0", 0)
    sysfs.add_rdma("mlx5_0", sysfs.add_pci(f"{switch}/0000:02:01.0/0000:04:00.0", 0))
    sysfs.add_rdma("mlx5_1", sysfs.add_pci(f"{switch}/0000:02:02.0/0000:05:00.0", 0))
    below = f"{switch}/0000:02:03.0/0000:06:00.0/0000:07:00.0/0000:08:00.0"
    sysfs.add_rdma("mlx5_2", sysfs.add_pci(below, 0))
    sysfs.add_rdma("mlx5_3", sysfs.add_pci("pci0000:00/0000:00:02.0/0000:09:00.0", 0))
    sysfs.add_rdma("mlx5_4", sysfs.add_pci("pci0000:40/0000:40:01.0/0000:41:00.0", 0))
    sysfs.add_rdma("mlx5_5", sysfs.add_pci("pci0000:80/0000:80:01.0/0000:81:00.0", 1))
    sysfs.add_rdma("rxe0", None)
    assert list(topology.distance_rows(sysfs.root)) == [
        (
            "0000:03:00.0",
            "same switch (PIX): mlx5_0, mlx5_1; several switches (PXB): mlx5_2; "
            "same host bridge (PHB): mlx5_3; same NUMA node (NODE): mlx5_4; "
            "far or unknown (SYS): mlx5_5, rxe0",
        )
    ]


def test_a_function_of_a_function_is_where_the_function_is(sysfs):
    sysfs.add_gpu("pci0000:00/0000:00:01.0/0000:03:00.0", 0)
    nic = sysfs.add_pci("pci0000:40/0000:40:01.0/0000:41:00.0", 0)
    (nic / "mlx5_core.sf.4").mkdir()
    sysfs.add_rdma("mlx5_0", nic / "mlx5_core.sf.4")
    assert [row for _, row in topology.distance_rows(sysfs.root)] == [
        "same NUMA node (NODE): mlx5_0"
    ]


def test_without_numa_nodes_nothing_is_called_near(sysfs):
    sysfs.add_gpu("pci0001:00/0001:00:00.0", -1)
    sysfs.add_rdma("mlx5_0", sysfs.add_pci("pci0002:00/0002:00:00.0", -1))
    assert [row for _, row in topology.distance_rows(sysfs.root)] == [
        "far or unknown (SYS): mlx5_0"
    ]


def test_gpus_are_told_from_other_devices(sysfs):
    sysfs.add_gpu("pci0000:80/0000:80:01.0/0000:90:00.0", 1)
    for address, vendor, pci_class in (
        ("0000:11:00.0", "0x1002", "0x120000"),  # MI300X
        ("0000:12:00.1", "0x10de", "0x040300"),  # a GPU's sound
        ("0000:13:00.0", "0x1a03", "0x030000"),  # the BMC's
        ("0000:14:00.0", "0x10de", "0x068000"),  # NVSwitch
    ):
        sysfs.add_pci(f"pci0000:00/{address}", 0, vendor=vendor, pci_class=pci_class)
    rows = dict(topology.distance_rows(sysfs.root))
    assert list(rows) == ["0000:11:00.0", "0000:90:00.0"]
    assert set(rows.values()) == {"this host has no RDMA device"}


def test_a_host_without_sysfs_has_no_gpus(tmp_path):
    assert list(topology.distance_rows(tmp_path / "nosuch")) == []
