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
        self.brought: list[str] = []

    def pack(self, adapter: AdapterFiles) -> str:
        self.brought.append(adapter.digest)
        return f"{adapter.digest} there"


def filled(device: Device, digests: str, max_bytes: int = 20) -> AdapterSet[str]:
    held = AdapterSet(device.pack, max_adapters=8, max_bytes=max_bytes)
    for digest in digests:
        held.add(files(digest))
    return held


def test_an_adapter_is_copied_to_the_device_when_a_step_needs_it() -> None:
    device = Device()
    held = filled(device, "ab")
    assert (len(held), held.device_bytes, device.brought) == (2, 0, [])
    assert held.put_on_device(["a", "a"]) == {"a": "a there"}
    assert held.put_on_device(["a"]) == {"a": "a there"}
    assert device.brought == ["a"]
    assert (held.is_on_device("a"), held.is_on_device("b"), held.device_bytes) == (True, False, 10)


def test_the_least_recently_used_adapter_is_evicted_and_loaded_again() -> None:
    device = Device()
    held = filled(device, "abc")
    for digest in ("a", "b", "a", "c"):
        held.put_on_device([digest])
    assert [each for each in "abc" if held.is_on_device(each)] == ["a", "c"]
    assert held.put_on_device(["b"]) == {"b": "b there"}
    assert [each for each in "abc" if held.is_on_device(each)] == ["b", "c"]
    assert held.device_bytes == 20
    assert all(map(held.holds, "abc"))


def test_an_adapter_that_a_step_needs_is_not_evicted() -> None:
    device = Device()
    held = filled(device, "abc")
    held.put_on_device(["a", "b"])
    assert held.put_on_device(["a", "c"]) == {"a": "a there", "c": "c there"}
    assert device.brought == ["a", "b", "c"]


def test_a_step_has_all_its_adapters_even_beyond_the_limit() -> None:
    device = Device()
    held = filled(device, "abcd")
    assert list(held.put_on_device("abc")) == ["a", "b", "c"]
    assert held.device_bytes == 30
    held.put_on_device("d")
    assert held.device_bytes == 20
    assert held.is_on_device("c")


def test_limits_are_enforced() -> None:
    held = AdapterSet(Device().pack, max_adapters=1, max_bytes=20)
    with pytest.raises(InvalidAdapter, match=r"^model\.adapter_bytes: expected an adapter of at most 20 bytes, got 21"):
        held.add(files("large", 21))
    held.add(files("a"))
    held.add(files("a"))
    with pytest.raises(TooManyAdapters, match=r"^model\.max_adapters: expected at most 1 adapters, got one more"):
        held.add(files("b"))
    held.remove("a")
    held.add(files("b"))
    assert not held.holds("a")


def test_a_removed_adapter_is_neither_on_the_host_nor_on_the_device() -> None:
    held = filled(Device(), "ab")
    held.put_on_device("ab")
    held.remove("a")
    held.remove("a")
    assert (held.holds("a"), held.is_on_device("a"), held.device_bytes) == (False, False, 10)
    with pytest.raises(UnknownAdapter, match="expected one that is loaded, got digest a"):
        held.put_on_device(["b", "a"])
