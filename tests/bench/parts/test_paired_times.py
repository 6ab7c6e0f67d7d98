from bench.parts.paired_times import PromptTimes, middle_ratios

BASELINES = ("off", "off again")


def test_an_engine_is_compared_with_both_baselines() -> None:
    times = {"off": [PromptTimes(1.0, 2.0)] * 8, "off again": [PromptTimes(4.0, 2.0)] * 8}
    times["on"] = [PromptTimes(2.0, 3.0)] * 8
    assert middle_ratios("on", times, BASELINES).tolist() == [1.0, 1.5]
    assert middle_ratios("off again", times, BASELINES).tolist() == [4.0, 1.0]


def test_a_few_slow_prompts_do_not_change_the_ratio() -> None:
    equal = [PromptTimes(1.0, 1.0)] * 16
    slow = [*equal[4:], *[PromptTimes(50.0, 50.0)] * 4]
    assert middle_ratios("on", {"off": equal, "off again": equal, "on": slow}, BASELINES).tolist() == [1.0, 1.0]
