"""GPUs and network cards on the PCI bus, and the node that each hangs on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from placement.cgroups import read_int

_DISPLAY = 0x03
_NETWORK = 0x02
# Vendor ids from the PCI ID repository: those that make accelerators and NICs for servers.
_VENDORS = {
    0x10DE: "NVIDIA",
    0x1002: "AMD",
    0x8086: "Intel",
    0x15B3: "Mellanox",
    0x14E4: "Broadcom",
    0x1D0F: "Amazon",
    0x1AF4: "virtio",
    0x1A03: "ASPEED",
}


@dataclass(frozen=True)
class PciDevice:
    """A PCI function. `node` is None where firmware does not say. `names` are its network or InfiniBand
    interfaces.
    """

    address: str
    node: int | None
    vendor_id: int
    device_id: int
    driver: str | None
    names: tuple[str, ...] = ()

    @property
    def vendor(self) -> str:
        """The vendor in words, or its id in hexadecimal."""
        return _VENDORS.get(self.vendor_id, f"{self.vendor_id:04x}")


def read_pci_devices(sysfs: Path) -> tuple[tuple[PciDevice, ...], tuple[PciDevice, ...]]:
    """The GPUs (PCI base class 0x03) and network controllers (0x02) under `sysfs`, by address."""
    gpus: list[PciDevice] = []
    nics: list[PciDevice] = []
    root = sysfs / "bus/pci/devices"
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        base_class = (read_int(entry / "class") or 0) >> 16
        if base_class == _DISPLAY:
            gpus.append(_device(entry))
        elif base_class == _NETWORK:
            nics.append(_device(entry))
    return tuple(gpus), tuple(nics)


def _device(entry: Path) -> PciDevice:
    node = read_int(entry / "numa_node")
    driver = entry / "driver"
    return PciDevice(
        address=entry.name,
        # The kernel writes -1 where firmware names no node.
        node=node if node is not None and node >= 0 else None,
        vendor_id=read_int(entry / "vendor") or 0,
        device_id=read_int(entry / "device") or 0,
        driver=driver.resolve().name if driver.exists() else None,
        names=_interfaces(entry),
    )


def _interfaces(entry: Path) -> tuple[str, ...]:
    # virtio cards hold their interfaces one level down, in virtioN/net.
    directories = [*entry.glob("net"), *entry.glob("infiniband"), *entry.glob("virtio*/net")]
    return tuple(sorted(name.name for directory in directories for name in directory.iterdir()))
