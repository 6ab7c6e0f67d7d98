"""A profile counts misses in groups by cause, in bounded memory."""

from __future__ import annotations

import pytest

from radixkv.doctor.causes import MissCause
from radixkv.doctor.finding import Finding, GroupKey, Replacement, Sample, Side
from radixkv.doctor.miss_profile import (
    MAX_GROUPS,
    MAX_TENANT_GROUPS,
    MAX_TENANTS,
    MissCounts,
    MissProfile,
    MissReport,
    report_of,
)
from radixkv.namespace import OTHER_TENANTS, Namespace


def finding(place: str, lost_tokens: int = 100, position: int = 5, text: str = "") -> Finding:
    """Return a finding. Findings at different places of a prompt, such as "tools", are in different groups."""
    side = Side((1, 2), 1, text, text, 1)
    return Finding(
        GroupKey(MissCause.RANDOM_ID, place),
        position,
        lost_tokens,
        replacements=(Replacement(0, 1, bytes(4)),),
        namespace=Namespace("model"),
        sample=Sample((7,), text, side, side, "", ""),
    )


def report(*profiles: MissProfile, tenant: str | None = None, max_groups: int = 1000) -> MissReport:
    return report_of([part for each in profiles for part in each.misses_of(tenant)], 60.0, max_groups)


def test_findings_of_one_key_and_tenant_are_one_group() -> None:
    profile = MissProfile()
    profile.add("a", finding("x", 100, position=5), 1.0)
    profile.add("a", finding("x", 50, position=9), 0.5)
    profile.add("b", finding("x", 400), None)
    first, second = report(profile).groups
    assert (first.tenant, first.group.lost_tokens, first.group.lost_s) == ("b", 400, None)
    group = second.group
    assert (second.tenant, group.num_prompts, group.lost_tokens, group.lost_s) == ("a", 2, 150, 1.5)
    assert (group.min_position, group.max_position) == (5, 9)


def test_a_report_of_a_tenant_has_nothing_of_others() -> None:
    profile = MissProfile()
    for tenant in "ab":
        profile.count(tenant, MissCounts(prompts=3, prompt_tokens=10))
        profile.add(tenant, finding(tenant), None)
    found = report(profile, tenant="a")
    assert [each.tenant for each in found.groups] == ["a"]
    assert (found.counts.prompts, report(profile).counts.prompts) == (3, 6)
    assert report(profile, tenant="c") == MissReport(60.0, MissCounts(), (), 0)


def test_profiles_are_added_up_and_the_groups_with_the_smallest_losses_are_left_out() -> None:
    profiles = MissProfile(), MissProfile()
    for profile in profiles:
        profile.count("a", MissCounts(prompts=1))
        profile.add("a", finding("x", 10), 1.0)
    profiles[0].add("a", finding("y", 15), 1.0)
    profiles[1].add("a", finding("z", 1), 1.0)
    found = report(*profiles, max_groups=2)
    assert [(each.group.key.place, each.group.lost_tokens) for each in found.groups] == [("x", 20), ("y", 15)]
    assert (found.num_other_groups, found.counts.prompts) == (1, 2)


def test_a_new_group_replaces_the_one_with_the_smallest_loss_of_its_tenant() -> None:
    profile = MissProfile()
    profile.add("other", finding("x", 1), None)
    for number in range(MAX_TENANT_GROUPS + 5):
        profile.add("a", finding(str(number), 1000 + number), None)
    places = [each.group.key.place for each in report(profile, tenant="a").groups]
    assert sorted(map(int, places)) == [*range(5, MAX_TENANT_GROUPS + 5)]
    assert report(profile, tenant="other").groups


def test_all_tenants_together_have_a_bounded_number_of_groups() -> None:
    profile = MissProfile()
    for tenant in range(40):
        for number in range(20):
            profile.add(f"t{tenant}", finding(str(number), number + 1), None)
    groups = report(profile).groups
    assert len(groups) == MAX_GROUPS
    assert all(report(profile, tenant=f"t{tenant}").groups for tenant in range(40))


def test_further_tenants_are_counted_together_and_have_no_groups() -> None:
    profile = MissProfile()
    for number in range(MAX_TENANTS + 50):
        assert profile.can_track(f"t{number}") == (number < MAX_TENANTS)
        profile.count(f"t{number}", MissCounts(prompts=1))
        profile.add(f"t{number}", finding("x"), None)
    assert report(profile).counts.prompts == MAX_TENANTS + 50
    assert report(profile, tenant=OTHER_TENANTS).counts.prompts == 50
    assert not report(profile, tenant=OTHER_TENANTS).groups


def test_a_forgotten_tenant_frees_its_groups_for_others() -> None:
    profile = MissProfile()
    for tenant in range(MAX_GROUPS // 4):
        for number in range(4):
            profile.add(f"t{tenant}", finding(str(number), 5), None)
    profile.forget("t0")
    profile.forget("unknown")
    assert not report(profile, tenant="t0").groups
    assert report(profile, tenant="t1").groups
    for number in range(4):
        profile.add("new", finding(str(number), 1), None)
    assert len(report(profile).groups) == MAX_GROUPS
    assert len(report(profile, tenant="new").groups) == 4


@pytest.mark.parametrize("length", [10, 100_000])
def test_the_texts_of_a_finding_are_cut_to_96_characters(length: int) -> None:
    profile = MissProfile()
    profile.add("a", finding("x", text="é" * length), None)
    (each,) = report(profile).groups
    sample = each.group.sample
    assert sample is not None
    assert len(sample.text_before) == len(sample.prompt.text) == len(sample.earlier.text_after) == min(length, 96)


def test_all_tenants_are_forgotten_at_once() -> None:
    profile = MissProfile()
    for tenant in "ab":
        profile.count(tenant, MissCounts(prompts=1))
        profile.add(tenant, finding("x"), None)
    profile.forget(None)
    assert report(profile) == MissReport(60.0, MissCounts(), (), 0)
    for number in range(MAX_GROUPS):
        profile.add(f"t{number // MAX_TENANT_GROUPS}", finding(str(number)), None)
    assert len(report(profile).groups) == MAX_GROUPS
