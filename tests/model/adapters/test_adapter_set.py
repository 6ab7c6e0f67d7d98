from __future__ import annotations

import pytest

from radixkv.errors import InvalidAdapter, TooManyAdapters, UnknownAdapter
from radixkv.model.adapters.adapter_files import AdapterFiles
from radixkv.model.adapters.adapter_set import AdapterSet


def files(digest: str, num_bytes: int = 10) -> AdapterFiles:
    return AdapterFiles(digest, 8, num_bytes, None, {})


class Device:
    """A device that records the adapters that are packed for it."""

    def __init__(self) -> None:
        self.packed: list[str] = []

    def pack(self, adapter: AdapterFiles) -> str:
        self.packed.append(adapter.digest)
        return f"{adapter.digest} on the device"


def make_set(device: Device, digests: str, max_bytes: int = 20) -> AdapterSet[str]:
    """Make a set with an adapter of 10 bytes for each character of `digests`; at most `max_bytes` on the device."""
    adapters = AdapterSet(device.pack, max_adapters=8, max_bytes=max_bytes)
    for digest in digests:
        adapters.add(files(digest))
    return adapters


def test_an_adapter_is_copied_to_the_device_when_a_step_needs_it() -> None:
    device = Device()
    adapters = make_set(device, "ab")
    assert (len(adapters), adapters.device_bytes, device.packed) == (2, 0, [])
    assert adapters.put_on_device(["a", "a"]) == {"a": "a on the device"}
    assert adapters.put_on_device(["a"]) == {"a": "a on the device"}
    assert device.packed == ["a"]
    assert (adapters.is_on_device("a"), adapters.is_on_device("b"), adapters.device_bytes) == (True, False, 10)


def test_the_least_recently_used_adapter_is_evicted_and_loaded_again() -> None:
    device = Device()
    adapters = make_set(device, "abc")
    for digest in ("a", "b", "a", "c"):
        adapters.put_on_device([digest])
    assert [each for each in "abc" if adapters.is_on_device(each)] == ["a", "c"]
    assert adapters.put_on_device(["b"]) == {"b": "b on the device"}
    assert [each for each in "abc" if adapters.is_on_device(each)] == ["b", "c"]
    assert adapters.device_bytes == 20
    assert all(map(adapters.holds, "abc"))


def test_an_adapter_that_a_step_needs_is_not_evicted() -> None:
    device = Device()
    adapters = make_set(device, "abc")
    adapters.put_on_device(["a", "b"])
    assert adapters.put_on_device(["a", "c"]) == {"a": "a on the device", "c": "c on the device"}
    assert device.packed == ["a", "b", "c"]


def test_a_step_has_all_its_adapters_even_beyond_the_limit() -> None:
    device = Device()
    adapters = make_set(device, "abcd")
    assert list(adapters.put_on_device("abc")) == ["a", "b", "c"]
    assert adapters.device_bytes == 30
    adapters.put_on_device("d")
    assert adapters.device_bytes == 20
    assert adapters.is_on_device("c")


def test_limits_are_enforced() -> None:
    adapters = AdapterSet(Device().pack, max_adapters=1, max_bytes=20)
    with pytest.raises(InvalidAdapter, match=r"^model\.adapter_bytes: expected an adapter of at most 20 bytes, got 21"):
        adapters.add(files("large", 21))
    adapters.add(files("a"))
    adapters.add(files("a"))
    with pytest.raises(TooManyAdapters, match=r"^model\.max_adapters: expected at most 1 adapters, got one more"):
        adapters.add(files("b"))
    adapters.remove("a")
    adapters.add(files("b"))
    assert not adapters.holds("a")


def test_a_removed_adapter_is_neither_on_the_host_nor_on_the_device() -> None:
    adapters = make_set(Device(), "ab")
    adapters.put_on_device("ab")
    adapters.remove("a")
    adapters.remove("a")
    assert (adapters.holds("a"), adapters.is_on_device("a"), adapters.device_bytes) == (False, False, 10)
    with pytest.raises(UnknownAdapter, match="expected one that is loaded, got digest a"):
        adapters.put_on_device(["b", "a"])
