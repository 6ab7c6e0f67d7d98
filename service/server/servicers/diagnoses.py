"""Writes reports about the misses of a server as messages, for `CacheService.Diagnose`."""

from __future__ import annotations

from radixkv.doctor.advice import ADVICE
from radixkv.doctor.finding import Sample, Side
from radixkv.doctor.miss_profile import MissReport, TenantGroup
from radixkv.v1 import cache_pb2, explain_pb2

DEFAULT_MAX_CAUSES = 10
MAX_CAUSES = 100


def diagnosis_message(report: MissReport, *, has_samples: bool) -> cache_pb2.DiagnoseResponse:
    """Write a report. Samples, which contain tokens and text, are written only with `has_samples`."""
    return cache_pb2.DiagnoseResponse(
        covered_s=report.covered_s,
        causes=[_cause_message(tenant_group, has_samples=has_samples) for tenant_group in report.groups],
        further_causes=report.num_other_groups,
        **report.counts._asdict(),
    )


def _cause_message(tenant_group: TenantGroup, *, has_samples: bool) -> cache_pb2.DiagnosedCause:
    tenant, group = tenant_group
    advice = ADVICE[group.key.cause]
    return cache_pb2.DiagnosedCause(
        cause=group.key.cause.value,
        tenant=tenant,
        place=group.key.place,
        pattern=group.key.pattern,
        prompts=group.num_prompts,
        lost_tokens=group.lost_tokens,
        lost_s=group.lost_s,
        is_upper_bound=group.is_bound,
        min_position=group.min_position,
        max_position=group.max_position,
        sample=_sample_message(group.sample) if has_samples and group.sample is not None else None,
        what=advice.what,
        change=advice.change,
    )


def _sample_message(sample: Sample) -> cache_pb2.MissSample:
    return cache_pb2.MissSample(
        before_token_ids=sample.before_ids,
        before_text=sample.text_before,
        prompt=_excerpt_message(sample.prompt),
        branch=_excerpt_message(sample.earlier),
        prompt_span_tokens=sample.prompt.span,
        branch_span_tokens=sample.earlier.span,
    )


def _excerpt_message(side: Side) -> explain_pb2.Excerpt:
    return explain_pb2.Excerpt(
        token_ids=side.token_ids,
        different_tokens=side.num_different,
        different_text=side.text,
        equal_text=side.text_after,
    )
