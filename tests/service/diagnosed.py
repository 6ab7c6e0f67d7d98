"""A fake engine that knows why some prompts were not reused."""

from __future__ import annotations

from radixkv.doctor.causes import MissCause
from radixkv.doctor.finding import Finding, GroupKey, Sample, Side
from radixkv.doctor.miss_profile import MissCounts
from radixkv.doctor.miss_profiler import MissProfiler
from tests.fakes import FakeClock
from tests.service.fake_engine import FakeEngine

SAMPLE = Sample(
    before_ids=(7, 8),
    text_before="build ",
    prompt=Side((1, 2, 3), num_different=2, text="4f2a9c1", text_after=" tools", span=7),
    earlier=Side((4, 5, 3), num_different=2, text="b07e55d", text_after=" tools", span=None),
    where="",
    earlier_where="",
)
RANDOM_ID = Finding(
    GroupKey(MissCause.RANDOM_ID, "tokens 16 to 255", "7 hexadecimal digits"),
    position=37,
    lost_tokens=61_000,
    sample=SAMPLE,
)
SALT_CHANGED = Finding(GroupKey(MissCause.SALT_CHANGED), position=0, lost_tokens=500, is_bound=True)
COUNTS = MissCounts(
    prompts=20,
    prompt_tokens=1_000_000,
    cached_tokens=400_000,
    misses=12,
    missed_tokens=590_000,
    examined_misses=6,
    examined_tokens=295_000,
    first_prompts=1,
)


def diagnosed_engine(*tenants: str) -> FakeEngine:
    """Return an engine with the same misses for each tenant, 90 s after its start."""
    engine, clock = FakeEngine(), FakeClock()
    engine.misses = profiler = MissProfiler(0.02, clock)
    for tenant in tenants:
        profile = profiler._current_profile()
        profile.count(tenant, COUNTS)
        for _ in range(3):
            profile.add(tenant, RANDOM_ID, 6.0)
        profile.add(tenant, SALT_CHANGED, None)
    clock.now_s += 90
    return engine
