import pytest
import torch

from radixkv.kernels.pack_queries import pack_queries


@pytest.mark.parametrize(("num_kv_heads", "group_size"), [(2, 3), (1, 7), (2, 1)])
@pytest.mark.parametrize("is_heads_first", [False, True])
@pytest.mark.parametrize("num_joined", [0, 1, 40])
def test_rows_of_a_kv_head_follow_each_other_and_then_the_joined_ones(
    num_joined: int, is_heads_first: bool, num_kv_heads: int, group_size: int, kernel_device: str
) -> None:
    num_tokens, head_dim = 17, 40
    query = torch.randn(num_tokens, num_kv_heads * group_size, head_dim, device=kernel_device)
    joined_rows = torch.randint(num_tokens * group_size, (num_joined, 3), dtype=torch.int32, device=kernel_device)
    given = query.transpose(0, 1).contiguous().transpose(0, 1) if is_heads_first else query
    packed = pack_queries(given, joined_rows, num_kv_heads)
    own = query.view(num_tokens, num_kv_heads, group_size, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    assert packed.is_contiguous()
    assert torch.equal(packed, torch.cat((own, own[:, joined_rows[:, 0].long()]), dim=1))
