"""Plants faults in the traffic of agents, and checks that `radixkv doctor` finds them and measures their costs.

    python -m bench.doctor --json bench/results/doctor.json

For each fault, and for 1 %, 10 % and 50 % of the requests, the benchmark makes the same traffic with the fault and
without it. With `--live`, the traffic passes through the profiler of misses that a server runs, which examines every
miss here.

A replay of both kinds of traffic through the cache shows how many tokens each request loses to the faults. A request
with a fault that lost at least 64 tokens counts as found if the reported cause is that of the fault. A finding is false
if its request lost fewer than 32 tokens, or if the request has no fault and the reported cause is not that of the
planted fault. (A request without a fault may lose its last turn, if that turn was cached with a fault.) With `--live`,
groups of requests are counted instead; see `run_profiler`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.parts.planted_traffic import FAULTS, AgentRequest, Fault, Traffic
from bench.parts.result_file import write_result
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.doctor.diagnosis import diagnose
from radixkv.doctor.examination import Examiner
from radixkv.doctor.miss_profile import MissReport
from radixkv.doctor.miss_profiler import MAX_BRANCHES, MIN_MISSED_TOKENS, AdmittedPrompt, Branches, MissProfiler
from radixkv.doctor.prompt_log import LoggedPrompt, PromptLog
from radixkv.engine.miss_feed import MissFeed
from radixkv.explain.comparison import Decode
from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.cli.argument_types import positive
from radixkv.service.text.tokenizer import Tokenizer

SHARES = (0.01, 0.1, 0.5)
MIN_LOST_TOKENS = 64
_BLOCK_SIZE = 64
_MAX_CAUSES = 100


@dataclass(frozen=True, slots=True)
class Result:
    """How many requests with one fault were found.

    Attributes:
        fault: its name.
        cause: the cause that must be found.
        share: share of the requests in which it was planted.
        has_sessions: whether the log names the sessions.
        requests: number of requests.
        planted: requests with the fault that lost at least `MIN_LOST_TOKENS`; from `run_profiler`, all requests, with
            the fault or not, that lost at least `MIN_MISSED_TOKENS`.
        found: how many of the `planted` requests have the right cause.
        other_requests: requests without the fault.
        false: findings for requests that lost fewer than half of `MIN_LOST_TOKENS`, or that have no fault while the
            reported cause is not `cause`; for the live profiler, see `run_profiler`.
        lost_tokens: tokens that were computed only because of the fault.
        saved_tokens: tokens that fixing the right cause saves, as reported.
    """

    fault: str
    cause: str
    share: float
    has_sessions: bool
    requests: int
    planted: int
    found: int
    other_requests: int
    false: int
    lost_tokens: int
    saved_tokens: int

    @property
    def found_share(self) -> float:
        """Share of the planted requests that were found."""
        return self.found / max(1, self.planted)

    @property
    def false_share(self) -> float:
        """False findings per request."""
        return self.false / self.requests

    @property
    def gain_error(self) -> float:
        """Relative error of the tokens that would be saved."""
        return abs(self.saved_tokens - self.lost_tokens) / max(1, self.lost_tokens)


def computed_tokens(requests: Sequence[AgentRequest]) -> list[int]:
    """Return how many tokens of each prompt a cache that never evicts computes."""
    cache = PrefixCache(_num_blocks(requests), _BLOCK_SIZE, max_evicted_prefixes=0)
    computed = []
    for each in requests:
        with cache.lease(each.namespace, np.array(each.token_ids, "<u4").tobytes()) as lease:
            computed.append(lease.num_tokens - lease.cached_tokens)
            lease.commit(lease.num_tokens)
            lease.extend(np.array(each.answer_ids, "<u4").tobytes())
            lease.commit(lease.num_tokens)
    return computed


def run_doctor(traffic: Traffic, fault: Fault, share: float, *, has_sessions: bool = True) -> Result:
    """Plant a fault in a share of the requests, and compare what `radixkv doctor` finds with the truth."""
    requests = traffic.requests(fault, share)
    lost_tokens = _lost_tokens(traffic, requests)
    with PromptLog() as log:
        for index, each in enumerate(requests):
            session = each.session if has_sessions else ""
            prompt = LoggedPrompt(str(index), len(each.token_ids), each.namespace, session, each.time_s)
            log.add(prompt, each.token_ids, each.answer_ids)
        report = diagnose(log, Examiner(traffic.tokenizer.decode), min_lost_tokens=MIN_LOST_TOKENS)
    num_planted = num_found = num_false = 0
    for request, finding, num_lost in zip(requests, report.findings, lost_tokens, strict=True):
        is_right = finding is not None and finding.key.cause is fault.cause
        if request.is_planted and num_lost >= MIN_LOST_TOKENS:
            num_planted += 1
            num_found += is_right
        has_lost_enough = num_lost >= MIN_LOST_TOKENS // 2
        if finding is not None and not (has_lost_enough and (is_right or request.is_planted)):
            num_false += 1
    return Result(
        fault=fault.name,
        cause=fault.cause.value,
        share=share,
        has_sessions=has_sessions,
        requests=len(requests),
        planted=num_planted,
        found=num_found,
        other_requests=sum(not each.is_planted for each in requests),
        false=num_false,
        lost_tokens=sum(lost_tokens),
        saved_tokens=sum(each.saved_tokens or 0 for each in report.groups if each.key.cause is fault.cause),
    )


def run_profiler(traffic: Traffic, fault: Fault, share: float, *, has_sessions: bool = True) -> Result:
    """Plant a fault in a share of the requests, and compare what the profiler of a server finds with the truth.

    A profiler reports groups of requests with one cause, not single requests. So `found` is the size of the groups
    with the right cause, at most `planted`, the number of requests that lost tokens: those with the fault, and those
    after them that lose tokens as well. `false` is the size of all other groups, plus the number by which the size of
    the groups with the right cause exceeds `planted`.
    """
    requests = traffic.requests(fault, share)
    lost_tokens = _lost_tokens(traffic, requests)
    report = _live_profile(requests, traffic.tokenizer.decode, has_sessions=has_sessions)
    groups = [group for _, group in report.groups]
    right_groups = [each for each in groups if each.key.cause is fault.cause]
    num_planted = sum(each >= MIN_MISSED_TOKENS for each in lost_tokens)
    num_right = sum(each.num_prompts for each in right_groups)
    num_others = sum(each.num_prompts for each in groups) - num_right
    return Result(
        fault=fault.name,
        cause=fault.cause.value,
        share=share,
        has_sessions=has_sessions,
        requests=len(requests),
        planted=num_planted,
        found=min(num_right, num_planted),
        other_requests=sum(not each.is_planted for each in requests),
        false=num_others + max(0, num_right - num_planted),
        lost_tokens=sum(lost_tokens),
        saved_tokens=sum(each.lost_tokens for each in right_groups),
    )


def _live_profile(requests: Sequence[AgentRequest], decode: Decode, *, has_sessions: bool) -> MissReport:
    """Return what the profiler of a server, which has unlimited time here, finds in requests that arrive one by one.

    Args:
        requests: the requests, in the order in which they arrive.
        decode: returns the text of token ids.
        has_sessions: whether the requests name their sessions.
    """
    profiler = MissProfiler(share=1.0)
    profiler.load_decode = lambda: decode
    feed = MissFeed(profiler)
    cache = PrefixCache(_num_blocks(requests), _BLOCK_SIZE, listeners=[feed])

    def find_branches(segment_numbers: Sequence[int], tenant: str, session_id: str) -> Future[Branches]:
        branches: Future[Branches] = Future()
        branches.set_result(Branches(cache.branches_at(segment_numbers, tenant, session_id, MAX_BRANCHES), None, 0.0))
        return branches

    profiler.start(find_branches)
    try:
        for request in requests:
            profiler.add_step(1.0)
            tokens = np.array(request.token_ids, "<u4").tobytes()
            session_id = request.session if has_sessions else ""
            with cache.lease(request.namespace, tokens, session_id=session_id) as lease:
                reason = cache.explain(request.namespace, tokens, lease.cached_tokens)
                prompt = AdmittedPrompt(request.namespace, session_id, tokens, lease.cached_tokens, reason)
                profiler.add_prompt(prompt)
                _wait_until_idle(profiler)  # the thread of the profiler reads the cache, which is changed below
                lease.commit(lease.num_tokens)
                lease.extend(np.array(request.answer_ids, "<u4").tobytes())
                lease.commit(lease.num_tokens)
            feed.pass_segments()
        _wait_until_idle(profiler)
        return profiler.report(None, _MAX_CAUSES)
    finally:
        profiler.close()


def _wait_until_idle(profiler: MissProfiler) -> None:
    while profiler.is_busy:
        time.sleep(0.0002)


def _num_blocks(requests: Sequence[AgentRequest]) -> int:
    """Return enough blocks for all requests, with a partly filled one for each prompt and for each answer."""
    return sum((len(each.token_ids) + len(each.answer_ids)) // _BLOCK_SIZE + 2 for each in requests)


def _lost_tokens(traffic: Traffic, requests: Sequence[AgentRequest]) -> list[int]:
    """Return how many tokens each request computes only because of the faults."""
    pairs = zip(computed_tokens(requests), computed_tokens(traffic.requests(None, 0)), strict=True)
    return [with_fault - without for with_fault, without in pairs]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", help="directory or GGUF file with a tokenizer (default: the embedded one)")
    parser.add_argument("--sessions", type=positive, default=24)
    parser.add_argument("--turns", type=positive, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only faults whose name contains this text")
    parser.add_argument("--live", action="store_true", help="let the profiler that a server runs find the faults")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.tokenizer is None:
            write_tiny_files(Path(directory))
        tokenizer = Tokenizer.load(arguments.tokenizer or directory)
    traffic = Traffic(tokenizer, arguments.sessions, arguments.turns, arguments.seed)
    results = []
    for fault in FAULTS:
        if arguments.only not in fault.name:
            continue
        for share in SHARES:
            for has_sessions in (True, False):
                find_faults = run_profiler if arguments.live else run_doctor
                result = find_faults(traffic, fault, share, has_sessions=has_sessions)
                results.append(result)
                print(
                    f"{result.fault:42} {share:5.0%} {'sessions' if has_sessions else 'none':8} "
                    f"found {result.found}/{result.planted} ({result.found_share:.1%}), false {result.false} "
                    f"({result.false_share:.2%}), lost {result.lost_tokens:,}, saved {result.saved_tokens:,} "
                    f"({result.gain_error:.1%})",
                    flush=True,
                )
    rows = [
        asdict(each) | {"found_share": each.found_share, "false_share": each.false_share, "gain_error": each.gain_error}
        for each in results
    ]
    write_result(arguments.json, "bench.doctor", None, {"seed": arguments.seed, "results": rows})


if __name__ == "__main__":
    main()
