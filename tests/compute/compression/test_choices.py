import torch

from radixkv.compute.compression.choices import first_and_last, heaviest_and_last


def mass(*values: float) -> torch.Tensor:
    return torch.tensor([[values]])


def test_the_first_and_the_last_are_chosen() -> None:
    assert first_and_last(10, num_sinks=2, num_entries=5).tolist() == [0, 1, 7, 8, 9]
    assert first_and_last(10, num_sinks=0, num_entries=3).tolist() == [7, 8, 9]


def test_the_heaviest_before_the_window_are_chosen_and_the_window_whatever_it_weighs() -> None:
    chosen = heaviest_and_last(mass(0, 5, 1, 4, 2, 0, 0), window=2, num_entries=5, is_pooled=False)
    assert chosen.tolist() == [[[1, 3, 4, 5, 6]]]


def test_of_equally_heavy_ones_the_first_are_chosen() -> None:
    chosen = heaviest_and_last(mass(*[1.0] * 1000), window=1, num_entries=4, is_pooled=False)
    assert chosen.tolist() == [[[0, 1, 2, 999]]]


def test_each_head_chooses_for_itself() -> None:
    two = torch.tensor([[[3.0, 0, 0, 0], [0, 0, 3.0, 0]]])
    chosen = heaviest_and_last(two, window=1, num_entries=2, is_pooled=False)
    assert chosen.tolist() == [[[0, 3], [2, 3]]]


def test_neighbors_of_a_heavy_one_are_chosen_where_mass_is_pooled() -> None:
    lonely = mass(1, 1, 1, 1, 1, 1, 90, 1, 1, 1, 1, 0)
    assert heaviest_and_last(lonely, window=1, num_entries=6, is_pooled=True).tolist() == [[[4, 5, 6, 7, 8, 11]]]
