import torch

from bench.latent.expanded import ExpandedStep
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionCall


class Recorder:
    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.value = call.value
        return call.query + call.layer


def test_values_are_filled_up_and_results_cut() -> None:
    recorder, query, value = Recorder(), torch.randn(3, 2, 6), torch.randn(3, 2, 4)
    got = ExpandedStep(recorder).attend(AttentionCall(5, query, query, value, Scoring(1.0)))
    assert torch.equal(recorder.value, torch.cat((value, torch.zeros(3, 2, 2)), -1))
    assert torch.equal(got, (query + 5)[..., :4])
