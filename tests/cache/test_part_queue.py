import numpy as np

from radixkv.cache.part_queue import PartQueue


def queue_of(num_blocks: int) -> PartQueue:
    """Return a queue of the parts that a request has passed in a prompt of `num_blocks`; a window is one block."""
    queue = PartQueue(num_blocks=64, window_blocks=1)
    for block_id in range(num_blocks):
        queue.add_passed(block_id, position=block_id, num_blocks=num_blocks)
    return queue


def drain(queue: PartQueue) -> list[int]:
    order = []
    while (block_id := queue.pop()) is not None:
        order.append(block_id)
    return order


def test_windows_at_halves_and_quarters_of_a_prompt_are_evicted_last() -> None:
    queue = queue_of(32)
    queue.touch(np.arange(32, dtype=np.int32))  # so that all parts are equally old
    order = drain(queue)
    assert order[-1] == 15, "the window that ends in the middle"
    assert set(order[-3:]) == {7, 15, 23}
    assert set(order[-7:]) == {3, 7, 11, 15, 19, 23, 27}


def test_old_windows_are_evicted_although_their_position_is_better() -> None:
    queue = queue_of(8)
    for block_id in range(8, 60):
        queue.add_passed(block_id, position=0, num_blocks=8)
    order = drain(queue)
    assert order.index(3) < order.index(55), "the middle of an old prompt is evicted before the beginning of a new one"


def test_the_parts_of_a_prompt_that_was_used_again_are_evicted_later() -> None:
    queue = PartQueue(num_blocks=8, window_blocks=1)
    for block_id in range(4):
        queue.add_passed(block_id, position=0, num_blocks=1)
    queue.touch(np.array([0, 2], dtype=np.int32))
    assert drain(queue) == [1, 3, 0, 2]


def test_parts_where_a_request_ended_are_evicted_after_all_passed_parts() -> None:
    queue = PartQueue(num_blocks=8, window_blocks=1)
    queue.add_end(5)
    queue.add_passed(1, position=0, num_blocks=1)
    queue.add_end(6)
    queue.move(5, 7)
    assert (len(queue), queue.num_passed, sorted(queue)) == (3, 1, [1, 6, 7])
    queue.remove(6)
    assert drain(queue) == [1, 7]
