from radixkv.service.server.segments.segment_ids import SegmentIds


def test_a_number_is_that_of_a_place_and_tells_nothing_of_it():
    ids, again, other = SegmentIds(b"secret"), SegmentIds(b"secret"), SegmentIds(b"another")
    numbers = [ids.of(place) for place in range(10_000)]
    assert len(set(numbers)) == 10_000
    assert all(0 < number < 2**53 for number in numbers)
    assert numbers == [again.of(place) for place in range(10_000)]
    assert not set(numbers) & {other.of(place) for place in range(10_000)}
    assert numbers != sorted(numbers)


def test_no_segment_has_the_number_zero():
    assert SegmentIds().of(None) == 0


def test_servers_of_one_process_give_the_same_numbers():
    assert SegmentIds().of(7) == SegmentIds().of(7)
